//! What is printed: text on standard output, everything else on standard error.

use std::io::{ErrorKind, IsTerminal, Write};

use anyhow::Context;
use host::{Draft, Drafted, Finish, Generation, Statistics};
use model::chat::{Answer as AnswerParts, Piece, Splitter};
use serde::Serialize;

use crate::resolve::Report;
use crate::terminal;

/// Standard output was closed by its reader. The program then ends quietly, as programs in a pipe do.
#[derive(Debug, thiserror::Error)]
#[error("standard output was closed")]
pub struct ClosedPipe;

/// Prints `text` on standard output at once.
///
/// # Errors
/// [`ClosedPipe`], or any other error of the system, such as a full disk.
pub fn print(text: &str) -> anyhow::Result<()> {
    print_bytes(text.as_bytes())
}

/// As [`print`], but dimmed if standard output is a terminal that can be styled.
///
/// # Errors
/// As [`print`].
pub fn print_dimmed(text: &str) -> anyhow::Result<()> {
    if terminal::is_styled(&std::io::stdout()) {
        print(&format!("{}{text}{}", terminal::dim(true), terminal::dim(false)))
    } else {
        print(text)
    }
}

/// Prints `bytes` on standard output at once.
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

/// Prints an answer while it is generated. At a terminal that can be styled, thoughts are dimmed instead of standing
/// between tags; elsewhere every byte is printed as it is.
pub struct Printer {
    /// Takes the answer apart, if thoughts are dimmed.
    splitter: Option<Splitter>,
    /// Whether the last piece was a thought.
    thinking: bool,
    /// Whether the cursor is at the beginning of a line.
    line_begins: bool,
}

impl Printer {
    /// A printer for the answer to a chat template's `prompt`. Without a prompt, the answer continues a text, in which
    /// nothing is a thought.
    pub fn new(prompt: Option<&str>) -> Self {
        let prompt = prompt.filter(|_| terminal::is_styled(&std::io::stdout()));
        Self { splitter: prompt.map(|prompt| Splitter::new(prompt, false)), thinking: false, line_begins: true }
    }

    /// Takes the next `text` of the answer, and prints as much as is certain.
    ///
    /// # Errors
    /// As [`print`].
    pub fn print(&mut self, text: &str) -> anyhow::Result<()> {
        match &mut self.splitter {
            None => self.put(text),
            Some(splitter) => {
                let styled = styled(splitter.push(text), &mut self.thinking);
                self.put(&styled)
            }
        }
    }

    /// Prints the rest. At a terminal it also ends the line, so that the next prompt does not stand behind the text; a
    /// file gets only the text.
    ///
    /// # Errors
    /// As [`print`].
    pub fn finish(mut self) -> anyhow::Result<()> {
        if let Some(splitter) = self.splitter.take() {
            let styled = styled(splitter.finish(), &mut self.thinking);
            self.put(&styled)?;
            // Printed by itself, since it is not text.
            print(terminal::dim(false))?;
        }
        if !self.line_begins && std::io::stdout().is_terminal() { print("\n") } else { Ok(()) }
    }

    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.line_begins = text.ends_with('\n');
        print(text)
    }
}

/// `pieces` with thoughts dimmed and a blank line after them. `thinking`: whether the last piece was a thought.
fn styled(pieces: Vec<Piece>, thinking: &mut bool) -> String {
    let mut text = String::new();
    for piece in pieces {
        match piece {
            Piece::Thought(thought) => {
                text += terminal::dim(true);
                text += &thought;
                *thinking = true;
            }
            Piece::Content(said) => {
                text += terminal::dim(false);
                text += if std::mem::take(thinking) { "\n\n" } else { "" };
                text += &said;
            }
            // No tools are offered here.
            Piece::ToolCall(_) => {}
        }
    }
    text
}

/// Prints `text` as a line on standard error. If that fails, nothing can be done about it.
pub fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// An answer, with how it was made.
pub struct Answer<'a> {
    /// The model, as the user named it.
    pub model: String,
    /// The device that it ran on.
    pub device: String,
    /// What was asked for.
    pub request: &'a host::Request,
    /// Most tokens of prompt and answer together.
    pub context: usize,
    /// The most that the model allows for prompt and answer together.
    pub most_context: usize,
    /// The answer.
    pub generation: &'a Generation,
    /// The answer's parts, if a chat template made the prompt.
    pub parts: Option<&'a AnswerParts>,
}

/// A limit that cut an answer off.
#[derive(Debug, Serialize)]
struct CutOff {
    by: &'static str,
    limit: usize,
    advice: String,
}

impl CutOff {
    /// As a part of a sentence.
    fn text(&self) -> String {
        let of = if self.by == "context" { " of context" } else { "" };
        format!("cut off at {} tokens{of}: {}", self.limit, self.advice)
    }
}

impl Answer<'_> {
    /// The seed, if it mattered.
    fn seed(&self) -> Option<u64> {
        let sampling = &self.request.sampling;
        (!sampling.is_greedy()).then_some(sampling.seed)
    }

    /// What cut the answer off, and what to do about it.
    fn cut_off(&self) -> Option<CutOff> {
        if self.generation.finish != Finish::Length {
            return None;
        }
        let unsaid = self.parts.is_some_and(|parts| parts.reasoning_content.is_some() && parts.content.is_empty());
        let thought = if unsaid { "it is still the model's thought; " } else { "" };
        let (by, limit, advice) = if self.generation.tokens.len() >= self.request.max_tokens {
            ("max_tokens", self.request.max_tokens, "a larger --max-tokens lets it go on".to_owned())
        } else if self.context < self.most_context {
            let advice = format!("a larger --context has room for more (this model's most is {})", self.most_context);
            ("context", self.context, advice)
        } else {
            (
                "context",
                self.context,
                "the context is this model's longest; a shorter prompt leaves more room".to_owned(),
            )
        };
        let think = if unsaid { ", and --no-think has it answer at once" } else { "" };
        Some(CutOff { by, limit, advice: format!("{thought}{advice}{think}") })
    }

    /// The answer as JSON.
    pub fn json(&self) -> impl Serialize {
        let generation = self.generation;
        JsonAnswer {
            text: generation.text.clone(),
            content: self.parts.map(|parts| parts.content.clone()),
            reasoning_content: self.parts.and_then(|parts| parts.reasoning_content.clone()),
            tokens: generation.tokens.clone(),
            finish: match generation.finish {
                Finish::Stop => "stop",
                Finish::Length => "length",
                Finish::Interrupted => "interrupted",
            },
            cut_off: self.cut_off(),
            model: self.model.clone(),
            device: self.device.clone(),
            temperature: self.request.sampling.temperature,
            seed: self.seed(),
            statistics: JsonStatistics::from(&generation.statistics),
        }
    }

    /// Says on standard error how the run went.
    pub fn summarise(&self, report: Report) {
        let statistics = &self.generation.statistics;
        let seed = self.seed().map(|seed| format!(", seed {seed}")).unwrap_or_default();
        let cached = match statistics.cached_tokens {
            0 => String::new(),
            n => format!(" ({n} of them cached)"),
        };
        let ended = match self.generation.finish {
            Finish::Stop => "the model or a stop text ended it".to_owned(),
            Finish::Length => self.cut_off().map(|cut| cut.text()).unwrap_or_default(),
            Finish::Interrupted => "interrupted".to_owned(),
        };
        note("");
        note(&format!("{} on {}{seed}", self.model, self.device));
        let read = match statistics.tokens {
            0 => "no token followed".to_owned(),
            _ => format!(
                "{:.1} tokens/s, first token after {:.3} s",
                statistics.prompt_rate(),
                statistics.first_token.as_secs_f64()
            ),
        };
        note(&format!("prompt  {}{cached}, {read}", tokens(statistics.prompt_tokens)));
        note(&format!("answer  {}, {:.1} tokens/s; {ended}", tokens(statistics.tokens), statistics.decode_rate()));
        note(&format!(
            "drafts  {} tried, {} accepted; mean accepted length {:.2} tokens a step",
            statistics.drafted,
            statistics.accepted,
            statistics.mean_accepted_length()
        ));
        if report.is_verbose() {
            if matches!(self.request.draft, Some(Draft::Model(_))) {
                JsonDrafts::of(statistics).lines().iter().for_each(|line| note(&format!("drafts  {line}")));
            }
            histogram(statistics);
        }
    }

    /// As [`summarise`](Self::summarise), but in one line, for a turn of a conversation.
    pub fn summarise_turn(&self, report: Report) {
        let statistics = &self.generation.statistics;
        if report.is_verbose() {
            return self.summarise(report);
        }
        let ended = match self.generation.finish {
            Finish::Stop => self.fullness().unwrap_or_default(),
            Finish::Length => format!("; {}", self.cut_off().map(|cut| cut.text()).unwrap_or_default()),
            Finish::Interrupted => "; interrupted".to_owned(),
        };
        note(&terminal::dimmed(&format!(
            "[{}, {:.1} tokens/s, {:.2} a step{ended}]",
            tokens(statistics.tokens),
            statistics.decode_rate(),
            statistics.mean_accepted_length()
        )));
    }

    /// How full the context is, if that may matter to the next turn.
    fn fullness(&self) -> Option<String> {
        let statistics = &self.generation.statistics;
        let percent = (statistics.prompt_tokens + statistics.tokens) * 100 / self.context;
        (percent >= 75).then(|| format!("; the context is {percent} % full, /clear empties it"))
    }
}

/// A number of tokens, in words.
fn tokens(count: usize) -> String {
    format!("{count} token{}", if count == 1 { "" } else { "s" })
}

/// Prints how many steps brought each number of tokens.
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
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    tokens: Vec<u32>,
    finish: &'static str,
    cut_off: Option<CutOff>,
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
    prompt_tokens_per_second: Option<f64>,
    first_token_seconds: Option<f64>,
    generated_tokens: usize,
    decode_seconds: f64,
    decode_tokens_per_second: f64,
    steps: usize,
    drafted: usize,
    accepted: usize,
    drafts: JsonDrafts,
    mean_accepted_length: f64,
    step_lengths: std::collections::BTreeMap<usize, usize>,
}

/// Drafts, by their source.
#[derive(Debug, Serialize)]
pub struct JsonDrafts {
    ngram: JsonDrafted,
    model: JsonDrafted,
}

#[derive(Debug, Serialize)]
struct JsonDrafted {
    drafted: usize,
    accepted: usize,
}

impl JsonDrafts {
    /// The drafts of a model, and all others.
    pub fn new(model: Drafted, others: Drafted) -> Self {
        let told = |Drafted { drafted, accepted }| JsonDrafted { drafted, accepted };
        Self { ngram: told(others), model: told(model) }
    }

    fn of(statistics: &Statistics) -> Self {
        Self::new(statistics.by_model, statistics.drafted_by_ngram())
    }

    /// One line for each source, for people.
    pub fn lines(&self) -> [String; 2] {
        [("model", &self.model), ("n-gram", &self.ngram)]
            .map(|(source, of)| format!("by {source}: {} tried, {} accepted", of.drafted, of.accepted))
    }
}

impl From<&Statistics> for JsonStatistics {
    fn from(s: &Statistics) -> Self {
        Self {
            prompt_tokens: s.prompt_tokens,
            cached_tokens: s.cached_tokens,
            prompt_tokens_per_second: (s.tokens > 0).then(|| s.prompt_rate()),
            first_token_seconds: (s.tokens > 0).then_some(s.first_token.as_secs_f64()),
            generated_tokens: s.tokens,
            decode_seconds: s.decode.as_secs_f64(),
            decode_tokens_per_second: s.decode_rate(),
            steps: s.steps,
            drafted: s.drafted,
            accepted: s.accepted,
            drafts: JsonDrafts::of(s),
            mean_accepted_length: s.mean_accepted_length(),
            step_lengths: s.step_lengths.clone(),
        }
    }
}
