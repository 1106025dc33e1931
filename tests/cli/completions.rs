//! `warpdraft completions`.

use predicates::prelude::*;

use crate::{binary, stdout_of, warpdraft};

#[test]
fn every_shell_gets_a_script_that_knows_the_flags() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = warpdraft(&["completions", shell]).assert().success();
        run.stdout(predicate::str::contains("warpdraft").and(predicate::str::contains("draft-tokens"))).stderr("");
    }
}

#[test]
fn the_lines_that_help_shows_work_in_a_fresh_home() {
    let help = stdout_of(&mut warpdraft(&["completions", "--help"]));
    // The folder, and the line behind it.
    let lines: Vec<&str> = help.lines().map(str::trim).collect();
    let scripts = lines.windows(2).filter(|two| two[0].contains("mkdir -p")).map(|two| two.join("\n"));
    let scripts: Vec<String> = scripts.collect();
    assert_eq!(scripts.len(), 3, "{help}");
    let home = tempfile::tempdir().unwrap();
    let folder = binary().parent().unwrap().to_owned();
    for line in scripts {
        let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
        let mut bash = std::process::Command::new("bash");
        let status = bash.args(["-c", &line]).env("HOME", home.path()).env("PATH", path).status();
        assert!(status.unwrap().success(), "{line}");
    }
    for file in [
        ".local/share/bash-completion/completions/warpdraft",
        ".zfunc/_warpdraft",
        ".config/fish/completions/warpdraft.fish",
    ] {
        assert!(std::fs::metadata(home.path().join(file)).unwrap().len() > 1000, "{file}");
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("man1");
    warpdraft(&["manual"]).arg(&pages).assert().success();
    for page in ["warpdraft.1", "warpdraft-generate.1", "warpdraft-chat.1", "warpdraft-batch.1"] {
        let text = std::fs::read_to_string(pages.join(page)).unwrap();
        assert!(text.contains(".TH"), "{page}: {text}");
    }
}
