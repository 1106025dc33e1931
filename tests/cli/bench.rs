//! `warpdraft bench`: on the emulator here; figures need a card.

use predicates::prelude::*;

use crate::{json_of, stdout_of, warpdraft};

#[test]
fn without_a_card_it_says_so_and_offers_the_emulator() {
    if !host::device::cards().expect("the driver answers").is_empty() {
        return;
    }
    for device in ["auto", "cuda"] {
        let run = warpdraft(&["bench", "all", "--device", device]).assert();
        run.code(1)
            .stdout("")
            .stderr(predicate::str::contains("CUDA card").and(predicate::str::contains("`--device emulator`")));
    }
}

#[test]
fn the_processor_has_nothing_to_measure() {
    // From the variable, as the other commands may be told.
    let run = warpdraft(&["bench", "linear"]).assert();
    run.code(1).stdout("").stderr(predicate::str::contains("--device cpu runs none"));
}

#[test]
fn the_emulator_checks_every_case_and_times_none() {
    let text = stdout_of(&mut warpdraft(&["bench", "all", "--device", "emulator"]));
    for part in ["nothing is timed", "ceilings", "linear", "attention", "gate, up 128 × 48", "context 300"] {
        assert!(text.contains(part), "no {part:?} in:\n{text}");
    }
    assert!(!text.contains("GB/s") && !text.contains("ratio"), "{text}");
    let cases = text.lines().filter(|line| line.starts_with("  ")).count();
    assert!(cases > 10, "{text}");
    assert_eq!(text.matches("checked\n").count(), cases, "{text}");
}

#[test]
fn json_has_a_row_for_each_case() {
    let line = ["bench", "linear", "--device", "emulator", "--shape", "128x20,256x16", "--rows", "1,17", "--json"];
    let json = json_of(&mut warpdraft(&line));
    assert_eq!(json["device"], "emulator");
    assert_eq!(json["timed"], false);
    assert!(json["limits"].is_null() && json["repeats"].is_null());
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    assert_eq!(rows[1]["bench"], "linear");
    assert_eq!(rows[1]["name"], "linear 128 × 20");
    assert_eq!(rows[1]["size"], "M = 17");
    assert_eq!(rows[1]["checked"], true);
    assert_eq!(rows[1]["bytes"], 128 * 20 * 2);
    assert_eq!(rows[1]["operations"], 2 * 17 * 128 * 20);
    for field in ["median", "spread", "microseconds", "limit", "limited_by", "ratio"] {
        assert!(rows[1][field].is_null(), "{field}");
    }
}

#[test]
fn the_plot_is_written_whole() {
    let dir = tempfile::tempdir().unwrap();
    let plot = dir.path().join("bench.svg");
    let mut command = warpdraft(&["bench", "ceilings", "--device", "emulator", "--plot"]);
    stdout_of(command.arg(&plot));
    let svg = std::fs::read_to_string(&plot).unwrap();
    well_formed(&svg);
    assert!(svg.contains("mma.sync") && svg.contains("checked"));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "and nothing beside it");
}

#[test]
fn a_plot_without_a_folder_is_refused_before_anything_runs() {
    let run = warpdraft(&["bench", "all", "--device", "emulator", "--plot", "no/such/folder/bench.svg"]).assert();
    run.code(1).stdout("").stderr(predicate::str::contains("a folder that exists"));
}

#[test]
fn sizes_that_the_kernels_cannot_take_are_sentences() {
    for (line, part) in [
        (&["linear", "--shape", "100x16"][..], "K must be a multiple of 128"),
        (&["linear", "--rows", "65"], "1 to 64 rows"),
        (&["linear", "--rows", "0"], "1 to 64 rows"),
        (&["attention", "--context", "4", "--rows", "8"], "less than --rows 8"),
        (&["attention", "--query-heads", "5", "--kv-heads", "2"], "share a key-value head"),
        (&["attention", "--kv-heads", "0"], "share a key-value head"),
    ] {
        let run = warpdraft(&["bench", "--device", "emulator"]).args(line).assert();
        run.code(1).stdout("").stderr(predicate::str::contains(part));
    }
    warpdraft(&["bench", "linear", "--shape", "4096"]).assert().code(2).stderr(predicate::str::contains("4096x6144"));
    warpdraft(&["bench", "ceilings", "--bytes", "many"]).assert().code(2).stderr(predicate::str::contains("GiB"));
    warpdraft(&["bench"]).assert().code(2);
}

/// Every element that begins ends, in order, and text holds no loose `<` or `&`.
fn well_formed(svg: &str) {
    let mut open = Vec::new();
    let mut rest = svg;
    while let Some(at) = rest.find('<') {
        check_text(&rest[..at]);
        let end = at + rest[at..].find('>').expect("a tag ends");
        let tag = &rest[at + 1..end];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "</{name}>");
        } else if !tag.ends_with('/') && !tag.starts_with(['?', '!']) {
            open.push(tag.split_whitespace().next().expect("a tag has a name"));
        }
        rest = &rest[end + 1..];
    }
    assert_eq!((open.len(), rest.trim()), (0, ""));
    assert!(svg.starts_with("<svg"));
}

fn check_text(text: &str) {
    for (at, _) in text.match_indices('&') {
        assert!(["&amp;", "&lt;", "&gt;", "&quot;", "&apos;"].iter().any(|e| text[at..].starts_with(e)), "{text}");
    }
}
