//! `warpdraft generate`: a prompt in, its continuation out.

use std::time::Instant;

use host::{Finish, Profile, encode_prompt};
use model::chat::Splitter;
use model::tokenizer::Around;
use model::{Conversation, OpenOptions};

use crate::commands::{Shown, answer, chat_template};
use crate::form::Wanted;
use crate::output::Answer;
use crate::resolve::{Generate, Prompt};
use crate::{Ending, loading, output};

/// Runs the command.
///
/// # Errors
/// If anything is wrong with the model, the prompt or the device, or a pipe is closed.
pub fn run(command: Generate) -> anyhow::Result<Ending> {
    let Generate { source, weights, mut load, prompt, answer: settings, report, echo, shape, profile: trace } = command;
    loading::start_log(report)?;
    let mut profile = Profile::default();
    let _opening = load.device.open_ahead(&load.options);
    let start = Instant::now();
    let checkpoint = loading::open(&source, OpenOptions { check_finite: false, weights }, report)?;
    load.draft_model = loading::open_draft(settings.draft_source.as_ref(), report)?;
    profile.span("open", start, &[]);
    let (text, around) = match &prompt {
        Prompt::Text(text) => (text.clone(), Around::Special),
        Prompt::Conversation { messages, think } => {
            (chat_template(&checkpoint, &source)?.render(messages, *think, true)?, Around::Nothing)
        }
    };
    let start = Instant::now();
    let (context, most) = (load.context_for(&checkpoint.config)?, checkpoint.config.max_position_embeddings);
    let tokens = encode_prompt(&checkpoint.tokenizer, &text, around, context, most)?;
    profile.span("tokenise", start, &[("bytes", text.len() as u64), ("tokens", tokens.len() as u64)]);
    let wanted = Wanted::new(&checkpoint, shape.as_ref())?;
    let form = match (&wanted, &prompt) {
        (None, _) => None,
        (Some(wanted), Prompt::Text(_)) => Some(wanted.at_once()),
        (Some(wanted), Prompt::Conversation { messages, think }) => {
            let conversation = Conversation::plain(messages, *think);
            Some(wanted.in_conversation(&checkpoint, conversation, &text)?)
        }
    };
    let request = host::Request { form, ..settings.request(tokens, &checkpoint.generation) };
    let start = Instant::now();
    let mut engine = loading::load(checkpoint, load, report)?;
    profile.span("load", start, &[]);
    if trace.is_some() {
        engine.begin_profile(profile)?;
    }

    let conversation = matches!(prompt, Prompt::Conversation { .. });
    let shown = match (report.json, conversation) {
        (true, _) => Shown::Nothing,
        (false, true) => Shown::Answer { prompt: &text },
        (false, false) => Shown::Text,
    };
    if let Some(prompt) = &echo {
        output::print_dimmed(prompt)?;
    }
    let generation = answer(&mut engine, &request, shown, report)?;
    let parts = conversation.then(|| Splitter::new(&text, false).answer(&generation.text));
    let answer = Answer {
        model: source.to_string(),
        device: engine.device(),
        request: &request,
        context: engine.context(),
        most_context: engine.checkpoint().config.max_position_embeddings,
        generation: &generation,
        parts: parts.as_ref(),
    };
    if let Some((trace, profile)) = trace.zip(engine.take_profile()?) {
        trace.write(&profile, &answer.model, &answer.device)?;
    }
    if report.json {
        output::print_json(&answer.json(), false)?;
    }
    if report.is_told() {
        answer.summarise(report);
    }
    Ok(if generation.finish == Finish::Interrupted { Ending::Interrupted } else { Ending::Done })
}
