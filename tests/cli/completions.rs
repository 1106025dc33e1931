//! `warpdraft completions`.

use predicates::prelude::*;

use crate::warpdraft;

#[test]
fn every_shell_gets_a_script_that_knows_the_flags() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let run = warpdraft(&["completions", shell]).assert().success();
        run.stdout(predicate::str::contains("warpdraft").and(predicate::str::contains("draft-tokens"))).stderr("");
    }
}
