//! Drafting never changes the output: the demo model on the CPU, drafts on and off.

use host::{DeviceChoice, NgramDraft};
use integration_tests::{answer, demo, demo_prompts, engine, greedy};
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
    let accepted = over_prompts(200, |engine, prompt| {
        let plain = answer(engine, &greedy(prompt, TOKENS, None));
        let drafted = answer(engine, &greedy(prompt, TOKENS, Some(NgramDraft::default())));
        assert_eq!(plain.tokens.len(), TOKENS);
        assert_eq!(plain.tokens, drafted.tokens, "prompt {prompt:?}");
        drafted.statistics.accepted
    });
    println!("{accepted} drafts accepted");
    // Otherwise the test has shown nothing.
    assert!(accepted > 1000, "{accepted}");
}

#[test]
fn sampled_output_is_the_same_with_drafts() {
    let accepted = over_prompts(20, |engine, prompt| {
        let sampling = Sampling {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            repetition_penalty: 1.05,
            presence_penalty: 0.1,
            seed: prompt[0] as u64,
            ..Sampling::default()
        };
        let request = |draft| host::Request { sampling, ..greedy(prompt, 128, draft) };
        let plain = answer(engine, &request(None));
        let eager = NgramDraft { tokens: 15, max: 3, min: 1 };
        let drafted = answer(engine, &request(Some(eager)));
        assert_eq!(plain.tokens, drafted.tokens, "prompt {prompt:?}");
        drafted.statistics.accepted
    });
    assert!(accepted > 20, "{accepted}");
}
