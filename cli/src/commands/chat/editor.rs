//! The line editor of a conversation: `rustyline`, with this program's commands and keys.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use rustyline::completion::Completer;
use rustyline::config::{Behavior, BellStyle, CompletionType, Config};
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::Validator;
use rustyline::{
    Cmd, ConditionalEventHandler, Context, Event, EventContext, EventHandler, Helper, KeyCode, KeyEvent, Modifiers,
    RepeatCount,
};

use super::line;
use crate::output::note;
use crate::terminal::Keys;

/// Most turns that the history holds.
const MOST_ENTRIES: usize = 1000;

/// The result of an edit.
#[derive(Debug)]
pub enum Edited {
    /// A turn, which may have several lines.
    Line(String),
    /// Ctrl-D on an empty line, or the terminal is gone.
    End,
    /// Ctrl-C twice.
    Interrupted,
}

/// An editor at the terminal.
pub struct Editor {
    editor: rustyline::Editor<Commands, FileHistory>,
    /// The file of earlier turns, if turns are kept.
    history: Option<PathBuf>,
    ctrl_c: Arc<Mutex<CtrlC>>,
    /// The line so far.
    typed: Arc<Mutex<String>>,
    keys: Keys,
}

/// What Ctrl-C has done at this prompt.
#[derive(Debug, Default)]
struct CtrlC {
    /// Presses without another key in between.
    presses: u32,
    /// The line that the last press cleared.
    taken: String,
}

impl Editor {
    /// Takes over the terminal. Earlier turns come from the file `history`, and new turns go there.
    ///
    /// # Errors
    /// If the terminal refuses.
    pub fn new(history: Option<PathBuf>) -> rustyline::Result<Self> {
        // The editor uses the terminal itself, so that standard output has only the answers wherever it goes.
        let config = Config::builder()
            .behavior(Behavior::PreferTerm)
            .completion_type(CompletionType::List)
            .bell_style(BellStyle::None)
            .max_history_size(MOST_ENTRIES)?
            .build();
        let mut editor = rustyline::Editor::with_config(config)?;
        let typed = Arc::new(Mutex::new(String::new()));
        editor.set_helper(Some(Commands { typed: Arc::clone(&typed) }));
        let ctrl_c = Arc::new(Mutex::new(CtrlC::default()));
        let handler =
            |pressed| EventHandler::Conditional(Box::new(CtrlCHandler { pressed, state: Arc::clone(&ctrl_c) }));
        editor.bind_sequence(KeyEvent::ctrl('c'), handler(true));
        editor.bind_sequence(Event::Any, handler(false));
        for key in [KeyEvent(KeyCode::Enter, Modifiers::ALT), KeyEvent(KeyCode::Char('\r'), Modifiers::ALT)] {
            editor.bind_sequence(key, Cmd::Newline);
        }
        let mut editor = Self { editor, history, ctrl_c, typed, keys: Keys::hold() };
        editor.open_history();
        Ok(editor)
    }

    /// Reads earlier turns. If turns cannot be kept, that is said once and not tried again.
    fn open_history(&mut self) {
        let Some(path) = &self.history else { return };
        let opened = (|| {
            if let Some(folder) = path.parent() {
                create_private(folder)?;
            }
            if path.exists() { self.editor.load_history(path) } else { Ok(()) }
        })();
        if let Err(error) = opened {
            self.give_up_history(&error);
        }
    }

    fn give_up_history(&mut self, error: &ReadlineError) {
        if let Some(path) = self.history.take() {
            note(&format!(
                "warpdraft: {} cannot keep what you type ({error}); mend or remove it, or use --no-history",
                path.display()
            ));
        }
    }

    /// Adds a turn to the history, and to its file at once, so that nothing is lost however the program ends.
    fn remember(&mut self, text: &str) {
        let added = self.editor.add_history_entry(text);
        let kept = match (&self.history, added) {
            (Some(path), Ok(true)) => self.editor.append_history(path),
            _ => Ok(()),
        };
        if let Err(error) = kept {
            self.give_up_history(&error);
        }
    }

    /// Lets the user type a turn.
    ///
    /// # Errors
    /// If the terminal cannot be read.
    pub fn edit(&mut self) -> anyhow::Result<Edited> {
        let mut begun = String::new();
        loop {
            let edited = self.editor.readline_with_initial("> ", (&std::mem::take(&mut begun), ""));
            self.keys.mark_pastes();
            let mut ctrl_c = self.ctrl_c.lock().unwrap_or_else(PoisonError::into_inner);
            match edited {
                Ok(text) => {
                    *ctrl_c = CtrlC::default();
                    drop(ctrl_c);
                    self.remember(&text);
                    return Ok(Edited::Line(text));
                }
                Err(ReadlineError::Interrupted) if ctrl_c.presses < 2 => {
                    let taken = std::mem::take(&mut ctrl_c.taken);
                    drop(ctrl_c);
                    if taken.is_empty() {
                        note("Ctrl-C again leaves; so do Ctrl-D and /quit");
                    } else {
                        // The arrow key brings the cleared line back.
                        self.remember(&taken);
                    }
                }
                Err(ReadlineError::Interrupted) => return Ok(Edited::Interrupted),
                Err(ReadlineError::Eof) => return Ok(Edited::End),
                Err(ReadlineError::Io(error)) if error.kind() == std::io::ErrorKind::InvalidData => {
                    note("a byte that is not UTF-8 text was left out");
                    begun = std::mem::take(&mut *self.typed.lock().unwrap_or_else(PoisonError::into_inner));
                }
                Err(error) => return Err(anyhow::Error::new(error).context("cannot read from the terminal")),
            }
        }
    }
}

/// Creates a folder, and those above it, that other users cannot look into.
fn create_private(folder: &std::path::Path) -> std::io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Counts presses of Ctrl-C. Any other key resets the count.
struct CtrlCHandler {
    pressed: bool,
    state: Arc<Mutex<CtrlC>>,
}

impl ConditionalEventHandler for CtrlCHandler {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext<'_>) -> Option<Cmd> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if self.pressed {
            state.presses += 1;
            context.line().clone_into(&mut state.taken);
            Some(Cmd::Interrupt)
        } else {
            state.presses = 0;
            None
        }
    }
}

/// Completes commands, and remembers the line so far: the editor does not keep it when it fails.
struct Commands {
    typed: Arc<Mutex<String>>,
}

impl Completer for Commands {
    type Candidate = String;

    fn complete(&self, line: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        Ok((0, line::completions(&line[..at])))
    }
}

impl Hinter for Commands {
    type Hint = String;

    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        line.clone_into(&mut self.typed.lock().unwrap_or_else(PoisonError::into_inner));
        None
    }
}

impl Highlighter for Commands {}
impl Validator for Commands {}
impl Helper for Commands {}
