//! The commands, one a file. Each takes what `resolve` made of its arguments.

pub mod batch;
pub mod bench;
pub mod chat;
pub mod completions;
pub mod generate;
pub mod inspect;

use std::ops::ControlFlow;

use host::{Engine, Generation};
use model::{ChatTemplate, Checkpoint, Source};

use crate::interrupt::Deferred;
use crate::output;

/// Runs `request`, printing the text as it comes if `stream`. Ctrl-C ends the answer early.
fn answer(engine: &mut Engine, request: &host::Request, stream: bool) -> anyhow::Result<Generation> {
    let interrupt = Deferred::new();
    let mut printed = Ok(());
    let generation = engine.generate(request, &mut |text| {
        if stream && !text.is_empty() {
            printed = output::print(text);
        }
        if printed.is_err() || interrupt.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    printed.map(|()| generation)
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
