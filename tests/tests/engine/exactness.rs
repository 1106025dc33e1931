//! Drafting never changes the output: the demo model on the CPU, drafts on and off.

use host::{DeviceChoice, NgramDraft};
use integration_tests::{answer, demo, demo_prompts, engine, golden_dir, greedy};
use model::Sampling;
use rayon::prelude::*;

const PROMPT: usize = 48;
const TOKENS: usize = 256;

/// Runs `check` with each prompt and an engine of its own, and sums what it counts.
fn over_prompts(count: usize, check: impl Fn(&mut host::Engine, &[u32]) -> usize + Sync) -> usize {
    let checkpoint = demo();
    demo_prompts(&checkpoint, count, PROMPT)
        .par_iter()
        .map_init(|| engine(&checkpoint, DeviceChoice::Cpu, PROMPT + TOKENS), |engine, prompt| check(engine, prompt))
        .sum()
}

#[test]
fn greedy_output_is_the_same_with_drafts() {
    let accepted = over_prompts(12, |engine, prompt| {
        let plain = answer(engine, &greedy(prompt, TOKENS, None));
        let drafted = answer(engine, &greedy(prompt, TOKENS, Some(NgramDraft::default())));
        assert_eq!(plain.tokens.len(), TOKENS);
        assert_eq!(plain.tokens, drafted.tokens, "prompt {prompt:?}");
        drafted.statistics.accepted
    });
    println!("{accepted} drafts accepted");
    // Otherwise the test has shown nothing.
    assert!(accepted > 60, "{accepted}");
}

#[test]
fn sampled_output_is_the_same_with_drafts() {
    let accepted = over_prompts(10, |engine, prompt| {
        let sampling = Sampling {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            repetition_penalty: 1.05,
            presence_penalty: 0.1,
            frequency_penalty: 0.3,
            seed: prompt[0] as u64,
            ..Sampling::default()
        };
        let request = |draft| host::Request { sampling, ..greedy(prompt, 128, draft) };
        let plain = answer(engine, &request(None));
        let eager = NgramDraft { tokens: 15, max: 3, min: 1, adaptive: false };
        let drafted = answer(engine, &request(Some(eager)));
        assert_eq!(plain.tokens, drafted.tokens, "prompt {prompt:?}");
        drafted.statistics.accepted
    });
    assert!(accepted > 10, "{accepted}");
}

#[test]
fn hopeless_text_runs_hardly_any_drafts() {
    let hopeless = |engine: &mut host::Engine, prompt: &[u32], tokens| {
        // Nearly every token is as likely as the next, so that what followed earlier says nothing.
        let sampling = Sampling { temperature: 20.0, seed: prompt[0].into(), ..Sampling::default() };
        let run = |engine: &mut host::Engine, draft| {
            let generation = answer(engine, &host::Request { sampling, ..greedy(prompt, tokens, draft) });
            (generation.tokens, generation.statistics.drafted)
        };
        let draft = |adaptive| Some(NgramDraft { min: 1, adaptive, ..NgramDraft::default() });
        let (plain, _) = run(engine, None);
        let (eager_tokens, eager) = run(engine, draft(false));
        let (adaptive_tokens, adaptive) = run(engine, draft(true));
        assert_eq!((&eager_tokens, &adaptive_tokens), (&plain, &plain));
        println!("{adaptive} drafts where {eager} were proposed");
        // At a 64th of a step each, all of them together cost less than a step; on the CPU, where they cost more, there
        // are fewer.
        assert!(eager > tokens && adaptive < 64 && adaptive * 3 < eager, "{adaptive} of {eager}");
    };
    let checkpoint = model::Checkpoint::open(&golden_dir().join("tied_bf16")).unwrap();
    // Most tokens are in the prompt, so that there is always something to propose: on the GPU path, and on the CPU.
    let prompt: Vec<u32> = (0..190).collect();
    hopeless(&mut engine(&checkpoint, DeviceChoice::Emulator, 256), &prompt, 24);
    hopeless(&mut engine(&checkpoint, DeviceChoice::Cpu, 256), &prompt, 60);
}

#[test]
fn repetitive_text_goes_on_drafting() {
    let accepted = over_prompts(8, |engine, prompt| {
        // What the text says once more, it says as before.
        let prompt = [prompt, prompt].concat();
        let run = |engine: &mut host::Engine, adaptive| {
            let draft = NgramDraft { adaptive, ..NgramDraft::default() };
            answer(engine, &greedy(&prompt, 128, Some(draft))).statistics
        };
        let (eager, adaptive) = (run(engine, false), run(engine, true));
        assert!(adaptive.drafted <= eager.drafted);
        adaptive.accepted
    });
    println!("{accepted} drafts accepted");
    assert!(accepted > 80, "{accepted}");
}
