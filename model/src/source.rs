//! What the user names with `--model`, and how it becomes a checkpoint: a directory, a hub id, or the demo.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::mpsc;

use hf_hub::progress::{DownloadEvent, FileStatus, ProgressEvent, ProgressHandler};
use hf_hub::{HFClientBuilder, HFError};

use crate::checkpoint::OpenOptions;
use crate::{Checkpoint, Error};

/// The demo model's files, part of the program.
#[cfg(feature = "bundled-demo")]
pub(crate) const DEMO_FILES: &[(&str, &[u8])] = &[
    ("config.json", include_bytes!("../demo/config.json")),
    ("generation_config.json", include_bytes!("../demo/generation_config.json")),
    ("tokenizer.json", include_bytes!("../demo/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../demo/tokenizer_config.json")),
    ("model.safetensors", include_bytes!("../demo/model.safetensors")),
];

/// A model by the name that the user gives it.
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

    /// `demo`; else a directory that is there; else `owner/name` or `owner/name@revision`; else a path that is not there,
    /// which is an error. Write `./demo` for a directory of that name.
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
        Err(Error::NoSuchModel { given: given.to_owned() })
    }
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
    /// Bytes of all files to be fetched; 0 until it is known.
    pub total_bytes: u64,
    /// The file that last moved, if the hub's client says which.
    pub file: Option<String>,
}

/// Where the hub and its local cache are. The default follows the environment as Hugging Face's own tools do.
#[derive(Debug, Clone, Default)]
pub struct HubOptions {
    /// Root address; else `HF_ENDPOINT`, else the public hub.
    pub endpoint: Option<String>,
    /// Cache directory; else `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, `$HF_HOME/hub`, `$XDG_CACHE_HOME/huggingface/hub`
    /// or `~/.cache/huggingface/hub`, the first that is set.
    pub cache_dir: Option<PathBuf>,
    /// Never touch the network. Also on if the variable `HF_HUB_OFFLINE` is set to `1`.
    pub offline: bool,
}

impl Source {
    /// Finds the model, downloading it if need be, and opens it with every check.
    ///
    /// `progress` hears of a download as it goes; it is called on this thread.
    ///
    /// # Errors
    /// Any [`Error`] about downloads, files and their content.
    pub fn resolve(&self, progress: &mut dyn FnMut(DownloadProgress)) -> Result<Checkpoint, Error> {
        self.resolve_with(&HubOptions::default(), OpenOptions::default(), progress)
    }

    /// As [`resolve`](Self::resolve), with a say in where the hub is and what is checked.
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
            Source::Demo => Checkpoint::demo(),
            Source::Dir(dir) if dir.is_dir() => Checkpoint::open_with(dir, open),
            Source::Dir(dir) => Err(Error::NoSuchModel { given: dir.display().to_string() }),
            Source::Hub { id, revision } => {
                let dir = match hub.cached(id, revision) {
                    Some(dir) => dir,
                    None => hub.download(id, revision, progress)?,
                };
                Checkpoint::open_with(&dir, open)
            }
        }
    }
}

impl HubOptions {
    /// The local cache's directory.
    fn cache_dir(&self) -> PathBuf {
        if let Some(dir) = &self.cache_dir {
            return dir.clone();
        }
        let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        var("HF_HUB_CACHE")
            .or_else(|| var("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| var("HF_HOME").map(|home| home.join("hub")))
            .or_else(|| var("XDG_CACHE_HOME").map(|cache| cache.join("huggingface/hub")))
            .unwrap_or_else(|| var("HOME").unwrap_or_else(std::env::temp_dir).join(".cache/huggingface/hub"))
    }

    /// The snapshot of a revision in the local cache, if all its files are there.
    ///
    /// ```text
    /// models--Qwen--Qwen3-8B/refs/main                       the commit that the branch stood at
    /// models--Qwen--Qwen3-8B/snapshots/<commit>/config.json  a link to ../../blobs/<hash>
    /// ```
    fn cached(&self, id: &str, revision: &str) -> Option<PathBuf> {
        let repository = self.cache_dir().join(format!("models--{}", id.replace('/', "--")));
        let commit = match std::fs::read_to_string(repository.join("refs").join(revision)) {
            Ok(commit) => commit.trim().to_owned(),
            Err(_) => revision.to_owned(),
        };
        let snapshot = repository.join("snapshots").join(commit);
        is_complete(&snapshot).then_some(snapshot)
    }

    /// Downloads a model into the local cache; gives the snapshot's directory.
    fn download(&self, id: &str, revision: &str, progress: &mut dyn FnMut(DownloadProgress)) -> Result<PathBuf, Error> {
        let failed =
            |reason: String, mend| Error::Download { id: id.to_owned(), revision: revision.to_owned(), reason, mend };
        if self.offline || std::env::var_os("HF_HUB_OFFLINE").is_some_and(|v| v == "1") {
            let reason = format!("it is not in {}, and the network is off limits", self.cache_dir().display());
            return Err(failed(reason, "allow the network (unset HF_HUB_OFFLINE), or name a directory"));
        }
        let (owner, name) = hf_hub::split_id(id);
        let (events, received) = mpsc::channel();
        // The client calls its handler from threads of its own; the channel brings that back to this one. It closes when the
        // download ends and the handler is dropped, and that ends the loop.
        let outcome = std::thread::scope(|scope| {
            let worker = scope.spawn(move || {
                let mut client = HFClientBuilder::new().cache_dir(self.cache_dir());
                if let Some(endpoint) = &self.endpoint {
                    client = client.endpoint(endpoint.as_str());
                }
                let client = client.build_sync()?;
                client
                    .model(owner, name)
                    .snapshot_download()
                    .revision(revision)
                    .allow_patterns(WANTED.map(str::to_owned).to_vec())
                    .progress(Events(events))
                    .send()
            });
            let mut tally = Tally::default();
            for event in received {
                if let Some(step) = tally.add(event) {
                    progress(step);
                }
            }
            worker.join()
        });
        match outcome {
            Ok(Ok(dir)) => Ok(dir),
            Ok(Err(error)) => {
                let (reason, mend) = explain(&error);
                Err(failed(reason, mend))
            }
            Err(_) => Err(failed("the hub's client stopped unexpectedly".to_owned(), "try again")),
        }
    }
}

/// The files of a repository that matter here.
const WANTED: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model*.safetensors",
];

/// Whether a snapshot has what a checkpoint needs. Other tools fetch single files, so a snapshot may well be partial.
fn is_complete(dir: &Path) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    if !has("config.json") || !has("tokenizer.json") {
        return false;
    }
    let Ok(index) = std::fs::read(dir.join("model.safetensors.index.json")) else {
        return has("model.safetensors");
    };
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap_or_default();
    let shards = index.get("weight_map").and_then(|map| map.as_object());
    shards.is_some_and(|map| map.values().all(|shard| shard.as_str().is_some_and(has)))
}

/// Why a download failed, in one line, and what to do about it.
fn explain(error: &HFError) -> (String, &'static str) {
    const ID: &str = "check the spelling of the id, and set HF_TOKEN if the repository is private";
    let reason = error.to_string().replace('\n', " ");
    match error {
        HFError::RepoNotFound { .. } => (reason, ID),
        // The client asks for a revision first, and takes any refusal for a missing revision.
        HFError::RevisionNotFound { context: Some(context), .. }
            if context.error_code.as_deref() == Some("RepoNotFound") =>
        {
            ("there is no such repository".to_owned(), ID)
        }
        HFError::RevisionNotFound { .. } => {
            (reason, "check the spelling of the id and of the revision, the part after `@`")
        }
        HFError::AuthRequired { .. } | HFError::Forbidden { .. } => (
            reason,
            "check the spelling of the id; for a private or gated model, accept its terms on the hub and set HF_TOKEN",
        ),
        HFError::Io(_) => (reason, "check the free space and permissions of the cache directory (HF_HOME)"),
        _ => (reason, "check the network and HF_ENDPOINT, or name a directory"),
    }
}

/// Sends the client's download events over a channel.
struct Events(mpsc::Sender<DownloadEvent>);

impl ProgressHandler for Events {
    fn on_progress(&self, event: &ProgressEvent) {
        if let ProgressEvent::Download(event) = event {
            // The receiver outlives the download; were it gone, nobody would care for progress.
            let _ = self.0.send(event.clone());
        }
    }
}

/// Adds up the client's two kinds of progress: bytes of each file, and of the batch that goes over its own protocol.
#[derive(Default)]
struct Tally {
    total: u64,
    files: std::collections::HashMap<String, u64>,
    batch: u64,
    reported: u64,
}

impl Tally {
    /// The new state, if the event says anything about bytes.
    fn add(&mut self, event: DownloadEvent) -> Option<DownloadProgress> {
        let mut file = None;
        match event {
            // The first is of the whole snapshot; each file starts with one of its own.
            DownloadEvent::Start { total_bytes, .. } => self.total = self.total.max(total_bytes),
            DownloadEvent::Progress { files } => {
                for f in files {
                    let bytes = if f.status == FileStatus::Complete { f.total_bytes } else { f.bytes_completed };
                    let known = self.files.entry(f.filename.clone()).or_default();
                    *known = bytes.max(*known);
                    file = Some(f.filename);
                }
            }
            DownloadEvent::AggregateProgress { bytes_completed, .. } => self.batch = bytes_completed.max(self.batch),
            DownloadEvent::Complete => return None,
        }
        // A file of the batch may be told of both ways, so the sum can overshoot by it.
        let sum = self.files.values().sum::<u64>() + self.batch;
        self.reported = self.reported.max(if self.total > 0 { sum.min(self.total) } else { sum });
        Some(DownloadProgress { bytes: self.reported, total_bytes: self.total, file })
    }
}
