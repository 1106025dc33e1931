//! What surrounds the steps of a model on a card: drafting with a given acceptance, the time until a token is seen, and
//! the time that drafting and acceptance add to a step.
//!
//! `decode_loop SIZE`, such as `decode_loop 8B`. Random weights. Prints a line for each figure.

use std::time::Duration;

use benches::{Arguments, Run, tokens};
use host::forward::Forward;
use host::{Backend, Gpu, NgramDraft, Sequence};
use model::Sampling;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Tokens of an answer.
const TOKENS: usize = 361;
/// Tokens of the prompt.
const PROMPT: usize = 64;
/// Tokens that steps with the script give, in turn: 3 on average.
const LENGTHS: [usize; 3] = [1, 3, 5];
/// Tokens of the history with which drafting is timed.
const LONG: usize = 32_768;
/// Launches of drafting and acceptance in a row.
const REPEATS: u32 = 100;

fn main() -> Result<()> {
    let arguments = Arguments::read()?;
    let size = arguments.word(0).ok_or("usage: decode_loop SIZE")?;
    let (config, device) = arguments.subject(size)?;
    Forward::check(&config)?;
    let capacity = LONG + 32 * REPEATS as usize;
    let mut gpu = Gpu::with_weights(&device, &config, arguments.weights(&config, &device)?, capacity)?;
    let prompt = tokens(&config, PROMPT);

    // Drafts of which a known number is confirmed.
    let plain = Run::of(&mut gpu, &prompt, TOKENS, None)?;
    benches::draft_by_script(&mut gpu, &prompt, &plain.tokens, &LENGTHS)?;
    for adaptive in [true, false] {
        let drafted =
            Run::of(&mut gpu, &prompt, TOKENS, Some(NgramDraft { adaptive, ..NgramDraft::default() }.into()))?;
        if drafted.tokens != plain.tokens {
            return Err("drafts have changed the tokens".into());
        }
        println!(
            "{size} scripted, adaptive {adaptive}: {:.2} tokens a step, {:.2} rows a step, {:.1} tokens/s, {:.3} x the {:.1} without drafts",
            (TOKENS - 1) as f64 / drafted.steps.len() as f64,
            1.0 + drafted.drafted as f64 / drafted.steps.len() as f64,
            drafted.rate(),
            drafted.rate() / plain.rate(),
            plain.rate()
        );
    }
    gpu.clear_script();

    // The time from enqueueing a step until the host has its token, less the time of a step when the next steps are
    // enqueued already.
    for draft in [None, Some(NgramDraft::default())] {
        gpu.set_run_ahead(2);
        let ahead = median(Run::of(&mut gpu, &prompt, TOKENS, draft.map(Into::into))?.steps);
        gpu.set_run_ahead(0);
        let waiting = median(Run::of(&mut gpu, &prompt, TOKENS, draft.map(Into::into))?.steps);
        println!(
            "{size} {}: a step in a row {ahead:.1} µs; enqueued alone until its token is seen {waiting:.1} µs; over it {:.1} µs",
            if draft.is_some() { "drafting" } else { "no drafts" },
            waiting - ahead
        );
    }

    // What drafting adds to a step with a long history, and what acceptance and planning take without drafts.
    gpu.set_run_ahead(2);
    let long = tokens(&config, LONG);
    let plain = median(Run::of(&mut gpu, &long, TOKENS, None)?.steps);
    let drafting = median(Run::of(&mut gpu, &long, TOKENS, Some(NgramDraft::default().into()))?.steps);
    gpu.begin(&sequence(&long, LONG + 24 * REPEATS as usize, None), &mut |_, _| std::ops::ControlFlow::Continue(()))?;
    gpu.step()?;
    device.synchronize()?;
    let accept = gpu.time_around_step(REPEATS)?;
    println!(
        "{size} beside a step, {LONG} tokens: drafting {drafting:.1} µs, no drafts {plain:.1} µs, plan and accept alone {accept:.2} µs; together {:.2} µs",
        drafting - plain + accept
    );

    // Drafting, planning and acceptance by themselves.
    for (length, kind) in [(512, "nothing matches"), (LONG, "nothing matches"), (LONG, "repetitive")] {
        let prompt = if kind == "repetitive" {
            tokens(&config, 64).into_iter().cycle().take(length).collect()
        } else {
            tokens(&config, length)
        };
        let draft = Some(NgramDraft::default());
        let most = length + 24 * REPEATS as usize;
        gpu.begin(&sequence(&prompt, most, draft), &mut |_, _| std::ops::ControlFlow::Continue(()))?;
        gpu.step()?;
        device.synchronize()?;
        let time = gpu.time_around_step(REPEATS)?;
        println!("{size} draft, plan and accept, {length} tokens, {kind}: {time:.2} µs");
    }
    Ok(())
}

fn sequence(prompt: &[u32], max_length: usize, draft: Option<NgramDraft>) -> Sequence<'_> {
    Sequence {
        prompt,
        max_length,
        sampling: Sampling::default(),
        draft: draft.map(Into::into),
        stop_tokens: &[],
        form: None,
    }
}

/// The median in microseconds.
fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e6
}
