//! Times the reading of a tokenizer:
//! `cargo run --release --package benches --example tokenizer_speed -- TOKENIZER.JSON [TIMES]`.

use std::path::PathBuf;
use std::time::Instant;

use model::{Error, Tokenizer};

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let path: PathBuf = arguments.next().unwrap_or_else(|| "model/demo/tokenizer.json".into()).into();
    let times: usize = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(5);
    let json = std::fs::read(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
    for _ in 0..times {
        let start = Instant::now();
        let tokenizer = Tokenizer::parse(&json, &path)?;
        let parsed = start.elapsed();
        let start = Instant::now();
        let ids = tokenizer.encode("impl Iterator for Counter {")?;
        let encoded = start.elapsed();
        println!(
            "{} tokens read in {:.1} ms; the first {} ids after {:.2} ms",
            tokenizer.vocab_size(),
            parsed.as_secs_f64() * 1e3,
            ids.len(),
            encoded.as_secs_f64() * 1e3
        );
    }
    Ok(())
}
