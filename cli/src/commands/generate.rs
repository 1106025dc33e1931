//! `warpdraft generate`: a prompt in, its continuation out.

use host::Finish;

use crate::commands::{answer, chat_template};
use crate::output::Answer;
use crate::resolve::{Generate, Prompt};
use crate::{Ending, loading, output};

/// Runs the command.
///
/// # Errors
/// Whatever is wrong with the model, the prompt or the device; a closed pipe.
pub fn run(command: Generate) -> anyhow::Result<Ending> {
    let Generate { source, load, prompt, answer: settings, report } = command;
    loading::start_log(report)?;
    let checkpoint = loading::open(&source, false, report)?;
    let text = match &prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Conversation { messages, think } => {
            chat_template(&checkpoint, &source)?.render(messages, *think, true)?
        }
    };
    let request = settings.request(checkpoint.tokenizer.encode(&text)?, &checkpoint.generation);
    let mut engine = loading::load(checkpoint, load, report)?;

    let generation = answer(&mut engine, &request, !report.json)?;
    let answer = Answer {
        model: source.to_string(),
        device: engine.device(),
        sampling: request.sampling,
        generation: &generation,
    };
    if report.json {
        output::print_json(&answer.json(), false)?;
    } else {
        output::end_line(&generation.text)?;
    }
    if report.is_told() {
        answer.summarise(report);
    }
    Ok(if generation.finish == Finish::Interrupted { Ending::Interrupted } else { Ending::Done })
}
