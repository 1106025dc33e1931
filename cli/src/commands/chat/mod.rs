//! `warpdraft chat`: a conversation, turn by turn.

mod editor;
mod input;
mod line;

use std::io::IsTerminal;

use host::{Engine, Finish, LoadOptions, encode_prompt};
use model::chat::{ChatTemplate, Splitter};
use model::tokenizer::Around;
use model::{Message, OpenOptions, Role};

use self::input::{Input, Next};
use self::line::{COMMANDS, Line};
use crate::commands::{Shown, answer, chat_template};
use crate::form::Wanted;
use crate::output::{Answer, note};
use crate::resolve::Chat;
use crate::{Ending, loading, output};

const KEYS: &str = "Alt-Enter begins a new line, Ctrl-C stops an answer or clears what is typed (twice leaves)";

/// How a turn went.
enum Turn {
    /// The model has answered.
    Answered,
    /// The answer was stopped.
    Stopped,
}

/// Runs the command.
///
/// # Errors
/// If anything is wrong with the model or the device, if a pipe is closed, or, unless a person types, if a turn fails.
pub fn run(command: Chat) -> anyhow::Result<Ending> {
    loading::start_log(command.report)?;
    let _opening = command.load.device.open_ahead(&command.load.options);
    let options = OpenOptions { check_finite: false, weights: command.weights };
    let checkpoint = loading::open(&command.source, options, command.report)?;
    chat_template(&checkpoint, &command.source)?;
    let form = Wanted::new(&checkpoint, command.shape.as_ref())?;
    // Before the model is loaded, so that what is typed meanwhile is the first turn.
    let input = Input::new(&command);
    let draft_model = loading::open_draft(command.answer.draft_source.as_ref(), command.report)?;
    let load = LoadOptions { draft_model, ..command.load.clone() };
    let engine = loading::load(checkpoint, load, command.report)?;
    if input.is_typed() && command.report.is_told() {
        note(&format!("{} on {}; /help lists commands and keys, Ctrl-D leaves", command.source, engine.device()));
    }
    let think = command.think;
    Conversation { engine, input, messages: command.system.iter().cloned().collect(), think, form, command }.hold()
}

/// A conversation with a loaded model.
struct Conversation {
    engine: Engine,
    input: Input,
    messages: Vec<Message>,
    think: bool,
    /// The form of its answers.
    form: Option<Wanted>,
    command: Chat,
}

impl Conversation {
    /// Holds the conversation until the input ends.
    fn hold(mut self) -> anyhow::Result<Ending> {
        let typed = self.input.is_typed();
        // The error that a script ends with; a person has seen what was wrong.
        let mut refused = None;
        loop {
            let text = match self.input.next()? {
                Next::Turn(text) => text,
                Next::NoText(why) => {
                    note(&format!("warpdraft: {why}"));
                    refused = Some(anyhow::anyhow!("not every line was text; the others were answered"));
                    continue;
                }
                Next::End => break,
                Next::Interrupted => return Ok(Ending::Interrupted),
            };
            match Line::parse(&text) {
                Line::Nothing => {}
                Line::Quit => break,
                Line::Help => help(),
                Line::Clear => self.messages.truncate(self.command.system.iter().len()),
                Line::Think(think) => self.set_think(think),
                Line::Unknown(word) if typed => note(&format!("warpdraft: {}", line::refusal(word))),
                Line::Unknown(word) => anyhow::bail!(line::refusal(word)),
                Line::Say(text) => match self.turn(text) {
                    // A person who stops an answer stays in the conversation. A script ends: the same signal tells it
                    // to stop.
                    Ok(Turn::Stopped) if !typed => return Ok(Ending::Interrupted),
                    Ok(_) => {}
                    Err(error) if typed && is_of_turn(&error) => note(&format!("warpdraft: {error}")),
                    Err(error) => return Err(error),
                },
            }
        }
        match refused.filter(|_| !typed) {
            Some(error) => Err(error),
            None => Ok(Ending::Done),
        }
    }

    fn set_think(&mut self, think: bool) {
        self.think = think;
        if self.input.is_typed() && self.command.report.is_told() {
            note(if think { "thoughts before answers" } else { "answers without thoughts before them" });
        }
    }

    /// Adds the user's `text` and has the model answer it. The engine's cache still holds earlier turns, as far as the
    /// template repeats them. A turn without an answer is forgotten.
    fn turn(&mut self, text: &str) -> anyhow::Result<Turn> {
        let before = self.messages.len();
        self.messages.push(Message::new(Role::User, text));
        let turn = self.answer();
        if !matches!(turn, Ok((_, true))) {
            self.messages.truncate(before);
        }
        turn.map(|(turn, _)| turn)
    }

    /// Answers the messages and adds the answer to them. Also returns whether there was one.
    fn answer(&mut self) -> anyhow::Result<(Turn, bool)> {
        let Self { engine, command, messages, think, form, input } = self;
        let (typed, report) = (input.is_typed(), command.report);
        let checkpoint = engine.checkpoint();
        let template: &ChatTemplate = chat_template(checkpoint, &command.source)?;
        let prompt = template.render(messages, *think, true)?;
        let most = checkpoint.config.max_position_embeddings;
        let tokens = encode_prompt(&checkpoint.tokenizer, &prompt, Around::Nothing, engine.context(), most)
            .map_err(|error| in_conversation(error.into(), typed))?;
        let conversation = model::Conversation::plain(messages, *think);
        let in_form = |wanted: &Wanted| wanted.in_conversation(checkpoint, conversation, &prompt);
        let form = form.as_ref().map(in_form).transpose()?;
        let request = host::Request { form, ..command.answer.request(tokens, &checkpoint.generation) };
        let shown = if report.json { Shown::Nothing } else { Shown::Answer { prompt: &prompt } };
        let generation = answer(engine, &request, shown, report).map_err(|error| in_conversation(error, typed))?;
        let parts = Splitter::new(&prompt, false).answer(&generation.text);
        let answer = Answer {
            model: command.source.to_string(),
            device: engine.device(),
            request: &request,
            context: engine.context(),
            most_context: engine.checkpoint().config.max_position_embeddings,
            generation: &generation,
            parts: Some(&parts),
        };
        if report.json {
            output::print_json(&answer.json(), false)?;
        } else if !std::io::stdout().is_terminal() {
            output::print("\n")?;
        }
        if report.is_told() {
            answer.summarise_turn(report);
            if typed {
                note("");
            }
        }
        let turn = if generation.finish == Finish::Interrupted { Turn::Stopped } else { Turn::Answered };
        let said = !generation.tokens.is_empty();
        let reasoning_content = parts.reasoning_content;
        messages.push(Message { reasoning_content, ..Message::new(Role::Assistant, parts.content) });
        Ok((turn, said))
    }
}

fn help() {
    for (name, does) in COMMANDS {
        note(&format!("  {name:<10} {does}"));
    }
    note(&format!("{KEYS}."));
    note("Pasted lines are one turn. A line with a blank before its slash goes to the model.");
}

/// The error for a turn that has no room. It says what to do in a conversation, not with a prompt.
#[derive(Debug, thiserror::Error)]
#[error(
    "the conversation has {tokens} tokens {or_more}with this turn, and the context holds {context}, one of them for the answer; \
     /clear starts over, and {mend}"
)]
struct NoRoom {
    tokens: usize,
    or_more: &'static str,
    context: usize,
    mend: String,
}

/// For a person, turns the error for a prompt that is too long into `NoRoom`, which says how to go on.
fn in_conversation(error: anyhow::Error, typed: bool) -> anyhow::Error {
    let (tokens, or_more, context, most) = match error.downcast_ref() {
        Some(&host::Error::PromptTooLong { prompt, context, most }) if typed => (prompt, "", context, most),
        Some(&host::Error::PromptFarTooLong { least, context, most }) if typed => (least, "or more ", context, most),
        _ => return error,
    };
    let mend = if context < most {
        format!("warpdraft chat --context N has room for more (this model's most is {most})")
    } else {
        "a shorter turn may fit (the context is this model's longest)".to_owned()
    };
    NoRoom { tokens, or_more, context, mend }.into()
}

/// Whether the error is of this turn alone, so that another one may succeed.
fn is_of_turn(error: &anyhow::Error) -> bool {
    use model::Error::{ChatTemplate, Encode, Form};

    let in_model = |error: &model::Error| matches!(error, ChatTemplate { .. } | Encode { .. } | Form { .. });
    let in_host = |error: &host::Error| match error {
        host::Error::EmptyPrompt | host::Error::FormLost { .. } | host::Error::NotFinite { .. } => true,
        host::Error::Model(error) => in_model(error),
        _ => false,
    };
    error.is::<NoRoom>() || error.downcast_ref().is_some_and(in_model) || error.downcast_ref().is_some_and(in_host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_survives_errors_of_a_turn_and_no_others() {
        let reason = || "why".to_owned();
        let template = || model::Error::ChatTemplate { path: "chat_template.jinja".into(), reason: reason() };
        let too_long = host::Error::PromptTooLong { prompt: 9, context: 8, most: 16 };
        for error in [
            in_conversation(too_long.into(), true),
            template().into(),
            model::Error::Form { reason: reason() }.into(),
            host::Error::from(template()).into(),
            host::Error::from(model::Error::Encode { reason: reason() }).into(),
            host::Error::FormLost { reason: reason() }.into(),
            host::Error::NotFinite { what: "logits".into(), position: 7 }.into(),
            host::Error::EmptyPrompt.into(),
        ] {
            assert!(is_of_turn(&error), "{error}");
        }
        for error in [
            host::Error::Driver { doing: "a step".into(), reason: reason() }.into(),
            host::Error::Stalled { seconds: 60 }.into(),
            host::Error::from(model::Error::NoForms { reason: reason() }).into(),
            output::ClosedPipe.into(),
        ] {
            assert!(!is_of_turn(&error), "{error}");
        }
    }
}
