//! What only a GPU can show. Without one every test here reports itself as ignored; `make gpu-check` packs this program for a machine
//! that has one.

use std::process::ExitCode;

use host::device::{self, Device};
use host::{DeviceChoice, NgramDraft};
use integration_tests::{
    answer, demo, demo_prompts, engine, golden_cases, greedy, prefilled, relative_error, streamed_and_launched,
    uploaded,
};
use libtest_mimic::{Arguments, Failed, Trial};
use model::sampling::argmax;
use model::{Checkpoint, Sampling};

const GPU: DeviceChoice = DeviceChoice::Cuda(0);

type Test = fn() -> Result<(), Failed>;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let cards = device::cards().unwrap_or_default();
    match cards.first() {
        Some(card) => println!("on {}", card.name),
        None => println!("ignored: there is no CUDA card (these tests need one)"),
    }
    let tests: [(&str, Test); 9] = [
        ("golden_logits", golden_logits),
        ("demo_logits_match_the_cpu", demo_logits_match_the_cpu),
        ("greedy_output_is_the_same_with_drafts", greedy_output_is_the_same_with_drafts),
        ("sampled_output_is_the_same_with_drafts", sampled_output_is_the_same_with_drafts),
        ("the_prompt_may_come_in_any_pieces", the_prompt_may_come_in_any_pieces),
        (
            "a_pass_over_a_prompt_gives_the_same_bits_in_any_pieces",
            a_pass_over_a_prompt_gives_the_same_bits_in_any_pieces,
        ),
        ("the_streamed_step_gives_the_bits_of_the_launches", the_streamed_step_gives_the_bits_of_the_launches),
        ("a_card_too_small_is_said_before_loading", a_card_too_small_is_said_before_loading),
        ("a_card_that_is_not_there_is_named", a_card_that_is_not_there_is_named),
    ];
    let trials =
        tests.into_iter().map(|(name, test)| Trial::test(name, test).with_ignored_flag(cards.is_empty())).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn golden_logits() -> Result<(), Failed> {
    for case in golden_cases() {
        let checkpoint = Checkpoint::open(&case.dir)?;
        let logits = engine(&checkpoint, GPU, case.prompt.len() + 1).score(&case.prompt)?;
        let error = relative_error(&logits, &case.logits);
        println!("{}: {error:.1e}", case.name);
        if error > 0.02 {
            return Err(format!("{}: relative error {error}", case.name).into());
        }
    }
    Ok(())
}

fn demo_logits_match_the_cpu() -> Result<(), Failed> {
    let checkpoint = demo();
    let (mut gpu, mut cpu) = (engine(&checkpoint, GPU, 1024), engine(&checkpoint, DeviceChoice::Cpu, 1024));
    let vocab = checkpoint.config.vocab_size;
    for prompt in demo_prompts(&checkpoint, 4, 1000) {
        let (found, expected) = (gpu.score(&prompt)?, cpu.score(&prompt)?);
        let error = relative_error(&found, &expected);
        let differ = found
            .chunks(vocab)
            .zip(expected.chunks(vocab))
            .filter(|(f, e)| {
                let (f, e) = (argmax(f) as usize, e);
                // A token that the reference prefers by more than the error allows.
                e[argmax(e) as usize] - e[f] > 2.0 * error * e.iter().fold(0.0, |m: f32, x| m.max(x.abs()))
            })
            .count();
        println!("relative error {error:.1e}, {differ} of 1000 choices differ by more than it");
        if error > 0.03 || differ > 0 {
            return Err(format!("relative error {error}, {differ} choices differ").into());
        }
    }
    Ok(())
}

fn greedy_output_is_the_same_with_drafts() -> Result<(), Failed> {
    let checkpoint = demo();
    let mut engine = engine(&checkpoint, GPU, 512);
    let mut accepted = 0;
    for prompt in demo_prompts(&checkpoint, 200, 48) {
        let plain = answer(&mut engine, &greedy(&prompt, 256, None));
        for draft in [NgramDraft::default(), NgramDraft { tokens: 15, max: 3, min: 1 }] {
            let drafted = answer(&mut engine, &greedy(&prompt, 256, Some(draft)));
            if plain.tokens != drafted.tokens {
                return Err(format!("differs with {draft:?} for {prompt:?}").into());
            }
            accepted += drafted.statistics.accepted;
        }
    }
    println!("{accepted} drafts accepted");
    if accepted < 1000 { Err("too few drafts were accepted to show anything".into()) } else { Ok(()) }
}

fn sampled_output_is_the_same_with_drafts() -> Result<(), Failed> {
    let checkpoint = demo();
    let mut engine = engine(&checkpoint, GPU, 512);
    for prompt in demo_prompts(&checkpoint, 20, 48) {
        let sampling = Sampling {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.01,
            repetition_penalty: 1.05,
            presence_penalty: 0.1,
            seed: prompt[0] as u64,
        };
        let mut run = |draft| answer(&mut engine, &host::Request { sampling, ..greedy(&prompt, 200, draft) }).tokens;
        if run(None) != run(Some(NgramDraft { tokens: 15, max: 3, min: 1 })) {
            return Err(format!("differs for {prompt:?}").into());
        }
    }
    Ok(())
}

fn the_prompt_may_come_in_any_pieces() -> Result<(), Failed> {
    let checkpoint = demo();
    let prompt = demo_prompts(&checkpoint, 1, 700).remove(0);
    let whole = answer(&mut engine(&checkpoint, GPU, 1024), &greedy(&prompt, 64, None)).tokens;
    let mut engine = engine(&checkpoint, GPU, 1024);
    for cut in [1, 63, 64, 65, 256, 511, 699] {
        // The first part stays in the cache, and the rest is run in chunks that begin there.
        answer(&mut engine, &greedy(&prompt[..cut], 1, None));
        let pieces = answer(&mut engine, &greedy(&prompt, 64, None));
        if pieces.tokens != whole {
            return Err(format!("differs when {cut} tokens came first").into());
        }
    }
    Ok(())
}

fn a_pass_over_a_prompt_gives_the_same_bits_in_any_pieces() -> Result<(), Failed> {
    let device = Device::cuda(0)?;
    if !device.is_hopper() {
        println!("not on this card: it has no products of warpgroups");
        return Ok(());
    }
    let checkpoint = demo();
    let tokens = demo_prompts(&checkpoint, 1, 2500).remove(0);
    let whole = prefilled(&device, &checkpoint, &tokens, tokens.len());
    for piece in [1024, 640, 77] {
        if prefilled(&device, &checkpoint, &tokens, piece) != whole {
            return Err(format!("differs in pieces of {piece}").into());
        }
    }
    Ok(())
}

fn the_streamed_step_gives_the_bits_of_the_launches() -> Result<(), Failed> {
    let device = Device::cuda(0)?;
    if !device.is_hopper() {
        println!("not on this card: it has no bulk copies");
        return Ok(());
    }
    let checkpoint = demo();
    for (length, rows) in [(17, 1), (300, 1), (300, 8), (64, 16), (1000, 16)] {
        let tokens = demo_prompts(&checkpoint, 1, length).remove(0);
        let [streamed, launched] =
            streamed_and_launched(&device, &checkpoint.config, uploaded(&device, &checkpoint), &tokens, rows);
        if streamed != launched {
            let error = relative_error(&streamed, &launched);
            return Err(format!("{rows} rows at {length}: relative difference {error}").into());
        }
    }
    Ok(())
}

fn a_card_too_small_is_said_before_loading() -> Result<(), Failed> {
    let mut checkpoint = demo();
    checkpoint.config.max_position_embeddings = 1 << 30;
    let options = host::LoadOptions { device: GPU, context: Some(1 << 28) };
    let mut loaded = false;
    let result = host::Engine::load(checkpoint, options, &mut |_, _| {
        loaded = true;
        std::ops::ControlFlow::Continue(())
    });
    match result {
        Err(error @ host::Error::ModelTooLarge { .. }) if !loaded => {
            println!("{error}");
            Ok(())
        }
        Err(error) => Err(format!("{error} (loading began: {loaded})").into()),
        Ok(_) => Err("it loaded".into()),
    }
}

fn a_card_that_is_not_there_is_named() -> Result<(), Failed> {
    match Device::cuda(99) {
        Err(host::Error::NoCuda { reason }) if reason.contains("no card 99") => Ok(()),
        Err(error) => Err(error.to_string().into()),
        Ok(_) => Err("card 99 opened".into()),
    }
}
