//! The repository's own model and text, for the Criterion benchmarks.

use std::path::{Path, PathBuf};

/// The repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The demo model.
///
/// # Panics
/// If it does not load: it is part of the repository.
pub fn demo() -> model::Checkpoint {
    model::Checkpoint::open(&repository().join("model/demo")).unwrap_or_else(|e| panic!("{e}"))
}

/// A text that the demo model has not seen.
///
/// # Panics
/// If it is not there: it is part of the repository.
pub fn text() -> String {
    let path = repository().join("model/demo/heldout.txt");
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}
