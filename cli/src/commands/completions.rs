//! `warpdraft completions`: a script that teaches a shell the commands and flags. `warpdraft manual`: pages that
//! describe them for `man`.

use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Args;
use crate::{Ending, output};

/// Prints the script for `shell`.
///
/// # Errors
/// If the pipe is closed.
pub fn run(shell: Shell) -> anyhow::Result<Ending> {
    // Written to memory first, since the generator panics if a writer fails.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "warpdraft", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(Ending::Done)
}

/// Writes a manual page for each command into `folder`, which is created if it does not exist.
///
/// # Errors
/// If the folder cannot be written.
pub fn manual(folder: &Path) -> anyhow::Result<Ending> {
    let cannot = || format!("cannot write the manual pages to {}", folder.display());
    std::fs::create_dir_all(folder).with_context(cannot)?;
    clap_mangen::generate_to(Args::command(), folder).with_context(cannot)?;
    Ok(Ending::Done)
}
