//! What the program needs to know, made from the arguments. Every default is filled in, except those that the
//! checkpoint decides, and every contradiction is refused.

pub mod batch;
#[cfg(feature = "bench")]
pub mod bench;
mod form;

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::error::ErrorKind;
use host::device::DeviceOptions;
use host::{DeviceChoice, Draft, LoadOptions, ModelDraft, NgramDraft, Ngrams};
use model::{GenerationConfig, Message, Role, Sampling, Shape, Source, WeightsMode};

use crate::args::{
    AnswerArgs, ChatArgs, DeviceArgs, DraftArgs, DraftKind, GenerateArgs, InspectArgs, ModelArgs, ReportArgs, RunArgs,
    WeightsKind,
};
use crate::profile::TraceFile;

/// Most tokens of a continuation, if nothing else is said.
const GENERATE_TOKENS: usize = 256;
/// Says that a text is UTF-8, and is no part of it.
const BYTE_ORDER_MARK: char = '\u{feff}';
/// No limit: an answer goes on until the model ends it or the context is full. A thought alone may take thousands of
/// tokens.
const UNLIMITED: usize = usize::MAX;

/// What `generate` does.
#[derive(Debug)]
pub struct Generate {
    /// The model.
    pub source: Source,
    /// What the layers' matrices become while they are loaded.
    pub weights: WeightsMode,
    /// Where it runs.
    pub load: LoadOptions,
    /// What is continued.
    pub prompt: Prompt,
    /// How the continuation is made.
    pub answer: Answer,
    /// What to report.
    pub report: Report,
    /// What is printed before the continuation: the prompt, or nothing.
    pub echo: Option<String>,
    /// The form that the continuation must have.
    pub shape: Option<Shape>,
    /// Where a trace of the run goes.
    pub profile: Option<TraceFile>,
}

/// What `chat` does.
#[derive(Debug)]
pub struct Chat {
    /// The model.
    pub source: Source,
    /// What the layers' matrices become while they are loaded.
    pub weights: WeightsMode,
    /// Where it runs.
    pub load: LoadOptions,
    /// Instructions before the conversation.
    pub system: Option<Message>,
    /// Whether the model thinks before it answers.
    pub think: bool,
    /// The file of earlier turns, if they are kept.
    pub history: Option<PathBuf>,
    /// How a turn is made.
    pub answer: Answer,
    /// The form that its answer must have.
    pub shape: Option<Shape>,
    /// What to report.
    pub report: Report,
}

/// What `inspect` does.
#[derive(Debug)]
pub struct Inspect {
    /// The model.
    pub source: Source,
    /// What the layers' matrices become while they are loaded.
    pub weights: WeightsMode,
    /// How it would be loaded, with the context to compute memory for.
    pub load: LoadOptions,
    /// Whether to list the tensors.
    pub tensors: bool,
    /// Whether to read every weight.
    pub check: bool,
    /// What to report.
    pub report: Report,
}

/// What is continued.
#[derive(Debug)]
pub enum Prompt {
    /// A text, as it is.
    Text(String),
    /// A conversation, for the chat template.
    Conversation {
        /// The messages; the last is the user's.
        messages: Vec<Message>,
        /// Whether the model thinks before it answers.
        think: bool,
    },
}

/// How an answer is made. The checkpoint's generation config decides what is `None`.
#[derive(Debug)]
pub struct Answer {
    /// Most tokens.
    pub max_tokens: usize,
    /// Texts that end it.
    pub stop: Vec<String>,
    /// Whether to go on past end tokens.
    pub ignore_eos: bool,
    /// How drafts are made.
    pub draft: Option<Draft>,
    /// The model or head that drafts, if one does.
    pub draft_source: Option<DraftSource>,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: f32,
    frequency_penalty: f32,
    seed: u64,
}

/// What drafts, apart from the text itself.
#[derive(Debug)]
pub enum DraftSource {
    /// A model.
    Model(Source),
    /// An EAGLE-3 head.
    Eagle3(Source),
}

/// What is reported beside the text, and how.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// How much is reported.
    pub detail: Detail,
    /// Whether standard output gets JSON.
    pub json: bool,
}

/// How much is reported on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Detail {
    /// Only errors.
    Quiet,
    /// Progress and a summary.
    Normal,
    /// Everything.
    Verbose,
}

/// Resolves the arguments of `generate`, and reads the prompt.
///
/// # Errors
/// If there is no such model, the prompt cannot be read, the profile cannot be written, or settings contradict each
/// other.
pub fn generate(args: GenerateArgs) -> anyhow::Result<Generate> {
    let RunArgs { model, device, answer: how, draft, report: what } = args.run;
    let source = source(&model)?;
    let answer = answer(how, &draft, if args.chat { UNLIMITED } else { GENERATE_TOKENS })?;
    let text = prompt(args.prompt, args.file.as_deref())?;
    if text.is_empty() {
        return Err(host::Error::EmptyPrompt.into());
    }
    let echo = args.echo.then(|| text.clone());
    let prompt = if args.chat {
        let system = args.system.map(|text| Message::new(Role::System, text));
        let messages = system.into_iter().chain([Message::new(Role::User, text)]).collect();
        Prompt::Conversation { messages, think: !args.no_think }
    } else {
        Prompt::Text(text)
    };
    let profile = args.profile.as_deref().map(TraceFile::open).transpose()?;
    let weights = weights(&model);
    let shape = form::shape(args.form)?;
    Ok(Generate {
        source,
        weights,
        load: load(chosen_device(device.device)?, &device, &model),
        prompt,
        answer,
        report: report(&what),
        echo,
        shape,
        profile,
    })
}

/// Resolves the arguments of `chat`.
///
/// # Errors
/// As [`generate`].
pub fn chat(args: ChatArgs) -> anyhow::Result<Chat> {
    let RunArgs { model, device, answer: how, draft, report: what } = args.run;
    Ok(Chat {
        source: source(&model)?,
        weights: weights(&model),
        load: load(chosen_device(device.device)?, &device, &model),
        system: args.system.map(|text| Message::new(Role::System, text)),
        think: !args.no_think,
        history: if args.no_history { None } else { history_file() },
        answer: answer(how, &draft, UNLIMITED)?,
        shape: form::shape(args.form)?,
        report: report(&what),
    })
}

/// The file that keeps what is typed for later conversations. It is in the user's folder for state, as the XDG base
/// directory specification says. `None` if there is no such folder.
fn history_file() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let states = folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state")))?;
    Some(states.join("warpdraft/history"))
}

/// Resolves the arguments of `inspect`.
///
/// # Errors
/// If there is no such model.
pub fn inspect(args: InspectArgs) -> anyhow::Result<Inspect> {
    let model = ModelArgs { model: args.which.or(args.model.model), ..args.model };
    Ok(Inspect {
        source: source(&model)?,
        weights: weights(&model),
        load: LoadOptions {
            options: model.weights.device_options(DeviceOptions::default()),
            context: args.context,
            ..LoadOptions::on(DeviceChoice::Auto)
        },
        tensors: args.tensors,
        check: args.check,
        report: Report { detail: if args.quiet { Detail::Quiet } else { Detail::Normal }, json: args.json },
    })
}

/// The value of a variable that changes a default. An empty one counts as not set.
fn variable(name: &str) -> anyhow::Result<Option<String>> {
    let value = std::env::var_os(name).filter(|value| !value.is_empty());
    let no_text = |_| usage(format!("the value of the variable {name} is not UTF-8 text; change it, or unset it"));
    value.map(|value| value.into_string().map_err(no_text)).transpose()
}

/// The device that is `given`, else the variable's, else the first card or the CPU.
fn chosen_device(given: Option<DeviceChoice>) -> anyhow::Result<DeviceChoice> {
    const NAME: &str = "WARPDRAFT_DEVICE";
    if let Some(device) = given {
        return Ok(device);
    }
    match variable(NAME)? {
        None => Ok(DeviceChoice::Auto),
        Some(text) => text.parse().map_err(|error| usage(format!("the variable {NAME}: {error}"))),
    }
}

/// The model that is given, else the variable's, else the demo.
fn source(args: &ModelArgs) -> anyhow::Result<Source> {
    let given = args.model.clone().map_or_else(|| variable("WARPDRAFT_MODEL"), |which| Ok(Some(which)))?;
    let source: Source = given.as_deref().unwrap_or("demo").parse()?;
    match (source, &args.revision) {
        (source, None) => Ok(source),
        // Parsed again, so that the revision passes the same checks.
        (Source::Hub { id, .. }, Some(revision)) => Ok(format!("{id}@{revision}").parse()?),
        (source, Some(_)) => Err(usage(format!("--revision is for models on the hub, and {source} is none"))),
    }
}

fn weights(args: &ModelArgs) -> WeightsMode {
    match args.weights {
        WeightsKind::Auto | WeightsKind::Plain | WeightsKind::Packed => WeightsMode::Plain,
        WeightsKind::Fp8 => WeightsMode::Fp8,
        WeightsKind::Int4 => WeightsMode::Int4,
    }
}

fn load(device: DeviceChoice, args: &DeviceArgs, model: &ModelArgs) -> LoadOptions {
    let options = model.weights.device_options(args.kernels.options());
    LoadOptions { options, context: args.context, ..LoadOptions::on(device) }
}

fn answer(args: AnswerArgs, draft: &DraftArgs, max_tokens: usize) -> anyhow::Result<Answer> {
    let (draft, draft_source) = drafting(draft)?;
    Ok(Answer {
        max_tokens: args.max_tokens.unwrap_or(max_tokens),
        stop: args.stop,
        ignore_eos: args.ignore_eos,
        draft,
        draft_source,
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        presence_penalty: args.presence_penalty,
        frequency_penalty: args.frequency_penalty,
        // 32 bits: short enough to type, and every reader of JSON keeps the number exact.
        seed: args.seed.unwrap_or_else(|| rand::random::<u32>().into()),
    })
}

/// How drafts are made, and which model or head makes them.
fn drafting(args: &DraftArgs) -> anyhow::Result<(Option<Draft>, Option<DraftSource>)> {
    let (max, min, adaptive) = (args.ngram_max, args.ngram_min, !args.draft_always);
    let tokens = args.draft_tokens.unwrap_or(NgramDraft::default().tokens);
    let ngram = NgramDraft { tokens, max, min, adaptive };
    ngram.check().map_err(|error| usage(error.to_string()))?;
    let beside = |alone: &bool| ModelDraft {
        tokens: args.draft_tokens.unwrap_or(ModelDraft::default().tokens),
        depth: args.draft_depth,
        branches: args.draft_branches,
        adaptive,
        ngram: (!alone).then_some(Ngrams { max, min }),
    };
    Ok(match &args.draft {
        DraftKind::None => (None, None),
        DraftKind::Ngram => (Some(ngram.into()), None),
        DraftKind::Model { which, alone } => (Some(beside(alone).into()), Some(DraftSource::Model(which.parse()?))),
        DraftKind::Eagle3 { which, alone } => (Some(beside(alone).into()), Some(DraftSource::Eagle3(which.parse()?))),
    })
}

fn report(args: &ReportArgs) -> Report {
    let detail = match (args.quiet, args.verbose) {
        (true, _) => Detail::Quiet,
        (false, true) => Detail::Verbose,
        (false, false) => Detail::Normal,
    };
    Report { detail, json: args.json }
}

/// Whether `path` stands for standard input or output, even if the working folder has a file of that name.
pub fn is_standard(path: &Path) -> bool {
    path.as_os_str() == "-"
}

fn prompt(argument: Option<String>, file: Option<&Path>) -> anyhow::Result<String> {
    match (argument, file) {
        (_, Some(path)) if !is_standard(path) => {
            let name = path.display().to_string();
            let bytes = std::fs::read(path).with_context(|| format!("cannot read the prompt from {name}"))?;
            text(bytes, &name)
        }
        (Some(prompt), None) if prompt != "-" => Ok(prompt),
        (None, None) if std::io::stdin().is_terminal() => {
            Err(usage("a prompt is needed: as an argument, with --file, or on standard input"))
        }
        _ => {
            let mut bytes = Vec::new();
            std::io::stdin().read_to_end(&mut bytes).context("cannot read the prompt from standard input")?;
            text(bytes, "standard input")
        }
    }
}

/// The text of a prompt file, without the line break that editors and `echo` put at its end.
fn text(bytes: Vec<u8>, name: &str) -> anyhow::Result<String> {
    let mut text = utf8(bytes, name)?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

/// The text of `bytes`, which came from `name`, without the byte order mark that some programs put before it.
///
/// # Errors
/// If it is not UTF-8.
pub fn utf8(bytes: Vec<u8>, name: &str) -> anyhow::Result<String> {
    let mut text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow::anyhow!(
            "{name} is not UTF-8 text (byte {at}, counted from 0); convert it first, for example with iconv"
        )
    })?;
    if text.starts_with(BYTE_ORDER_MARK) {
        text.drain(..BYTE_ORDER_MARK.len_utf8());
    }
    Ok(text)
}

/// A usage error, shown as the parser shows its own.
fn usage(message: impl std::fmt::Display) -> anyhow::Error {
    clap::Error::raw(ErrorKind::ValueValidation, format!("{message}\n\nFor more information, try '--help'.\n")).into()
}

impl Answer {
    /// The sampling settings: those given, else the checkpoint's, else neutral ones.
    pub fn sampling(&self, checkpoint: &GenerationConfig) -> Sampling {
        // As transformers does, this samples only if the config says so.
        let temperature = match checkpoint.do_sample {
            Some(true) => checkpoint.temperature.unwrap_or(1.0),
            _ => 0.0,
        };
        let neutral = Sampling::default();
        Sampling {
            temperature: self.temperature.unwrap_or(temperature),
            top_k: self.top_k.or(checkpoint.top_k).unwrap_or(neutral.top_k),
            top_p: self.top_p.or(checkpoint.top_p).unwrap_or(neutral.top_p),
            min_p: self.min_p.or(checkpoint.min_p).unwrap_or(neutral.min_p),
            repetition_penalty: self
                .repetition_penalty
                .or(checkpoint.repetition_penalty)
                .unwrap_or(neutral.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
        }
    }

    /// The engine's request to continue `prompt`.
    pub fn request(&self, prompt: Vec<u32>, checkpoint: &GenerationConfig) -> host::Request {
        host::Request {
            prompt,
            max_tokens: self.max_tokens,
            sampling: self.sampling(checkpoint),
            draft: self.draft,
            stop: self.stop.clone(),
            ignore_end: self.ignore_eos,
            form: None,
        }
    }
}

impl Report {
    /// Whether standard error gets progress and a summary.
    pub fn is_told(&self) -> bool {
        self.detail >= Detail::Normal
    }

    /// Whether everything is reported.
    pub fn is_verbose(&self) -> bool {
        self.detail == Detail::Verbose
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Args, Command};

    fn generate_from(line: &[&str]) -> anyhow::Result<Generate> {
        let args = Args::try_parse_from(["warpdraft", "generate", "--model", "demo"].iter().chain(line))?;
        match args.command {
            Command::Generate(args) => generate(args),
            other => panic!("not generate: {other:?}"),
        }
    }

    #[test]
    fn the_checkpoint_decides_what_flags_leave_open() {
        let checkpoint = GenerationConfig {
            do_sample: Some(true),
            temperature: Some(0.6),
            top_k: Some(20),
            top_p: Some(0.95),
            ..GenerationConfig::default()
        };
        let given = generate_from(&["hello", "--top-p", "0.5", "--seed", "7"]).unwrap();
        let sampling = given.answer.sampling(&checkpoint);
        let expected = Sampling { temperature: 0.6, top_k: 20, top_p: 0.5, seed: 7, ..Sampling::default() };
        assert_eq!(sampling, expected);
    }

    #[test]
    fn a_checkpoint_that_does_not_ask_for_sampling_is_greedy() {
        let checkpoint = GenerationConfig { temperature: Some(0.6), ..GenerationConfig::default() };
        assert_eq!(generate_from(&["hello"]).unwrap().answer.sampling(&checkpoint).temperature, 0.0);
    }

    #[test]
    fn one_newline_at_the_end_of_a_file_is_left_out() {
        assert_eq!(text(b"a\n\n".to_vec(), "file").unwrap(), "a\n");
        assert_eq!(text(b"a\r\n".to_vec(), "file").unwrap(), "a");
        assert_eq!(text(b"a".to_vec(), "file").unwrap(), "a");
    }

    #[test]
    fn the_last_of_think_and_no_think_counts() {
        let think = |line: &[&str]| match generate_from(line).unwrap().prompt {
            Prompt::Conversation { think, .. } => think,
            Prompt::Text(_) => panic!("not a conversation"),
        };
        assert!(think(&["hi", "--chat"]));
        assert!(!think(&["hi", "--chat", "--no-think"]));
        assert!(think(&["hi", "--chat", "--no-think", "--think"]));
    }
}
