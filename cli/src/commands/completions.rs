//! `warpdraft completions`: a script that teaches a shell the commands and flags. `warpdraft manual`: the same for
//! `man`.

use std::path::Path;

use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;

use crate::args::Args;
use crate::{Ending, output};

/// Prints the script for `shell`.
///
/// # Errors
/// A closed pipe.
pub fn run(shell: Shell) -> anyhow::Result<Ending> {
    // By way of memory, since the generator panics where a writer fails.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "warpdraft", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(Ending::Done)
}

/// Writes a manual page for each command into `folder`, which is made if it is not there.
///
/// # Errors
/// A folder that cannot be written.
pub fn manual(folder: &Path) -> anyhow::Result<Ending> {
    let cannot = || format!("cannot write the manual pages to {}", folder.display());
    std::fs::create_dir_all(folder).with_context(cannot)?;
    clap_mangen::generate_to(Args::command(), folder).with_context(cannot)?;
    Ok(Ending::Done)
}
