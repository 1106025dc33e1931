//! Loads a model and continues a text.
//!
//! `cargo run --release --package host --example generate_text -- [MODEL [DEVICE [PROMPT]]]` runs the demo model on the
//! CPU, unless told otherwise. Devices are those of `warpdraft --device`; `emulator` runs the GPU's kernels on the CPU,
//! and takes a minute.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;

use host::{Engine, LoadOptions, NgramDraft, Request};
use model::{Checkpoint, Sampling};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/demo");

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().unwrap_or_else(|| DEMO.into());
    let device = arguments.next().unwrap_or_else(|| "cpu".into()).parse()?;
    let prompt = arguments.next().unwrap_or_else(|| "impl fmt::Display for Point {\n".into());

    // What is on disk: config, tokenizer, weights.
    let checkpoint = Checkpoint::open(Path::new(&folder))?;
    let tokens = checkpoint.tokenizer.encode(&prompt)?;

    // The model on a device, with room for prompt and answer. The closure is told the bytes, and could stop the load.
    let options = LoadOptions { context: Some(256), ..LoadOptions::on(device) };
    let mut engine = Engine::load(checkpoint, options, &mut |_, _| ControlFlow::Continue(()))?;

    let request = Request {
        prompt: tokens,
        max_tokens: 48,
        // Greedy, unless a temperature is given.
        sampling: Sampling::default(),
        // Drafts from the text itself: fewer steps, the same text.
        draft: Some(NgramDraft::default().into()),
        stop: Vec::new(),
        ignore_end: false,
        form: None,
    };
    print!("{prompt}");
    let answer = engine.generate(&request, &mut |text| {
        print!("{text}");
        match std::io::stdout().flush() {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    })?;
    let statistics = &answer.statistics;
    println!();
    println!(
        "{}: {} tokens in {} steps, {:.0} tokens/s",
        engine.device(),
        statistics.tokens,
        statistics.steps,
        statistics.decode_rate()
    );
    Ok(())
}
