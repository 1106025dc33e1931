//! A draft model for the demo model.

use std::path::{Path, PathBuf};

use model::Checkpoint;

use crate::repository;

/// A checkpoint with the demo model's first layers alone: a model of its own, which agrees with the whole one now and
/// then. Its files stay for as long as this.
pub struct Shallow(PathBuf);

impl Shallow {
    /// With so many layers.
    pub fn new(layers: usize) -> (Self, Checkpoint) {
        let demo = repository().join("model/demo");
        let folder = std::env::temp_dir().join(format!("warpdraft-shallow-{layers}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "model.safetensors"] {
            std::fs::copy(demo.join(name), folder.join(name)).unwrap();
        }
        let config = std::fs::read_to_string(demo.join("config.json")).unwrap();
        let (whole, part) = (r#""num_hidden_layers": 6"#, format!(r#""num_hidden_layers": {layers}"#));
        assert!(config.contains(whole));
        std::fs::write(folder.join("config.json"), config.replace(whole, &part)).unwrap();
        let checkpoint = Checkpoint::open(Path::new(&folder)).unwrap_or_else(|e| panic!("{e}"));
        (Self(folder), checkpoint)
    }
}

impl Drop for Shallow {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
