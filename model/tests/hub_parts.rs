//! Parts of files, from a hub that runs in the test itself: headers alone, and downloads that continue where they were
//! cut off.
//!
//! One test, in a program of its own, since the environment belongs to the whole process.

#![cfg(feature = "hub")]
#![allow(clippy::unwrap_used)]

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use model::source::HubOptions;
use model::{Error, OpenOptions, Source, WeightsMode};

use fixture::{Dir, Fixture, SHARDS};
use hub_server::{COMMIT, Hub, files_of};

#[path = "it/fixture.rs"]
#[allow(dead_code)]
mod fixture;
mod hub_server;

#[test]
fn parts_of_files() {
    // SAFETY: nothing else runs yet in this program.
    unsafe {
        for name in ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"] {
            std::env::remove_var(name);
        }
        for name in ["NO_PROXY", "no_proxy"] {
            std::env::set_var(name, "127.0.0.1,localhost");
        }
        std::env::set_var("HF_TOKEN", "hf_secret");
    }
    headers_alone_are_read_for_an_outline();
    an_outline_is_checked();
    a_download_that_is_cut_off_goes_on();
    a_download_goes_on_where_an_earlier_run_has_left_it();
    a_hub_without_parts_sends_all_again();
    the_key_goes_to_the_hub_alone();
    a_single_file_is_enough();
}

fn made() -> Dir {
    Fixture::new("BF16", false).sharded().write()
}

fn options(address: SocketAddr, cache: &Path) -> HubOptions {
    HubOptions { endpoint: Some(format!("http://{address}/")), cache_dir: Some(cache.to_owned()), offline: false }
}

fn source() -> Source {
    "some/model@v1.0".parse().unwrap()
}

fn blobs(cache: &Path) -> std::path::PathBuf {
    cache.join("models--some--model/blobs")
}

fn headers_alone_are_read_for_an_outline() {
    let dir = made();
    for (has_parts, lists_siblings) in [(true, true), (false, false)] {
        let (hub, address) = Hub { files: files_of(dir.path()), has_parts, lists_siblings, ..Hub::default() }.start();
        let cache = tempfile::TempDir::new().unwrap();
        let outline = source().outline(&options(address, cache.path()), WeightsMode::Plain).unwrap().unwrap();
        let expected = dir.open().unwrap().outline().unwrap();
        assert_eq!(outline.config, expected.config);
        assert_eq!(format!("{:?}", outline.tensors), format!("{:?}", expected.tensors));
        assert!(hub.asked("tokenizer.json").is_empty());
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0, "nothing is kept");
        if has_parts {
            for shard in SHARDS {
                let header = u64::from_le_bytes(dir.get(shard)[..8].try_into().unwrap());
                let sent: usize = hub.asked(shard).iter().map(|request| request.sent).sum();
                assert_eq!(sent as u64, 8 + header);
            }
        }
    }
}

fn an_outline_is_checked() {
    let dir = made();
    let mut files = files_of(dir.path());
    files.get_mut(SHARDS[1]).unwrap().pop();
    let (_hub, address) = Hub { files, has_parts: true, lists_siblings: true, ..Hub::default() }.start();
    let cache = tempfile::TempDir::new().unwrap();
    let error = source().outline(&options(address, cache.path()), WeightsMode::Plain).unwrap_err();
    assert!(matches!(&error, Error::WrongLength { path, .. } if path.ends_with(SHARDS[1])), "{error}");

    let error = "some/thing"
        .parse::<Source>()
        .unwrap()
        .outline(&options(address, cache.path()), WeightsMode::Plain)
        .unwrap_err();
    assert!(matches!(&error, Error::Download { id, .. } if id == "some/thing"), "{error}");
}

fn a_download_that_is_cut_off_goes_on() {
    let dir = made();
    let (hub, address) =
        Hub { files: files_of(dir.path()), has_parts: true, cut: Some(10_000), ..Hub::default() }.start();
    let cache = tempfile::TempDir::new().unwrap();
    let mut steps = Vec::new();
    let open = OpenOptions::default();
    source().resolve_with(&options(address, cache.path()), open, &mut |step| steps.push(step.bytes)).unwrap();
    assert!(steps.is_sorted());
    let parts: Vec<_> = SHARDS.iter().flat_map(|shard| hub.asked(shard)).filter_map(|request| request.range).collect();
    assert_eq!(parts, ["bytes=10000-"]);
    for name in SHARDS {
        assert_eq!(fs::read(blobs(cache.path()).join(name)).unwrap(), dir.get(name));
    }
    let refs = cache.path().join("models--some--model/refs/v1.0");
    assert_eq!(fs::read_to_string(refs).unwrap(), COMMIT);
}

fn a_download_goes_on_where_an_earlier_run_has_left_it() {
    let dir = made();
    let (hub, address) = Hub { files: files_of(dir.path()), has_parts: true, ..Hub::default() }.start();
    let cache = tempfile::TempDir::new().unwrap();
    fs::create_dir_all(blobs(cache.path())).unwrap();
    let shard = dir.get(SHARDS[0]);
    let unfinished = blobs(cache.path()).join(format!("{}.incomplete", SHARDS[0]));
    fs::write(&unfinished, &shard[..777]).unwrap();
    // A file that is already longer than it should be belongs to another version.
    fs::write(blobs(cache.path()).join("tokenizer.json.incomplete"), vec![0; 1 << 20]).unwrap();
    source().resolve_with(&options(address, cache.path()), OpenOptions::default(), &mut |_| {}).unwrap();
    let gets: Vec<_> = hub.asked(SHARDS[0]).into_iter().filter(|request| request.method == "GET").collect();
    assert_eq!((gets.len(), gets[0].range.as_deref(), gets[0].sent), (1, Some("bytes=777-"), shard.len() - 777));
    assert!(!unfinished.exists());
}

fn a_hub_without_parts_sends_all_again() {
    let dir = made();
    let (_hub, address) = Hub { files: files_of(dir.path()), cut: Some(10_000), ..Hub::default() }.start();
    let cache = tempfile::TempDir::new().unwrap();
    source().resolve_with(&options(address, cache.path()), OpenOptions::default(), &mut |_| {}).unwrap();
    for name in SHARDS {
        assert_eq!(fs::read(blobs(cache.path()).join(name)).unwrap(), dir.get(name));
    }
}

fn the_key_goes_to_the_hub_alone() {
    let dir = made();
    let (store, at) = Hub { files: files_of(dir.path()), has_parts: true, ..Hub::default() }.start();
    // Under another name, the store counts as another host.
    let elsewhere = Some(at);
    let (hub, address) = Hub { files: files_of(dir.path()), elsewhere, ..Hub::default() }.start();
    let cache = tempfile::TempDir::new().unwrap();
    let by_name =
        HubOptions { endpoint: Some(format!("http://localhost:{}", address.port())), ..options(address, cache.path()) };
    source().resolve_with(&by_name, OpenOptions::default(), &mut |_| {}).unwrap();
    assert!(hub.log.lock().unwrap().iter().all(|r| r.authorization.as_deref() == Some("Bearer hf_secret")));
    let log = store.log.lock().unwrap();
    assert!(!log.is_empty() && log.iter().all(|request| request.authorization.is_none()));
    // Only the hub is asked what a file is, not the store.
    assert!(log.iter().all(|request| request.method == "GET"));
    assert!(blobs(cache.path()).join(format!("linked-{}", SHARDS[0])).exists());
}

fn a_single_file_is_enough() {
    let dir = made();
    let mut files = files_of(dir.path());
    let single = Fixture::new("BF16", false).write().get("model.safetensors");
    files.insert("model.safetensors".into(), single);
    let (hub, address) = Hub { files, has_parts: true, lists_siblings: true, ..Hub::default() }.start();
    let cache = tempfile::TempDir::new().unwrap();
    source().resolve_with(&options(address, cache.path()), OpenOptions::default(), &mut |_| {}).unwrap();
    assert!(hub.asked(SHARDS[0]).is_empty() && !hub.asked("model.safetensors").is_empty());
}
