//! The terminal: whether text there may be styled, and how keys are treated while a conversation owns it.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Begins dimmed text.
const DIM: &str = "\x1b[2m";
/// Ends dimmed text.
const PLAIN: &str = "\x1b[0m";

/// Whether standard output is in the middle of dimmed text.
static DIMMED: AtomicBool = AtomicBool::new(false);

/// Whether the terminal understands escape sequences at all.
pub fn is_capable() -> bool {
    std::env::var_os("TERM").is_some_and(|term| !term.is_empty() && term != "dumb")
}

/// Whether text for `stream` may be styled: it goes to a terminal that understands styles, and the user has not set
/// `NO_COLOR`.
pub fn is_styled(stream: &impl IsTerminal) -> bool {
    let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    stream.is_terminal() && is_capable() && !unwanted
}

/// `text`, dimmed if standard error may be styled.
pub fn dimmed(text: &str) -> String {
    if is_styled(&std::io::stderr()) { format!("{DIM}{text}{PLAIN}") } else { text.to_owned() }
}

/// The sequence that switches standard output to dimmed text or back; empty if it is in that state already.
pub fn dim(on: bool) -> &'static str {
    match (DIMMED.swap(on, Ordering::SeqCst), on) {
        (false, true) => DIM,
        (true, false) => PLAIN,
        _ => "",
    }
}

/// Restores the terminal to the state in which it was found, for ways out of the program that run no destructors.
pub fn restore() {
    if DIMMED.swap(false, Ordering::SeqCst) {
        let _ = write!(std::io::stdout(), "{PLAIN}").and_then(|()| std::io::stdout().flush());
    }
    keys::restore();
}

pub use keys::Keys;

#[cfg(unix)]
mod keys {
    use std::io::Write;
    use std::sync::{Mutex, PoisonError};

    use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

    /// The settings of the terminal when it was taken over.
    static FOUND: Mutex<Option<Termios>> = Mutex::new(None);
    /// Makes the terminal mark where pasted text begins and ends. The next sequence switches that off.
    const MARK_PASTES: &str = "\x1b[?2004h";
    const MARK_NO_PASTES: &str = "\x1b[?2004l";

    /// While this lives, keys that are pressed while nobody reads them wait for the next prompt, unseen and whole. The
    /// terminal neither echoes them into an answer nor cuts a line that is longer than its own buffer, and it marks
    /// pasted text. Ctrl-C still interrupts.
    #[derive(Debug)]
    pub struct Keys(());

    impl Keys {
        /// Holds keys from now on, if standard input is a terminal.
        pub fn hold() -> Self {
            if let Ok(found) = tcgetattr(std::io::stdin()) {
                let mut held = found.clone();
                held.local_modes -= LocalModes::ECHO | LocalModes::ICANON;
                *FOUND.lock().unwrap_or_else(PoisonError::into_inner) = Some(found);
                let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &held);
            }
            let keys = Keys(());
            keys.mark_pastes();
            keys
        }

        /// Marks pasted text again, after an editor has switched that off.
        pub fn mark_pastes(&self) {
            print(MARK_PASTES);
        }
    }

    impl Drop for Keys {
        fn drop(&mut self) {
            restore();
        }
    }

    /// Restores the terminal as it was found. Does nothing if no keys are held.
    pub fn restore() {
        if let Some(found) = FOUND.lock().unwrap_or_else(PoisonError::into_inner).take() {
            print(MARK_NO_PASTES);
            let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &found);
        }
    }

    /// Prints to the terminal itself, wherever the streams go.
    fn print(sequence: &str) {
        if let Ok(mut terminal) = std::fs::File::options().write(true).open("/dev/tty") {
            let _ = terminal.write_all(sequence.as_bytes());
        }
    }
}

#[cfg(not(unix))]
mod keys {
    /// The system's console keeps keys by itself.
    #[derive(Debug)]
    pub struct Keys(());

    impl Keys {
        /// Nothing to do.
        pub fn hold() -> Self {
            Keys(())
        }

        /// Nothing to do.
        pub fn mark_pastes(&self) {}
    }

    pub fn restore() {}
}
