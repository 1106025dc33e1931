//! What the crates' manifests rely on.

use std::fs;
use std::path::{Path, PathBuf};

/// Every Rust file below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let paths = entries.map(|entry| entry.unwrap().path());
    let found = paths.flat_map(|path| if path.is_dir() { sources(&path) } else { vec![path] });
    found.filter(|path| path.extension().is_some_and(|end| end == "rs")).collect()
}

/// Unit tests of a library with `test = false` would never run.
#[test]
fn a_library_that_is_not_built_for_tests_has_none() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for krate in ["gpu-kernels", "benches/kernels"] {
        let manifest = fs::read_to_string(root.join(krate).join("Cargo.toml")).unwrap();
        assert!(
            manifest.contains("[lib]\ntest = false\nbench = false\n"),
            "{krate} is built for tests: take it off this list"
        );
        let sources = sources(&root.join(krate).join("src"));
        assert!(sources.len() > 5, "{sources:?}");
        for source in sources {
            let text = fs::read_to_string(&source).unwrap();
            let marks = ["#[test]", "cfg(test)", "proptest!"];
            let found = marks.into_iter().find(|mark| text.contains(mark));
            assert_eq!(found, None, "{} has unit tests: put them into {krate}/tests", source.display());
        }
    }
}
