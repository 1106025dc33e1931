//! What `batch` and `batch merge` do, made from their arguments.

use std::path::PathBuf;

use anyhow::bail;
use host::batch::BatchOptions;
use host::{DeviceChoice, LoadOptions};
use model::{GenerationConfig, Source, WeightsMode};

use super::{
    Answer, Detail, GENERATE_TOKENS, Report, answer, chosen_device, is_standard, load, report, source, usage, weights,
};
use crate::args::RunArgs;
use crate::args::batch::{BatchArgs, BatchCommand, Devices, MergeArgs, Shard};

/// What `batch` does.
#[derive(Debug)]
pub enum Batch {
    /// Answers requests.
    Run(Box<Run>),
    /// Puts the results of shards together.
    Merge(Merge),
}

/// How a batch runs.
#[derive(Debug)]
pub struct Run {
    /// The requests; `-` is standard input.
    pub requests: PathBuf,
    /// The results; `-` is standard output.
    pub output: PathBuf,
    /// Whether results are written in the order of the requests.
    pub ordered: bool,
    /// The share of the requests to answer.
    pub shard: Option<Shard>,
    /// The model.
    pub source: Source,
    /// What the layers' matrices become while they are loaded.
    pub weights: WeightsMode,
    /// The devices that it runs on, one or more.
    pub loads: Vec<LoadOptions>,
    /// What the batch may use on each device.
    pub options: BatchOptions,
    /// Settings for what requests leave open.
    pub defaults: Defaults,
    /// What to report.
    pub report: Report,
}

/// Settings for what requests leave open.
#[derive(Debug)]
pub struct Defaults {
    /// How answers are made. Its `max_tokens` is ignored, and the seeds of requests are made from its seed.
    pub answer: Answer,
    /// Most tokens of a continuation.
    pub prompt_tokens: usize,
    /// Most tokens of an answer to messages.
    pub chat_tokens: usize,
    /// Whether the model thinks before it answers messages.
    pub think: bool,
}

/// All CUDA cards.
fn cards() -> anyhow::Result<Vec<DeviceChoice>> {
    let cards = host::device::cards()?;
    if cards.is_empty() {
        bail!("--devices all: no CUDA card was found; use --device cpu, or mend the driver");
    }
    Ok(cards.iter().map(|card| DeviceChoice::Cuda(card.ordinal)).collect())
}

impl Defaults {
    /// Everything here that shapes an answer, as text. What only changes the speed is left out.
    pub fn shape(&self, checkpoint: &GenerationConfig) -> String {
        let answer = &self.answer;
        let sampling = answer.sampling(checkpoint);
        let tokens = (self.prompt_tokens, self.chat_tokens);
        format!("{:?}", (sampling, &answer.stop, answer.ignore_eos, tokens, self.think, &checkpoint.eos_token_ids))
    }
}

/// Which results are put together.
#[derive(Debug)]
pub struct Merge {
    /// Results of shards.
    pub shards: Vec<PathBuf>,
    /// The file for all results; `-` is standard output.
    pub output: PathBuf,
    /// The requests, to check the results against.
    pub requests: Option<PathBuf>,
    /// What to report.
    pub report: Report,
}

/// Resolves the arguments of `batch`.
///
/// # Errors
/// If there is no such model, or settings contradict each other.
pub fn batch(args: BatchArgs) -> anyhow::Result<Batch> {
    if let Some(BatchCommand::Merge(MergeArgs { shards, output, requests, quiet })) = args.command {
        let detail = if quiet { Detail::Quiet } else { Detail::Normal };
        return Ok(Batch::Merge(Merge { shards, output, requests, report: Report { detail, json: false } }));
    }
    let (Some(requests), Some(output)) = (args.requests, args.output) else {
        return Err(usage("requests and --output are needed"));
    };
    let RunArgs { model, device, answer: how, draft, report: what } = args.run;
    if what.json && is_standard(&output) {
        return Err(usage("--json prints on standard output, and so does --output -; send the results to a file"));
    }
    let devices = match args.devices {
        None => vec![chosen_device(device.device)?],
        Some(Devices::These(devices)) => devices,
        Some(Devices::All) => cards()?,
    };
    let loads = devices.into_iter().map(|one| load(one, &device, &model)).collect();
    let most = how.max_tokens;
    // Equal runs must give equal results, so the seed is not random.
    let seed = how.seed.unwrap_or(0);
    let mut answer = answer(how, &draft, most.unwrap_or(GENERATE_TOKENS))?;
    answer.seed = seed;
    let size = args.size;
    let options = BatchOptions {
        sequences: size.sequences,
        rows: size.step_rows,
        cache_tokens: size.cache_tokens,
        swap_tokens: size.swap_tokens,
        draft: answer.draft,
        draft_rows: size.draft_rows,
        packed_pages: None,
        mask_wait: None,
    };
    Ok(Batch::Run(Box::new(Run {
        requests,
        output,
        ordered: args.ordered,
        shard: args.shard,
        source: source(&model)?,
        weights: weights(&model),
        loads,
        options,
        defaults: Defaults {
            answer,
            prompt_tokens: most.unwrap_or(GENERATE_TOKENS),
            // Up to the end of the context: a model may think for thousands of tokens.
            chat_tokens: most.unwrap_or(usize::MAX),
            think: !args.no_think,
        },
        report: report(&what),
    })))
}
