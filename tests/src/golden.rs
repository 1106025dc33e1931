//! The golden checkpoints of `tests/golden`, made by `scripts/make_golden.py`.

use std::path::{Path, PathBuf};

use model::WeightsMode;
use serde::Deserialize;

use crate::repository;

/// A small checkpoint with the logits that Hugging Face transformers computes for a prompt, in f32.
#[derive(Debug, Clone)]
pub struct GoldenCase {
    /// Name of the case and of its directory.
    pub name: String,
    /// The checkpoint's directory.
    pub dir: PathBuf,
    /// What its matrices are made of while they are loaded.
    pub weights: WeightsMode,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// Logits at every position of the prompt, `[prompt.len(), vocab]`.
    pub logits: Vec<f32>,
    /// Columns of `logits`.
    pub vocab: usize,
    /// Texts with the ids that transformers gives them; none in older files.
    pub texts: Vec<(String, Vec<u32>)>,
    /// A conversation, if there is a template.
    pub chat: Option<GoldenChat>,
}

/// A conversation and what transformers makes of it.
#[derive(Debug, Clone, Deserialize)]
pub struct GoldenChat {
    /// The messages.
    pub messages: Vec<model::Message>,
    /// The prompt, with the assistant's turn opened.
    pub text: String,
    /// Its ids.
    pub ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Description {
    prompt: Vec<u32>,
    rows: usize,
    vocab: usize,
    #[serde(default)]
    texts: Vec<(String, Vec<u32>)>,
    chat: Option<GoldenChat>,
    /// The golden checkpoint whose weights are rounded while loading, where it has none of its own.
    checkpoint: Option<String>,
    /// How they are rounded.
    weights: Option<String>,
}

impl GoldenCase {
    /// Opens the checkpoint.
    ///
    /// # Panics
    /// If it does not open: it is part of the repository.
    pub fn open(&self) -> model::Checkpoint {
        let options = model::OpenOptions { weights: self.weights, ..model::OpenOptions::default() };
        model::Checkpoint::open_with(&self.dir, options).unwrap_or_else(|e| panic!("{}: {e}", self.name))
    }
}

/// The folder with the golden files.
pub fn golden_dir() -> PathBuf {
    repository().join("tests/golden")
}

/// Every golden checkpoint, by name.
///
/// # Panics
/// If the files are not in order: they are part of the repository.
pub fn golden_cases() -> Vec<GoldenCase> {
    golden_cases_in(&golden_dir())
}

/// A golden checkpoint for each weight format, and for each rounding while loading, by name: made by
/// `scripts/make_golden_formats.py`. On a device most are bf16 like others; FP8 in blocks has GEMMs of
/// its own on Hopper.
///
/// # Panics
/// If the files are not in order: they are part of the repository.
pub fn format_cases() -> Vec<GoldenCase> {
    golden_cases_in(&golden_dir().join("formats"))
}

fn golden_cases_in(folder: &Path) -> Vec<GoldenCase> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let paths = entries.map(|e| e.expect("the golden files list").path());
    let mut dirs: Vec<PathBuf> = paths.filter(|path| path.join("golden.json").is_file()).collect();
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
    let Description { prompt, vocab, texts, chat, checkpoint, weights, .. } = description;
    let dir = checkpoint.map_or(dir, |checkpoint| golden_dir().join(checkpoint));
    let weights = match weights.as_deref() {
        None => WeightsMode::Plain,
        Some("fp8") => WeightsMode::Fp8,
        Some("int4") => WeightsMode::Int4,
        Some(other) => panic!("{name}: no mode {other}"),
    };
    GoldenCase { name, prompt, logits, vocab, dir, weights, texts, chat }
}
