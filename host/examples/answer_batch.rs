//! Answers many requests at once. They are submitted while there is room, and answered in the order in which they end.
//!
//! `cargo run --release --package host --example answer_batch -- [MODEL [DEVICE]]` runs the demo model on the CPU,
//! unless told otherwise.

use std::ops::ControlFlow;
use std::path::Path;

use host::batch::{Batch, BatchOptions, Job};
use host::{LoadOptions, Request};
use model::{Checkpoint, Sampling};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/demo");
const PROMPTS: [&str; 4] = ["impl Drop for Guard {\n", "fn main() {\n", "pub struct Point {\n", "#[test]\nfn "];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().unwrap_or_else(|| DEMO.into());
    let device = arguments.next().unwrap_or_else(|| "cpu".into()).parse()?;

    let checkpoint = Checkpoint::open(Path::new(&folder))?;
    let encode = |prompt: &&str| checkpoint.tokenizer.encode(prompt);
    let prompts = PROMPTS.iter().map(encode).collect::<Result<Vec<_>, _>>()?;

    // Options that are not set come to as much as the device has memory for.
    let load = LoadOptions { context: Some(256), ..LoadOptions::on(device) };
    let options = BatchOptions { sequences: Some(4), ..BatchOptions::default() };
    let mut batch = Batch::load(checkpoint, load, options, &mut |_, _| ControlFlow::Continue(()))?;

    // Each prompt at three temperatures.
    let mut waiting: Vec<Job> = Vec::new();
    for temperature in [0.0, 0.5, 1.0] {
        for prompt in &prompts {
            let id = waiting.len() as u64;
            let sampling = Sampling { temperature, seed: id, ..Sampling::default() };
            let request = Request {
                prompt: prompt.clone(),
                max_tokens: 24,
                sampling,
                draft: None,
                stop: vec!["\n}".into()],
                ignore_end: false,
                form: None,
            };
            waiting.push(Job { id, request, logprobs: None });
        }
    }
    waiting.reverse();
    while !batch.is_idle() || !waiting.is_empty() {
        while batch.has_room()
            && let Some(job) = waiting.pop()
        {
            batch.submit(job)?;
        }
        // The last prompts then do not wait to be read together with others.
        batch.expect_more(!waiting.is_empty());
        // An answer that failed concerns its request alone. An error of the step concerns the device.
        for done in batch.step()? {
            let answer = done.answer?;
            println!("{:2}: {:?} ({:?})", done.id, answer.text, answer.finish);
        }
    }
    let metrics = batch.metrics();
    println!(
        "{}: {} tokens in {} steps, {} at once",
        batch.device(),
        metrics.generated_tokens,
        metrics.counts.steps,
        metrics.counts.most_running
    );
    Ok(())
}
