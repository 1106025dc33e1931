//! The Hugging Face hub: where its local cache is, what is in it, and how the rest gets there.
//!
//! The cache is shared with Hugging Face's own tools, and laid out as they do it:
//!
//! ```text
//! models--Qwen--Qwen3-8B/refs/main                       the commit that the branch stood at
//! models--Qwen--Qwen3-8B/snapshots/<commit>/config.json  a link to ../../blobs/<etag>
//! models--Qwen--Qwen3-8B/blobs/<etag>                    a file's content; <etag>.incomplete while it is being fetched
//! ```

#[cfg(feature = "hub")]
mod client;
#[cfg(feature = "hub")]
mod download;
#[cfg(feature = "hub")]
mod remote;

use std::path::{Path, PathBuf};

use crate::checkpoint::{Outline, read_regular};
use crate::source::DownloadProgress;
use crate::{Error, WeightsMode};

/// Where the hub and its local cache are. The default follows the environment as Hugging Face's own tools do.
#[derive(Debug, Clone, Default)]
pub struct HubOptions {
    /// Root address; else `HF_ENDPOINT`, else the public hub.
    pub endpoint: Option<String>,
    /// Cache directory; else `HF_HUB_CACHE`, `HUGGINGFACE_HUB_CACHE`, `$HF_HOME/hub`, `$XDG_CACHE_HOME/huggingface/hub`
    /// or `~/.cache/huggingface/hub`, the first that is set.
    pub cache_dir: Option<PathBuf>,
    /// Never touch the network. Also on if `HF_HUB_OFFLINE`, or else `TRANSFORMERS_OFFLINE`, is `1`, `true`, `yes` or
    /// `on`, in any case.
    pub offline: bool,
}

/// Names of files on the hub. `SINGLE` holds the weights if they are not split into shards.
const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
/// The files that a model has beside its weights.
pub(crate) const OF_MODEL: [&str; 2] = [CONFIG, TOKENIZER];
/// The files that a draft head has beside its weights.
pub(crate) const OF_HEAD: [&str; 1] = [CONFIG];
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

impl HubOptions {
    /// The local cache's directory.
    fn cache_dir(&self) -> Result<PathBuf, Error> {
        if let Some(dir) = &self.cache_dir {
            return Ok(dir.clone());
        }
        match path_variable("HF_HUB_CACHE").or_else(|| path_variable("HUGGINGFACE_HUB_CACHE")) {
            Some(dir) => Ok(dir),
            None => Ok(home()?.join("hub")),
        }
    }

    /// Whether the network is off limits.
    fn is_offline(&self) -> bool {
        // As in Hugging Face's tools, the second variable counts only if the first is not set.
        let variable = variable("HF_HUB_OFFLINE").or_else(|| variable("TRANSFORMERS_OFFLINE"));
        self.offline || variable.is_some_and(|value| is_true(&value))
    }

    /// The folder of a repository in the local cache.
    fn repository(&self, id: &str) -> Result<PathBuf, Error> {
        Ok(self.cache_dir()?.join(format!("models--{}", id.replace('/', "--"))))
    }

    /// The snapshot of a revision in the local cache, if it is complete: it has the files `texts`, and the weights.
    pub(crate) fn cached(&self, id: &str, revision: &str, texts: &[&str]) -> Result<Option<PathBuf>, Error> {
        let repository = self.repository(id)?;
        let commit = match read_regular(&repository.join("refs").join(revision)) {
            Ok(Some(commit)) => String::from_utf8_lossy(&commit).trim().to_owned(),
            _ => revision.to_owned(),
        };
        let snapshot = repository.join("snapshots").join(commit);
        Ok(is_complete(&snapshot, texts).then_some(snapshot))
    }

    /// Downloads a model into the local cache. Returns the snapshot's directory.
    pub(crate) fn download(
        &self,
        id: &str,
        revision: &str,
        progress: &mut dyn FnMut(DownloadProgress),
    ) -> Result<PathBuf, Error> {
        self.check_network(id, revision)?;
        #[cfg(feature = "hub")]
        return download::download(self, id, revision, progress);
        #[cfg(not(feature = "hub"))]
        {
            let _ = progress;
            Err(built_without(id, revision))
        }
    }

    /// Reads a model's config and headers from the hub.
    pub(crate) fn outline(&self, id: &str, revision: &str, mode: WeightsMode) -> Result<Outline, Error> {
        self.check_network(id, revision)?;
        #[cfg(feature = "hub")]
        return remote::outline(self, id, revision, mode);
        #[cfg(not(feature = "hub"))]
        {
            let _ = mode;
            Err(built_without(id, revision))
        }
    }

    fn check_network(&self, id: &str, revision: &str) -> Result<(), Error> {
        if !self.is_offline() {
            return Ok(());
        }
        Err(Error::Download {
            id: id.to_owned(),
            revision: revision.to_owned(),
            reason: format!("it is not in {}, and the network is off limits", self.cache_dir()?.display()),
            mend: "allow the network (unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE), or name a directory",
        })
    }
}

#[cfg(not(feature = "hub"))]
fn built_without(id: &str, revision: &str) -> Error {
    Error::Download {
        id: id.to_owned(),
        revision: revision.to_owned(),
        reason: "this program was built without downloads".to_owned(),
        mend: "build it with its default features (cargo build --release --package warpdraft), or name a directory",
    }
}

/// Hugging Face's own folder.
fn home() -> Result<PathBuf, Error> {
    if let Some(home) = path_variable("HF_HOME") {
        return Ok(home);
    }
    // Without HOME, the home directory in the user database is used; never a folder that others may write.
    let cache = path_variable("XDG_CACHE_HOME")
        .or_else(|| std::env::home_dir().filter(|home| !home.as_os_str().is_empty()).map(|home| home.join(".cache")));
    Ok(cache.ok_or(Error::NoHome)?.join("huggingface"))
}

/// The value of an environment variable. An empty one counts as not set.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn path_variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Whether Hugging Face's tools take `value` for yes.
fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].iter().any(|yes| value.eq_ignore_ascii_case(yes))
}

/// Whether a snapshot has these `texts`, and weights. A snapshot may be partial, since other tools fetch single files.
fn is_complete(dir: &Path, texts: &[&str]) -> bool {
    let has = |name: &str| dir.join(name).is_file();
    if !texts.iter().all(|text| has(text)) {
        return false;
    }
    if has(SINGLE) {
        return true;
    }
    let Ok(Some(index)) = read_regular(&dir.join(INDEX)) else { return false };
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap_or_default();
    let shards = index.get("weight_map").and_then(|map| map.as_object());
    shards.is_some_and(|map| map.values().all(|shard| shard.as_str().is_some_and(has)))
}
