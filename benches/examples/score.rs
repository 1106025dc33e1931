//! Writes the logits of a checkpoint for given tokens, for comparison with another engine.
//!
//! `score CHECKPOINT DEVICE TOKENS OUT`: `TOKENS` holds token ids as little-endian u32, `OUT` gets `[tokens, vocab]` as
//! little-endian f32.

use std::ops::ControlFlow;
use std::path::Path;

use host::{Engine, LoadOptions};
use model::Checkpoint;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [checkpoint, device, tokens, out] = arguments.as_slice() else {
        return Err("usage: score CHECKPOINT DEVICE TOKENS OUT".into());
    };
    let tokens: Vec<u32> = std::fs::read(tokens)?.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let checkpoint = Checkpoint::open(Path::new(checkpoint))?;
    let options = LoadOptions { context: Some(tokens.len() + 1), ..LoadOptions::on(device.parse()?) };
    let mut engine = Engine::load(checkpoint, options, &mut |_, _| ControlFlow::Continue(()))?;
    let logits = engine.score(&tokens)?;
    std::fs::write(out, bytemuck::cast_slice::<f32, u8>(&logits))?;
    Ok(())
}
