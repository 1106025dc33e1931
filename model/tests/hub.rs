//! Downloads from a hub that runs in the test itself, reached by the environment as a user would set it.
//!
//! One test, in a program of its own, since the environment belongs to the whole process.

#![cfg(feature = "hub")]
#![allow(clippy::unwrap_used)]

use model::{DownloadProgress, Error, Source};

use hub_server::{COMMIT, Hub, files_of};

#[path = "it/fixture.rs"]
#[allow(dead_code)]
mod fixture;
#[allow(dead_code)]
mod hub_server;

#[test]
fn a_hub_id_is_downloaded_once_with_progress() {
    let made = fixture::Fixture::new("BF16", false).sharded().write();
    let mut files = files_of(made.path());
    files.insert("README.md".into(), b"not wanted".to_vec());
    files.insert("pytorch_model.bin".into(), b"not wanted".to_vec());
    let wanted: usize =
        files.iter().filter(|(name, _)| !name.ends_with(".md") && !name.ends_with(".bin")).map(|f| f.1.len()).sum();

    let (hub, address) = Hub { files, ..Hub::default() }.start();
    let home = tempfile::TempDir::new().unwrap();
    // SAFETY: the only other threads are the server's, which do not read the environment.
    unsafe {
        std::env::set_var("HF_ENDPOINT", format!("http://{address}"));
        std::env::set_var("HF_HOME", home.path());
        for name in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"] {
            std::env::remove_var(name);
        }
        for name in ["NO_PROXY", "no_proxy"] {
            std::env::set_var(name, "127.0.0.1");
        }
    }

    let source: Source = "some/model".parse().unwrap();
    let mut steps: Vec<DownloadProgress> = Vec::new();
    let checkpoint = source.resolve(&mut |step| steps.push(step)).unwrap();
    assert_eq!(checkpoint.config, made.open().unwrap().config);
    assert_eq!(checkpoint.tensors().len(), made.open().unwrap().tensors().len());
    let last = steps.last().unwrap();
    assert_eq!((last.bytes, last.total_bytes), (wanted as u64, wanted as u64));
    assert!(steps.is_sorted_by_key(|s| s.bytes));
    let snapshot = home.path().join("hub/models--some--model/snapshots").join(COMMIT);
    assert!(snapshot.join("config.json").exists() && !snapshot.join("README.md").exists());

    // The second time it is in the cache, and nobody asks the hub.
    let before = hub.log.lock().unwrap().len();
    source.resolve(&mut |_| panic!("downloaded again")).unwrap();
    assert_eq!(hub.log.lock().unwrap().len(), before);

    let error = "some/thing".parse::<Source>().unwrap().resolve(&mut |_| {}).unwrap_err();
    assert!(
        matches!(&error, Error::Download { id, mend, .. } if id == "some/thing" && mend.contains("spelling")),
        "{error}"
    );
    assert!(!error.to_string().contains('\n'));
}
