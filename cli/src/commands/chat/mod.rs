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
    /// There is an answer.
    Answered,
    /// It was stopped.
    Stopped,
}

/// Runs the command.
///
/// # Errors
/// Whatever is wrong with the model or the device; a closed pipe; unless a person is typing, also a refused turn.
pub fn run(command: Chat) -> anyhow::Result<Ending> {
    loading::start_log(command.report)?;
    let _opening = command.load.device.open_ahead(&command.load.options);
    let options = OpenOptions { check_finite: false, weights: command.weights };
    let checkpoint = loading::open(&command.source, options, command.report)?;
    chat_template(&checkpoint, &command.source)?;
    let form = Wanted::new(&checkpoint, command.shape.as_ref())?;
    // Before the wait: what is typed meanwhile is the first turn.
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
    /// Of its answers.
    form: Option<Wanted>,
    command: Chat,
}

impl Conversation {
    /// Until the input ends.
    fn hold(mut self) -> anyhow::Result<Ending> {
        let typed = self.input.is_typed();
        // Of a script; a person has seen what was wrong.
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
                    // A person stays in the conversation; a script is told to stop by the same signal.
                    Ok(Turn::Stopped) if !typed => return Ok(Ending::Interrupted),
                    Ok(_) => {}
                    Err(error) if typed && is_refusal(&error) => note(&format!("warpdraft: {error}")),
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

    /// The model's turn after the user's `text`. Earlier turns are still in the engine's cache, as far as the template
    /// repeats them. A turn without an answer is forgotten.
    fn turn(&mut self, text: &str) -> anyhow::Result<Turn> {
        let before = self.messages.len();
        self.messages.push(Message::new(Role::User, text));
        let turn = self.answer();
        if !matches!(turn, Ok((_, true))) {
            self.messages.truncate(before);
        }
        turn.map(|(turn, _)| turn)
    }

    /// The answer to the messages, which becomes one of them; whether there was any.
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

/// What a turn that has no room is told: what to do in a conversation, rather than with a prompt.
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

/// A person can go on after a turn that does not fit, and is told how.
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

/// Whether only this turn is refused.
fn is_refusal(error: &anyhow::Error) -> bool {
    error.is::<NoRoom>()
}
