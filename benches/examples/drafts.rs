//! What drafts by a model cost inside the loop, on a card.
//!
//! `drafts SIZE DRAFT`, such as `drafts 8B 0.6B`; `drafts small small` runs on the emulator. Random weights: the draft
//! model is always wrong. Prints a line for each measurement, and the figures as JSON.
//!
//! - `draft.model.us`: a step with a chain of drafts, less a step with as many wrong drafts by a script, divided by the
//!   number of drafts.
//! - `draft.wrong.ratio`: tokens a second with adaptive drafts by the model ÷ without drafts.

use std::time::Duration;

use benches::{Arguments, Run, shape, tokens};
use host::forward::Forward;
use host::weights::DeviceWeights;
use host::{Draft, DraftWeights, Gpu, ModelDraft, NgramDraft};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Drafts of a chain.
const CHAIN: u32 = 5;

/// The sizes of the measurements.
struct Scale {
    prompt: usize,
    tokens: usize,
    repeats: usize,
}

fn main() -> Result<()> {
    let arguments = Arguments::read()?;
    let (Some(size), Some(draft_size)) = (arguments.word(0), arguments.word(1)) else {
        return Err("usage: drafts SIZE DRAFT".into());
    };
    let (config, device) = arguments.subject(size)?;
    let draft_config = match draft_size {
        "small" => config.clone(),
        name => shape(name)?.1,
    };
    Forward::check(&config)?;
    Forward::check(&draft_config)?;
    if config.vocab_size != draft_config.vocab_size {
        return Err(format!("{size} and {draft_size} have not as many tokens").into());
    }
    let scale = if device.is_emulator() {
        Scale { prompt: 5, tokens: 8, repeats: 1 }
    } else {
        Scale { prompt: 64, tokens: 361, repeats: 4 }
    };
    let weights = DeviceWeights::random(&config, &device)?;
    let draft_weights = DeviceWeights::random(&draft_config, &device)?;
    let draft = Some(DraftWeights::Model(draft_config, Box::new(draft_weights)));
    let mut gpu = Gpu::with_all_weights(&device, &config, weights, draft, scale.prompt + scale.tokens)?;
    let prompt = tokens(&config, scale.prompt);

    let [plain] = best(&mut gpu, &prompt, &scale, [None])?;
    println!("{size}: without drafts {:.1} tokens/s, a step {:.1} µs", plain.rate(), median(&plain.steps));

    // A chain of drafts in every step, compared with as many drafts that cost nothing to make.
    let every = ModelDraft { tokens: CHAIN, depth: CHAIN, branches: 1, adaptive: false, ngram: None };
    let [chained] = best(&mut gpu, &prompt, &scale, [Some(every.into())])?;
    let script = NgramDraft { tokens: CHAIN, adaptive: false, ..NgramDraft::default() };
    benches::draft_by_script(&mut gpu, &prompt, &plain.tokens, &[1])?;
    let [scripted] = best(&mut gpu, &prompt, &scale, [Some(script.into())])?;
    gpu.clear_script();
    let (with_chain, with_script) = (median(&chained.steps), median(&scripted.steps));
    let of_draft = (with_chain - with_script) / f64::from(CHAIN);
    println!(
        "{size}, {CHAIN} drafts a step: by {draft_size} {with_chain:.1} µs, by a script {with_script:.1} µs; \
         {} of {} right, {} of {} by the script",
        chained.accepted(),
        chained.drafted,
        scripted.accepted(),
        scripted.drafted,
    );

    // Adaptive drafting: as many drafts as are worth it, which is none. In turns with steps without drafts: under load
    // a card's clocks fall, and steps of packed weights take longer then.
    let mut ratios = Vec::new();
    for (name, ngram) in [("alone", None), ("beside n-gram match", ModelDraft::default().ngram)] {
        let draft = Some(ModelDraft { ngram, ..ModelDraft::default() }.into());
        let [plain, wrong] = best(&mut gpu, &prompt, &scale, [None, draft])?;
        let ratio = wrong.rate() / plain.rate();
        println!(
            "{size}, adaptive drafts by {draft_size} {name}: {:.1} tokens/s, {ratio:.4} of {:.1} without; a step \
             {:.1} µs for {:.1}; {} of {} drafts right",
            wrong.rate(),
            plain.rate(),
            median(&wrong.steps),
            median(&plain.steps),
            wrong.accepted(),
            wrong.drafted,
        );
        ratios.push(ratio);
    }
    println!("{{\"draft.model.us\": {of_draft:.1}, \"draft.wrong.ratio\": {:.4}}}", ratios[0]);
    Ok(())
}

/// For each way to draft the fastest of several runs, in turns. All must give the same tokens.
fn best<const WAYS: usize>(
    gpu: &mut Gpu,
    prompt: &[u32],
    scale: &Scale,
    drafts: [Option<Draft>; WAYS],
) -> Result<[Run; WAYS]> {
    let mut best = drafts.map(|_| None::<Run>);
    // The first run loads kernels and lets clocks rise.
    for _ in 0..=scale.repeats {
        for (best, draft) in best.iter_mut().zip(drafts) {
            let run = Run::of(gpu, prompt, scale.tokens, draft)?;
            match best {
                Some(best) if best.tokens != run.tokens => {
                    return Err("the same request was answered with other tokens".into());
                }
                Some(best) if best.rate() >= run.rate() => {}
                _ => *best = Some(run),
            }
        }
    }
    Ok(best.map(|run| run.expect("a run of each")))
}

/// The median in microseconds.
fn median(times: &[Duration]) -> f64 {
    let mut times = times.to_vec();
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e6
}
