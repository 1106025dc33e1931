//! What is printed: text on standard output, everything else on standard error.

use std::io::{ErrorKind, IsTerminal, Write};

use anyhow::Context;
use host::{Finish, Generation, Statistics};
use model::Sampling;
use serde::Serialize;

use crate::resolve::Report;

/// Standard output was closed by whoever read it. The program ends quietly, as programs in a pipe do.
#[derive(Debug, thiserror::Error)]
#[error("standard output was closed")]
pub struct ClosedPipe;

/// Prints `text` on standard output now.
///
/// # Errors
/// [`ClosedPipe`], or whatever else the system says, such as a full disk.
pub fn print(text: &str) -> anyhow::Result<()> {
    print_bytes(text.as_bytes())
}

/// Prints `bytes` on standard output now.
///
/// # Errors
/// As [`print`].
pub fn print_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(ClosedPipe.into()),
        Err(error) => Err(error).context("cannot write to standard output"),
    }
}

/// Prints `value` as JSON and a newline.
///
/// # Errors
/// As [`print`].
pub fn print_json(value: &impl Serialize, pretty: bool) -> anyhow::Result<()> {
    let json = if pretty { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) };
    print(&(json.context("cannot write JSON")? + "\n"))
}

/// Ends the line if a person is looking, who would otherwise find the shell's prompt behind the text. A file gets the text alone.
///
/// # Errors
/// As [`print`].
pub fn end_line(text: &str) -> anyhow::Result<()> {
    if !text.ends_with('\n') && std::io::stdout().is_terminal() { print("\n") } else { Ok(()) }
}

/// Says `text` on standard error. If nobody listens there, nothing can be done about it.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Temporary files are for their owner alone; results are as readable as any file.
///
/// # Errors
/// Whatever the system says.
pub fn share_with_others(file: &std::fs::File) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.set_permissions(std::fs::Permissions::from_mode(0o644))?;
    }
    Ok(())
}

/// An answer with what it was made of.
pub struct Answer<'a> {
    /// The model, as the user named it.
    pub model: String,
    /// What it ran on.
    pub device: String,
    /// The settings.
    pub sampling: Sampling,
    /// The answer.
    pub generation: &'a Generation,
}

impl Answer<'_> {
    /// The seed, if it mattered.
    fn seed(&self) -> Option<u64> {
        (!self.sampling.is_greedy()).then_some(self.sampling.seed)
    }

    /// The answer for machines.
    pub fn json(&self) -> impl Serialize {
        let generation = self.generation;
        JsonAnswer {
            text: generation.text.clone(),
            tokens: generation.tokens.clone(),
            finish: match generation.finish {
                Finish::Stop => "stop",
                Finish::Length => "length",
                Finish::Interrupted => "interrupted",
            },
            model: self.model.clone(),
            device: self.device.clone(),
            temperature: self.sampling.temperature,
            seed: self.seed(),
            statistics: JsonStatistics::from(&generation.statistics),
        }
    }

    /// Says on standard error how it went.
    pub fn summarise(&self, report: Report) {
        let statistics = &self.generation.statistics;
        let seed = self.seed().map(|seed| format!(", seed {seed}")).unwrap_or_default();
        let cached = match statistics.cached_tokens {
            0 => String::new(),
            n => format!(" ({n} of them cached)"),
        };
        let ended = match self.generation.finish {
            Finish::Stop => "the model or a stop text ended it",
            Finish::Length => "the token limit ended it",
            Finish::Interrupted => "interrupted",
        };
        note("");
        note(&format!("{} on {}{seed}", self.model, self.device));
        note(&format!(
            "prompt  {} tokens{cached}, {:.1} tokens/s, first token after {:.3} s",
            statistics.prompt_tokens,
            statistics.prompt_rate(),
            statistics.first_token.as_secs_f64()
        ));
        note(&format!("answer  {} tokens, {:.1} tokens/s; {ended}", statistics.tokens, statistics.decode_rate()));
        note(&format!(
            "drafts  {} tried, {} accepted; mean accepted length {:.2} tokens a step",
            statistics.drafted,
            statistics.accepted,
            statistics.mean_accepted_length()
        ));
        if report.is_verbose() {
            histogram(statistics);
        }
    }

    /// As [`summarise`](Self::summarise), in a line: for a turn of a conversation.
    pub fn summarise_turn(&self, report: Report) {
        let statistics = &self.generation.statistics;
        if report.is_verbose() {
            return self.summarise(report);
        }
        let ended = match self.generation.finish {
            Finish::Stop => "",
            Finish::Length => "; the token limit ended it",
            Finish::Interrupted => "; interrupted",
        };
        note(&format!(
            "[{} tokens, {:.1} tokens/s, {:.2} a step{ended}]",
            statistics.tokens,
            statistics.decode_rate(),
            statistics.mean_accepted_length()
        ));
    }
}

/// How many steps brought how many tokens.
fn histogram(statistics: &Statistics) {
    let most = statistics.step_lengths.values().copied().max().unwrap_or(0).max(1);
    for (length, &count) in &statistics.step_lengths {
        let bar = "#".repeat((count * 40).div_ceil(most));
        note(&format!("steps of {length:>2}  {count:>6}  {bar}"));
    }
}

#[derive(Serialize)]
struct JsonAnswer {
    text: String,
    tokens: Vec<u32>,
    finish: &'static str,
    model: String,
    device: String,
    temperature: f32,
    seed: Option<u64>,
    statistics: JsonStatistics,
}

#[derive(Serialize)]
struct JsonStatistics {
    prompt_tokens: usize,
    cached_tokens: usize,
    prompt_tokens_per_second: f64,
    first_token_seconds: f64,
    generated_tokens: usize,
    decode_seconds: f64,
    decode_tokens_per_second: f64,
    steps: usize,
    drafted: usize,
    accepted: usize,
    mean_accepted_length: f64,
    step_lengths: std::collections::BTreeMap<usize, usize>,
}

impl From<&Statistics> for JsonStatistics {
    fn from(s: &Statistics) -> Self {
        Self {
            prompt_tokens: s.prompt_tokens,
            cached_tokens: s.cached_tokens,
            prompt_tokens_per_second: s.prompt_rate(),
            first_token_seconds: s.first_token.as_secs_f64(),
            generated_tokens: s.tokens,
            decode_seconds: s.decode.as_secs_f64(),
            decode_tokens_per_second: s.decode_rate(),
            steps: s.steps,
            drafted: s.drafted,
            accepted: s.accepted,
            mean_accepted_length: s.mean_accepted_length(),
            step_lengths: s.step_lengths.clone(),
        }
    }
}
