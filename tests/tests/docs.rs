//! The pages hold the figures of their files, their links lead somewhere, and their lines, and those of comments, are
//! no longer than the code's.

use std::path::Path;

use integration_tests::docs::{anchors, cards, files, links, rendered, shown};
use integration_tests::repository;

/// Columns of a line.
const COLUMNS: usize = 120;

/// Every file of these with its text.
fn texts(patterns: &[&str]) -> Vec<(String, String)> {
    let read = |file: String| {
        let text = std::fs::read_to_string(repository().join(&file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        (file, text)
    };
    files(patterns).into_iter().map(read).collect()
}

/// Every page with its text.
fn pages() -> Vec<(String, String)> {
    texts(&["*.md"])
}

#[test]
fn tables_hold_the_figures_of_their_files() {
    let cards = cards();
    for (page, text) in pages() {
        let new = rendered(&text, &cards).unwrap_or_else(|error| panic!("{page}: {error}"));
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(repository().join(&page), &new).unwrap();
        } else if let Some((have, want)) = text.lines().zip(new.lines()).find(|(have, want)| have != want) {
            panic!(
                "{page} and docs/benchmarks differ: there is\n{have}\nwhere the files say\n{want}\n\
                 `UPDATE_DOCS=1 cargo test -p integration-tests --test docs` writes the page anew"
            );
        } else {
            assert_eq!(text, new, "{page}");
        }
    }
}

#[test]
fn every_figure_is_on_a_page() {
    let pages = pages();
    let shown: Vec<&str> = pages.iter().flat_map(|(_, text)| shown(text)).collect();
    for card in cards() {
        for figure in &card.figures {
            assert!(shown.contains(&&*figure.name), "no page shows `{}` of the {}", figure.name, card.name);
        }
    }
}

#[test]
fn links_lead_somewhere() {
    let mut lost = Vec::new();
    for (page, text) in pages() {
        let folder = repository().join(&page).parent().unwrap().to_path_buf();
        for link in links(&text).iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            let (path, anchor) = link.split_once('#').map_or((&**link, None), |(path, anchor)| (path, Some(anchor)));
            let target = if path.is_empty() { repository().join(&page) } else { folder.join(path) };
            if !target.exists() {
                lost.push(format!("{page}: {link} leads nowhere"));
            } else if let Some(anchor) = anchor.filter(|_| target.extension().is_some_and(|end| end == "md")) {
                let there = anchors(&std::fs::read_to_string(&target).unwrap());
                if !there.iter().any(|found| found == anchor) {
                    lost.push(format!("{page}: {link}: that page has no such heading, but {there:?}"));
                }
            }
        }
    }
    assert!(lost.is_empty(), "{}", lost.join("\n"));
}

#[test]
fn sources_name_pages_that_exist() {
    let mut lost = Vec::new();
    for file in files(&["*.rs", "*.sh", "*.py", "*.toml", "*.yaml", "Makefile"]) {
        // The demo model's training data has documents of such names.
        if file.starts_with("model/demo/train/") {
            continue;
        }
        let text = std::fs::read_to_string(repository().join(&file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        for (start, _) in text.match_indices("docs/") {
            let name =
                text[start..].split(|c: char| !(c.is_alphanumeric() || "/_-.".contains(c))).next().unwrap_or_default();
            let name = name.trim_end_matches('.');
            let whole = Path::new(name).extension().is_some_and(|end| end == "md" || end == "json");
            if whole && !repository().join(name).exists() {
                lost.push(format!("{file}: there is no {name}"));
            }
        }
    }
    assert!(lost.is_empty(), "{}", lost.join("\n"));
}

/// Those of code are the formatter's business.
#[test]
fn lines_of_pages_and_comments_fit() {
    let mut long = Vec::new();
    for (file, text) in texts(&["*.md", "*.rs"]) {
        let is_page = file.ends_with(".md");
        for (i, line) in text.lines().enumerate().filter(|(_, line)| is_page || line.trim_start().starts_with("//")) {
            let columns = line.chars().count();
            if columns > COLUMNS {
                long.push(format!("{file}:{}: {columns} columns", i + 1));
            }
        }
    }
    assert!(long.is_empty(), "more than {COLUMNS} columns:\n{}", long.join("\n"));
}

#[test]
fn the_first_kernel_is_as_its_page_shows_it() {
    let page = std::fs::read_to_string(repository().join("docs/guide/first-kernel.md")).unwrap();
    let sources: Vec<String> = files(&["docs/guide/first-kernel/*.rs"])
        .iter()
        .map(|file| std::fs::read_to_string(repository().join(file)).unwrap())
        .collect();
    let blocks: Vec<&str> = page.split("```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert!(blocks.len() >= 4, "the page shows code");
    for block in blocks {
        assert!(sources.iter().any(|source| source.contains(block)), "no file of the crate has\n{block}");
    }
}
