//! Times the CPU forward pass: `cargo run --release --package benches --example cpu_speed -- [MODEL] [TOKENS]`.
//!
//! Prints tokens per second of a prompt in one call, of decoding one token at a time, and of steps of two, four and
//! eight tokens.

use std::time::Instant;

use model::{CpuModel, Error, Source};

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let source: Source = arguments.next().as_deref().unwrap_or("demo").parse()?;
    let tokens: usize = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(256);

    let start = Instant::now();
    let checkpoint = source.resolve(&mut |_| {})?;
    println!("open     {:8.1} ms", start.elapsed().as_secs_f64() * 1e3);

    let model = CpuModel::new(&checkpoint)?;
    let vocab = model.config().vocab_size;
    let prompt: Vec<u32> = (0..tokens).map(|i| (i * 7919 % vocab) as u32).collect();
    for (name, step) in [("prefill", tokens), ("decode", 1), ("steps of 2", 2), ("steps of 4", 4), ("steps of 8", 8)] {
        let mut cache = model.new_cache(tokens);
        let mut logits = vec![0.0; step * vocab];
        let start = Instant::now();
        for chunk in prompt.chunks(step) {
            let rows = if step == tokens { 1 } else { chunk.len() };
            model.forward(chunk, &mut cache, rows, &mut logits[..rows * vocab])?;
        }
        let rate = tokens as f64 / start.elapsed().as_secs_f64();
        println!("{name:10} {rate:8.0} tokens/s over {tokens} tokens");
    }
    Ok(())
}
