//! What manifests and lints rely on, and do not hold themselves.

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

/// The lint asks exported functions alone for their contract. Of the others each has one of its own, or its module has
/// one for all of them; a kernel's is its parameter block's, and a trait's method has the trait's.
#[test]
fn unsafe_functions_of_kernels_have_a_contract() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gpu-kernels/src");
    let mut found = 0;
    for source in sources(&root) {
        let text = fs::read_to_string(&source).unwrap();
        let of_module = text.lines().any(|line| line == "//! # Safety");
        let (mut above, mut of_trait): (Vec<&str>, _) = (Vec::new(), false);
        for whole in text.lines() {
            let line = whole.trim_start();
            if line.starts_with("///") || line.starts_with("#[") || line.starts_with("//") {
                above.push(line);
                continue;
            }
            of_trait = if line.starts_with("impl") { line.contains(" for ") } else { of_trait && whole != "}" };
            let name = line.split_once("unsafe fn ").map(|(_, rest)| rest);
            let is_kernel = above.iter().any(|line| line.starts_with("#[kernel"));
            if let Some(name) = name.filter(|_| !is_kernel && !of_trait) {
                let has_own = above.contains(&"/// # Safety");
                assert!(of_module || has_own, "{}: {name} needs a `# Safety`", source.display());
                found += 1;
            }
            above.clear();
        }
    }
    assert!(found > 400, "{found} functions");
}
