//! `warpdraft completions`: a script that teaches a shell the commands and flags.

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
