//! What the integration tests share: the golden checkpoints of `tests/golden`, made by `scripts/make_golden.py`.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// A small Qwen3 checkpoint with the logits that Hugging Face transformers computes for a prompt, in f32.
#[derive(Debug, Clone)]
pub struct GoldenCase {
    /// Name of the case and of its directory.
    pub name: String,
    /// The checkpoint's directory.
    pub dir: PathBuf,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Logits at every position of the prompt, `[prompt.len(), vocab]`.
    pub logits: Vec<f32>,
    /// Columns of `logits`.
    pub vocab: usize,
}

#[derive(Deserialize)]
struct Description {
    prompt: Vec<u32>,
    rows: usize,
    vocab: usize,
}

/// The folder with the golden files.
pub fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

/// Every golden checkpoint, by name.
///
/// # Panics
/// If the files are not in order: they are part of the repository.
pub fn golden_cases() -> Vec<GoldenCase> {
    let entries = std::fs::read_dir(golden_dir()).expect("tests/golden is there");
    let mut dirs: Vec<PathBuf> =
        entries.map(|e| e.expect("tests/golden lists").path()).filter(|p| p.is_dir()).collect();
    dirs.sort();
    dirs.into_iter().map(golden_case).collect()
}

fn golden_case(dir: PathBuf) -> GoldenCase {
    let read =
        |name: &str| std::fs::read(dir.join(name)).unwrap_or_else(|e| panic!("{name} in {}: {e}", dir.display()));
    let description: Description =
        serde_json::from_slice(&read("golden.json")).expect("golden.json describes the case");
    let logits: Vec<f32> = read("logits.f32").as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    assert_eq!(logits.len(), description.rows * description.vocab);
    assert_eq!(description.rows, description.prompt.len());
    let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
    GoldenCase { name, prompt: description.prompt, logits, vocab: description.vocab, dir }
}

/// The largest difference of two rows of numbers, as a share of the largest magnitude in `expected`.
pub fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let worst = found.iter().zip(expected).fold(0.0f32, |m, (a, b)| {
        // NaN must not vanish in a maximum.
        if (a - b).is_nan() { f32::INFINITY } else { m.max((a - b).abs()) }
    });
    worst / scale
}
