//! The commands, one in each file. Each takes what `resolve` made of its arguments.

pub mod batch;
#[cfg(feature = "bench")]
pub mod bench;
pub mod chat;
pub mod completions;
pub mod generate;
pub mod inspect;

use std::ops::ControlFlow;

use host::{Engine, Generation, Listener};
use model::{ChatTemplate, Checkpoint, Source};

use crate::interrupt::Deferred;
use crate::output::Printer;
use crate::progress::Waiting;
use crate::resolve::Report;

/// What part of an answer goes to standard output while it is generated.
#[derive(Clone, Copy, Debug)]
enum Shown<'a> {
    /// Nothing.
    Nothing,
    /// The continuation of a text.
    Text,
    /// The answer to a prompt that a chat template made.
    Answer {
        /// The prompt's text.
        prompt: &'a str,
    },
}

/// Runs `request`, with progress until the first token. Ctrl-C ends the answer early.
fn answer(
    engine: &mut Engine,
    request: &host::Request,
    shown: Shown<'_>,
    report: Report,
) -> anyhow::Result<Generation> {
    let printer = match shown {
        Shown::Nothing => None,
        Shown::Text => Some(Printer::new(None)),
        Shown::Answer { prompt } => Some(Printer::new(Some(prompt))),
    };
    let waiting = Some(Waiting::new("reading the prompt", report.is_told()));
    let mut answering = Answering { interrupt: Deferred::new(), waiting, printer, printed: Ok(()) };
    let generation = engine.generate_for(request, &mut answering);
    let Answering { printer, printed, waiting, .. } = answering;
    // The error of a failed run must not stand behind a bar, nor be dimmed.
    drop(waiting);
    let finished = printed.and_then(|()| printer.map_or(Ok(()), Printer::finish));
    let generation = generation?;
    finished.map(|()| generation)
}

/// Shows an answer while it is generated.
struct Answering {
    interrupt: Deferred,
    /// The wait for the first token, until it comes.
    waiting: Option<Waiting>,
    printer: Option<Printer>,
    printed: anyhow::Result<()>,
}

impl Answering {
    fn goes_on(&self) -> ControlFlow<()> {
        if self.printed.is_err() || self.interrupt.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

impl Listener for Answering {
    fn prompt(&mut self, done: usize, total: usize) -> ControlFlow<()> {
        if let Some(waiting) = &self.waiting {
            waiting.tokens(done, total);
        }
        self.goes_on()
    }

    fn text(&mut self, text: &str) -> ControlFlow<()> {
        self.waiting = None;
        if let Some(printer) = &mut self.printer {
            self.printed = printer.print(text);
        }
        self.goes_on()
    }
}

/// The checkpoint's chat template.
fn chat_template<'a>(checkpoint: &'a Checkpoint, source: &Source) -> anyhow::Result<&'a ChatTemplate> {
    checkpoint.chat_template.as_ref().ok_or_else(|| {
        anyhow::anyhow!(
            "{source} has no chat template (chat_template.jinja, or a field of tokenizer_config.json); \
             use `warpdraft generate` without --chat, or a model that was made for chat"
        )
    })
}
