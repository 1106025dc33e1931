//! `warpdraft chat`: a conversation, a line a turn.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::Context;
use host::{Engine, Finish, Generation, encode_prompt};
use model::{Message, Role};

use crate::commands::{answer, chat_template};
use crate::output::{Answer, note};
use crate::resolve::{Chat, utf8};
use crate::{Ending, loading, output};

/// What a line of the user's is.
#[derive(Debug, PartialEq, Eq)]
enum Line<'a> {
    Say(&'a str),
    Reset,
    Quit,
    Help,
    Nothing,
}

impl<'a> Line<'a> {
    fn parse(line: &'a str) -> Self {
        match line.trim() {
            "" => Line::Nothing,
            "/reset" => Line::Reset,
            "/quit" | "/exit" => Line::Quit,
            "/help" => Line::Help,
            said => Line::Say(said),
        }
    }
}

const COMMANDS: &str = "/reset forgets the conversation, /quit leaves, Ctrl-C stops an answer";

/// Runs the command.
///
/// # Errors
/// Whatever is wrong with the model or the device; a closed pipe; unless a person is typing, also a turn that does not fit.
pub fn run(command: Chat) -> anyhow::Result<Ending> {
    loading::start_log(command.report)?;
    let _opening = command.load.device.open_ahead();
    let checkpoint = loading::open(&command.source, false, command.report)?;
    chat_template(&checkpoint, &command.source)?;
    let mut engine = loading::load(checkpoint, command.load, command.report)?;

    let typed = std::io::stdin().is_terminal();
    if typed && command.report.is_told() {
        note(&format!("{} on {}; {COMMANDS}", command.source, engine.device()));
    }
    let mut messages: Vec<Message> = command.system.iter().cloned().collect();
    while let Some(line) = read_line(typed)? {
        match Line::parse(&line) {
            Line::Nothing => {}
            Line::Quit => break,
            Line::Help => note(COMMANDS),
            Line::Reset => messages.truncate(command.system.iter().len()),
            Line::Say(text) => {
                messages.push(Message::new(Role::User, text));
                match turn(&mut engine, &messages, &command) {
                    Ok(generation) => {
                        messages.push(Message::new(Role::Assistant, generation.text));
                        // A person stays in the conversation; a script is told to stop by the same signal.
                        if generation.finish == Finish::Interrupted && !typed {
                            return Ok(Ending::Interrupted);
                        }
                    }
                    Err(error) if typed && is_too_long(&error) => {
                        messages.pop();
                        note(&format!("warpdraft: {error}; /reset starts over"));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
    }
    Ok(Ending::Done)
}

/// The next line, without its end; none at the end of the input.
fn read_line(typed: bool) -> anyhow::Result<Option<String>> {
    if typed {
        // On standard error, so that standard output has the answers alone wherever it goes.
        let mut stderr = std::io::stderr();
        let _ = write!(stderr, "> ").and_then(|()| stderr.flush());
    }
    let mut bytes = Vec::new();
    let read = std::io::stdin().lock().read_until(b'\n', &mut bytes).context("cannot read standard input")?;
    if read == 0 { Ok(None) } else { utf8(bytes, "the line on standard input").map(Some) }
}

/// The model's turn after `messages`. Earlier turns are still in the engine's cache, as far as the template repeats them.
fn turn(engine: &mut Engine, messages: &[Message], command: &Chat) -> anyhow::Result<Generation> {
    let checkpoint = engine.checkpoint();
    let text = chat_template(checkpoint, &command.source)?.render(messages, command.think, true)?;
    let most = checkpoint.config.max_position_embeddings;
    let tokens = encode_prompt(&checkpoint.tokenizer, &text, engine.context(), most)?;
    let request = command.answer.request(tokens, &checkpoint.generation);
    let generation = answer(engine, &request, !command.report.json)?;
    let answer = Answer {
        model: command.source.to_string(),
        device: engine.device(),
        sampling: request.sampling,
        generation: &generation,
    };
    if command.report.json {
        output::print_json(&answer.json(), false)?;
    } else {
        output::print("\n")?;
    }
    if command.report.is_told() {
        answer.summarise_turn(command.report);
    }
    Ok(generation)
}

fn is_too_long(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(host::Error::PromptTooLong { .. } | host::Error::PromptFarTooLong { .. }))
}

#[cfg(test)]
mod tests {
    use super::Line;

    #[test]
    fn commands_are_whole_lines() {
        assert_eq!(Line::parse(" /reset\n"), Line::Reset);
        assert_eq!(Line::parse("/quit\r\n"), Line::Quit);
        assert_eq!(Line::parse("what does /quit do?\n"), Line::Say("what does /quit do?"));
        assert_eq!(Line::parse("/usr/bin is what?"), Line::Say("/usr/bin is what?"));
        assert_eq!(Line::parse(" \n"), Line::Nothing);
    }
}
