//! What `--model` may say, and the local cache.

use std::fs;

use model::source::HubOptions;
use model::{Error, OpenOptions, Source};

use crate::fixture::{Fixture, SHARDS};

fn hub(id: &str, revision: &str) -> Source {
    Source::Hub { id: id.into(), revision: revision.into() }
}

#[test]
fn names_are_told_apart() {
    let dir = Fixture::new("F32", true).write();
    let path = dir.path().to_str().unwrap();
    for (given, expected) in [
        ("demo", Source::Demo),
        (path, Source::Dir(path.into())),
        ("Qwen/Qwen3-8B", hub("Qwen/Qwen3-8B", "main")),
        ("Qwen/Qwen3-0.6B@v1.0", hub("Qwen/Qwen3-0.6B", "v1.0")),
        ("Qwen/Qwen3-0.6B@refs/pr/1", hub("Qwen/Qwen3-0.6B", "refs/pr/1")),
    ] {
        let source: Source = given.parse().unwrap();
        assert_eq!(source, expected);
        assert_eq!(source.to_string(), given);
    }
    for given in
        ["", "nowhere", "/no/such/dir", "./a", "a/b/c", "../b", "a/..", "a/b@", "a/b@../c", "a/b@x/../y", "é/b"]
    {
        let error = given.parse::<Source>().unwrap_err();
        assert!(matches!(error, Error::NoSuchModel { .. }), "{given}");
        assert!(error.to_string().contains(&format!("`{given}`")));
    }
}

#[test]
fn a_file_is_no_model_directory() {
    let dir = Fixture::new("F32", true).write();
    let source: Source = dir.file("config.json").to_str().unwrap().parse().unwrap();
    assert!(matches!(source.resolve(&mut |_| {}), Err(Error::ModelIsFile { .. })));
}

/// The cache's layout: a branch names a commit, and a commit's snapshot holds the files.
#[test]
fn the_cache_is_used_when_it_is_complete_and_only_then() {
    let home = tempfile::TempDir::new().unwrap();
    let repository = home.path().join("models--some--model");
    let snapshot = repository.join("snapshots/0123abc");
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(repository.join("refs")).unwrap();
    fs::write(repository.join("refs/main"), "0123abc\n").unwrap();
    let options = HubOptions { cache_dir: Some(home.path().to_owned()), offline: true, ..Default::default() };
    let open = |source: &Source| source.resolve_with(&options, OpenOptions::default(), &mut |_| panic!("offline"));

    let source = hub("some/model", "main");
    let made = Fixture::new("BF16", true).sharded().write();
    let names = ["config.json", "tokenizer.json", "model.safetensors.index.json", SHARDS[0], SHARDS[1]];
    for name in names {
        let error = open(&source).unwrap_err();
        assert!(matches!(&error, Error::Download { reason, .. } if reason.contains("off limits")), "{error}");
        fs::copy(made.file(name), snapshot.join(name)).unwrap();
    }
    open(&source).unwrap();
    // A commit works too. Another branch is not in the cache.
    open(&hub("some/model", "0123abc")).unwrap();
    assert!(open(&hub("some/model", "dev")).is_err());
}
