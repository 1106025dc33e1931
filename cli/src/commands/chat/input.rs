//! Where turns come from: a person at an editor, or the lines of a stream.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::Context;

use super::editor::{Edited, Editor};
use crate::output::note;
use crate::resolve::Chat;
use crate::terminal;

/// What the input brings next.
#[derive(Debug)]
pub enum Next {
    /// A turn, without its end of line.
    Turn(String),
    /// A line that is not text, and why.
    NoText(String),
    /// The end.
    End,
    /// The user wants to leave, at once.
    Interrupted,
}

/// The source of turns.
pub enum Input {
    /// A person, at a terminal that can edit lines.
    Editor(Box<Editor>),
    /// One turn a line.
    Lines {
        /// Whether a person types, at a terminal that cannot edit; otherwise it is a pipe or a file.
        typed: bool,
        /// Number of lines read.
        number: usize,
    },
}

impl Input {
    /// Turns from standard input.
    pub fn new(command: &Chat) -> Self {
        let typed = std::io::stdin().is_terminal();
        if !(typed && terminal::is_capable()) {
            return Input::Lines { typed, number: 0 };
        }
        match Editor::new(command.history.clone()) {
            Ok(editor) => Input::Editor(Box::new(editor)),
            Err(error) => {
                note(&format!("warpdraft: lines cannot be edited here ({error})"));
                Input::Lines { typed, number: 0 }
            }
        }
    }

    /// Whether a person types.
    pub fn is_typed(&self) -> bool {
        !matches!(self, Input::Lines { typed: false, .. })
    }

    /// Waits for the next turn.
    ///
    /// # Errors
    /// If standard input cannot be read.
    pub fn next(&mut self) -> anyhow::Result<Next> {
        match self {
            Input::Editor(editor) => Ok(match editor.edit()? {
                Edited::Line(text) => Next::Turn(text),
                Edited::End => Next::End,
                Edited::Interrupted => Next::Interrupted,
            }),
            Input::Lines { typed, number } => {
                if *typed {
                    // On standard error, so that standard output has only the answers wherever it goes.
                    let mut stderr = std::io::stderr();
                    let _ = write!(stderr, "> ").and_then(|()| stderr.flush());
                }
                *number += 1;
                next_line(&mut std::io::stdin().lock(), *number)
            }
        }
    }
}

/// Reads line `number`, counted from 1, of `stream`.
fn next_line(stream: &mut impl BufRead, number: usize) -> anyhow::Result<Next> {
    let mut bytes = Vec::new();
    if stream.read_until(b'\n', &mut bytes).context("cannot read standard input")? == 0 {
        return Ok(Next::End);
    }
    if bytes.ends_with(b"\n") {
        bytes.pop();
        if bytes.ends_with(b"\r") {
            bytes.pop();
        }
    }
    Ok(String::from_utf8(bytes).map_or_else(
        |error| {
            let at = error.utf8_error().valid_up_to() + 1;
            Next::NoText(format!(
                "line {number} of standard input is not UTF-8 text from byte {at} on and was left out; \
                 convert it, for example with iconv, and say it again"
            ))
        },
        Next::Turn,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_loses_its_end_and_nothing_else() {
        let mut stream: &[u8] = b"  two blanks  \nfrom Windows\r\n\n\xff\nlast";
        let mut next = |number| next_line(&mut stream, number).unwrap();
        assert!(matches!(next(1), Next::Turn(text) if text == "  two blanks  "));
        assert!(matches!(next(2), Next::Turn(text) if text == "from Windows"));
        assert!(matches!(next(3), Next::Turn(text) if text.is_empty()));
        assert!(matches!(next(4), Next::NoText(why) if why.contains("line 4") && why.contains("byte 1")));
        assert!(matches!(next(5), Next::Turn(text) if text == "last"));
        assert!(matches!(next(6), Next::End));
    }
}
