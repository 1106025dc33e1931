//! The warpdraft command: models from the command line.
//!
//! Arguments exist in two forms: as typed ([`args`]), and resolved into what the program needs ([`resolve`]). No code
//! after that knows about flags. `docs/reference/cli.md` says what each command promises, exit codes included.

mod args;
mod commands;
mod form;
mod interrupt;
mod json;
mod loading;
mod output;
mod panics;
mod profile;
mod progress;
mod resolve;
mod terminal;
mod unfinished;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Args, Command};
use crate::output::ClosedPipe;

/// How a command ended, if not with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// Everything that was asked for is done.
    Done,
    /// Ctrl-C stopped it, with what there was by then.
    Interrupted,
}

const FAILURE: u8 = 1;
/// 128 + SIGINT, as shells report a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;
/// 128 + SIGPIPE, as shells report a program whose reader went away.
const CLOSED_PIPE: u8 = 141;

fn main() -> ExitCode {
    panics::report();
    let args = Args::parse();
    match run(args) {
        Ok(Ending::Done) => ExitCode::SUCCESS,
        Ok(Ending::Interrupted) => {
            output::note("warpdraft: interrupted");
            ExitCode::from(INTERRUPTED)
        }
        Err(error) => report(&error),
    }
}

fn run(args: Args) -> anyhow::Result<Ending> {
    interrupt::install()?;
    match args.command {
        Command::Generate(args) => commands::generate::run(resolve::generate(args)?),
        Command::Chat(args) => commands::chat::run(resolve::chat(args)?),
        Command::Inspect(args) => commands::inspect::run(resolve::inspect(args)?),
        Command::Batch(args) => commands::batch::run(resolve::batch::batch(*args)?),
        #[cfg(feature = "bench")]
        Command::Bench(args) => commands::bench::run(resolve::bench::bench(args)?),
        Command::Completions(args) => commands::completions::run(args.shell),
        Command::Manual(args) => commands::completions::manual(&args.folder),
    }
}

/// Reports an error, and returns its exit code.
fn report(error: &anyhow::Error) -> ExitCode {
    if error.is::<ClosedPipe>() {
        return ExitCode::from(CLOSED_PIPE);
    }
    if let Some(usage) = error.downcast_ref::<clap::Error>() {
        let _ = usage.print();
        return ExitCode::from(usage.exit_code() as u8);
    }
    output::note(&format!("warpdraft: {}", sentence(error)));
    match error.downcast_ref::<host::Error>() {
        Some(host::Error::Interrupted) => ExitCode::from(INTERRUPTED),
        _ => ExitCode::from(FAILURE),
    }
}

/// The error and its causes in a row. Many of our errors already quote their cause, which is then not repeated.
fn sentence(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::sentence;

    #[test]
    fn a_cause_is_said_once() {
        let cause = || std::io::Error::other("disk on fire");
        let error = Err::<(), _>(cause()).context("cannot read notes.txt").unwrap_err();
        assert_eq!(sentence(&error), "cannot read notes.txt: disk on fire");
        let quoting = Err::<(), _>(cause()).context("cannot read notes.txt: disk on fire; call someone").unwrap_err();
        assert_eq!(sentence(&quoting), "cannot read notes.txt: disk on fire; call someone");
    }
}
