//! What the user names with `--model`, and how it becomes a checkpoint: a directory, a hub id, or the demo.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::checkpoint::{OpenOptions, Outline};
pub use crate::hub::HubOptions;
use crate::hub::{OF_HEAD, OF_MODEL};
use crate::{Checkpoint, EagleHead, Error, WeightsMode};

/// The demo model's files, part of the program.
#[cfg(feature = "bundled-demo")]
pub(crate) const DEMO_FILES: &[(&str, &[u8])] = &[
    ("config.json", include_bytes!("../demo/config.json")),
    ("generation_config.json", include_bytes!("../demo/generation_config.json")),
    ("tokenizer.json", include_bytes!("../demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../demo/tokenizer_config.json")),
    ("model.safetensors", include_bytes!("../demo/model.safetensors")),
];

/// A model, by the name that the user gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A directory with a checkpoint's files.
    Dir(PathBuf),
    /// A repository on the Hugging Face hub: looked up in the local cache, else downloaded.
    Hub {
        /// `owner/name`.
        id: String,
        /// Branch, tag or commit.
        revision: String,
    },
    /// The model that comes with the program.
    Demo,
}

/// The branch that is meant if none is named.
const MAIN: &str = "main";

impl FromStr for Source {
    type Err = Error;

    /// `demo`; else a path that exists; else `owner/name` or `owner/name@revision`. Anything else is an error. Write
    /// `./demo` for a directory of that name.
    fn from_str(given: &str) -> Result<Self, Error> {
        if given == "demo" {
            return Ok(Source::Demo);
        }
        let path = Path::new(given);
        if path.exists() {
            return Ok(Source::Dir(path.to_owned()));
        }
        let (id, revision) = given.split_once('@').unwrap_or((given, MAIN));
        let word = |s: &str| {
            s.starts_with(|c: char| c.is_ascii_alphanumeric())
                && s.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        };
        let named = id.split_once('/').is_some_and(|(owner, name)| word(owner) && word(name));
        // A revision may hold slashes (`refs/pr/1`), but never climb out of the cache.
        let revision_ok = !revision.is_empty() && revision.split('/').all(word);
        if named && revision_ok {
            return Ok(Source::Hub { id: id.to_owned(), revision: revision.to_owned() });
        }
        Err(no_model(given))
    }
}

/// Says that there is no model at what the user wrote.
fn no_model(given: &str) -> Error {
    let given = given.to_owned();
    if Path::new(&given).is_file() { Error::ModelIsFile { given } } else { Error::NoSuchModel { given } }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Dir(path) => path.display().fmt(f),
            Source::Hub { id, revision } if revision == MAIN => f.write_str(id),
            Source::Hub { id, revision } => write!(f, "{id}@{revision}"),
            Source::Demo => f.write_str("demo"),
        }
    }
}

/// How far a download is. Byte counts only grow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DownloadProgress {
    /// Bytes here so far, over all files.
    pub bytes: u64,
    /// Bytes of all files to be fetched; 0 if it is not known.
    pub total_bytes: u64,
    /// The file that last moved.
    pub file: Option<String>,
}

impl Source {
    /// Finds the model, downloading it if need be, and opens it with every check.
    ///
    /// `progress` is called on this thread while a download goes on.
    ///
    /// # Errors
    /// Any [`Error`] about downloads, files and their content.
    pub fn resolve(&self, progress: &mut dyn FnMut(DownloadProgress)) -> Result<Checkpoint, Error> {
        self.resolve_with(&HubOptions::default(), OpenOptions::default(), progress)
    }

    /// As [`resolve`](Self::resolve), with options for the hub and for opening.
    ///
    /// # Errors
    /// Any [`Error`] about downloads, files and their content.
    pub fn resolve_with(
        &self,
        hub: &HubOptions,
        open: OpenOptions,
        progress: &mut dyn FnMut(DownloadProgress),
    ) -> Result<Checkpoint, Error> {
        match self {
            Source::Demo => Checkpoint::demo_with(OpenOptions { weights: open.weights, ..OpenOptions::default() }),
            Source::Dir(dir) if dir.is_dir() => Checkpoint::open_with(dir, open),
            Source::Dir(dir) => Err(no_model(&dir.display().to_string())),
            Source::Hub { id, revision } => {
                let dir = match hub.cached(id, revision, &OF_MODEL)? {
                    Some(dir) => dir,
                    None => hub.download(id, revision, progress)?,
                };
                Checkpoint::open_with(&dir, open)
            }
        }
    }

    /// Finds an EAGLE-3 head in the same way, and opens it with every check.
    ///
    /// # Errors
    /// Any [`Error`] about downloads, files and their content.
    pub fn resolve_head(
        &self,
        hub: &HubOptions,
        progress: &mut dyn FnMut(DownloadProgress),
    ) -> Result<EagleHead, Error> {
        match self {
            Source::Demo => Err(Error::NotAHead { path: "demo/config.json".into(), found: "model".into() }),
            Source::Dir(dir) if dir.is_dir() => EagleHead::open(dir),
            Source::Dir(dir) => Err(no_model(&dir.display().to_string())),
            Source::Hub { id, revision } => match hub.cached(id, revision, &OF_HEAD)? {
                Some(dir) => EagleHead::open(&dir),
                None => EagleHead::open(&hub.download(id, revision, progress)?),
            },
        }
    }

    /// What can be known about a model on the hub without its weights, if they were loaded in `mode`. Reads
    /// `config.json` and the headers, and keeps nothing. `None` for a model that is on this machine:
    /// [`resolve_with`](Self::resolve_with) opens it.
    ///
    /// # Errors
    /// Any [`Error`] about the hub, and about what the files say.
    pub fn outline(&self, hub: &HubOptions, mode: WeightsMode) -> Result<Option<Outline>, Error> {
        match self {
            Source::Hub { id, revision } if hub.cached(id, revision, &OF_MODEL)?.is_none() => {
                hub.outline(id, revision, mode).map(Some)
            }
            _ => Ok(None),
        }
    }
}
