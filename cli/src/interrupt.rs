//! Ctrl-C, and the other polite signals to stop (SIGTERM, SIGHUP).
//!
//! Most of the time the program may leave at once: nothing that it is doing is worth keeping. While a [`Deferred`]
//! lives, the first signal only asks, so that an answer can end with a summary, and a GPU is not left in the middle of
//! an upload. The second signal makes the program leave at once.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU8, Ordering};

use anyhow::Context;

use crate::output::note;
use crate::{terminal, unfinished};

/// What the next signal does: the program leaves, or the signal is remembered.
static STATE: AtomicU8 = AtomicU8::new(LEAVES);
const LEAVES: u8 = 0;
const ASKS: u8 = 1;
const ASKED: u8 = 2;

/// Takes over the signals, once.
///
/// # Errors
/// If the system refuses.
pub fn install() -> anyhow::Result<()> {
    ctrlc::set_handler(|| {
        if STATE.compare_exchange(ASKS, ASKED, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            terminal::restore();
            unfinished::remove_all();
            if std::io::stderr().is_terminal() {
                // The cursor may be behind a prompt, a bar or half a line of text.
                note("");
            }
            note("warpdraft: interrupted");
            std::process::exit(crate::INTERRUPTED.into());
        }
    })
    .context("cannot watch for Ctrl-C")
}

/// While this lives, the first signal asks instead of leaving. Only one may live at a time.
#[derive(Debug)]
pub struct Deferred(());

impl Deferred {
    /// Defers signals from now on.
    pub fn new() -> Self {
        STATE.store(ASKS, Ordering::SeqCst);
        Deferred(())
    }

    /// Whether a signal came.
    pub fn asked(&self) -> bool {
        STATE.load(Ordering::SeqCst) == ASKED
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        STATE.store(LEAVES, Ordering::SeqCst);
    }
}
