//! `warpdraft batch`: lines of requests in, lines of results out.

mod ahead;
mod form;
mod identity;
mod input;
mod json;
mod merge;
mod messages;
mod metrics;
mod output;
mod request;
mod result;
mod survey;
mod worker;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{anyhow, bail};
use host::LoadOptions;
use host::batch::{BatchOptions, Metrics, Queue};
use model::{Checkpoint, OpenOptions};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::commands::batch::ahead::{Ahead, Held, Work};
use crate::commands::batch::input::Lines;
use crate::commands::batch::metrics::{Bar, Tally};
use crate::commands::batch::output::Output;
use crate::commands::batch::request::Reader;
use crate::commands::batch::result::{Seal, Writer, Written};
use crate::commands::batch::worker::Worker;
use crate::interrupt::Deferred;
use crate::progress::Progress;
use crate::resolve::batch::{Batch as Command, Defaults, Run};
use crate::{Ending, loading, output as printing};

/// Capacity of the two queues: of requests on their way to the devices, and of results on their way to the output.
const AHEAD: usize = 64;

/// What the writing thread receives.
enum Event {
    /// An earlier run has done a request.
    DoneBefore,
    /// A request cannot be answered: its place among the requests, and the line of its result.
    Refused(u64, String),
    /// A request is answered: its place, the line of its result, and whether a limit cut the answer off.
    Answered(u64, String, bool),
    /// The rest of the requests cannot be read.
    Unreadable(anyhow::Error),
    /// A worker has ended: all is answered, it was told to stop, or its device has failed.
    Left(Option<anyhow::Error>),
}

/// Runs the command.
///
/// # Errors
/// If something is wrong with the model, the device or the files; never because of a single request.
pub fn run(command: Command) -> anyhow::Result<Ending> {
    match command {
        Command::Run(command) => answer_all(*command),
        Command::Merge(command) => merge::run(&command),
    }
}

fn answer_all(command: Run) -> anyhow::Result<Ending> {
    let Run { requests, output: to, ordered, shard, source, weights, loads, options, defaults, report } = command;
    loading::start_log(report)?;
    refuse_same_file(&requests, &to)?;
    let lines = Lines::open(&requests)?;
    let _openings: Vec<_> = loads.iter().map(|load| load.device.open_ahead(&load.options)).collect();
    let checkpoint = loading::open(&source, OpenOptions { check_finite: false, weights }, report)?;
    let model = source.to_string();
    // All devices are asked for the same context.
    let asked = loads[0].context;
    loads[0].context_for(&checkpoint.config)?;
    let fingerprint = fingerprint(&checkpoint, asked, &defaults);

    // Before the model is loaded, so that what is wrong here is known at once.
    let (mut output, Earlier { done, unsealed }) = open_output(&to, ordered, &fingerprint)?;
    if report.is_told() {
        output::warn_of_unsealed(unsealed);
    }
    let seen = report.is_told() && Progress::is_seen();
    let survey = if requests.is_file() && (seen || !done.is_empty()) {
        survey::survey(&requests, &to, shard, ordered, &done)?
    } else {
        None
    };
    let writer = Arc::new(Writer { model, fingerprint, tokenizer: checkpoint.tokenizer.clone() });
    let draft_model = loading::open_draft(defaults.answer.draft_source.as_ref(), report)?;
    let options = BatchOptions { sequences: options.sequences.or(input::count_few(&requests)), ..options };
    let load = |load| {
        let load = LoadOptions { draft_model: draft_model.clone(), ..load };
        loading::load_batch(checkpoint.clone(), load, options, report)
    };
    let batches = loads.into_iter().map(load).collect::<Result<Vec<_>, _>>()?;
    // Any device may get any request.
    let context = batches.iter().map(|batch| batch.context()).min().expect("at least one device");
    if report.is_told() && asked.is_none() {
        tell_context(context, checkpoint.config.max_position_embeddings);
    }
    let reader = Reader::new(&checkpoint, defaults, context);
    let devices = batches.iter().map(|batch| batch.device()).collect::<Vec<_>>().join(", ");

    let (send_work, work) = sync_channel(AHEAD);
    let (send, events) = sync_channel(AHEAD);
    let work = Queue::new(work, |work: &Work| work.wanted.request.max_tokens);
    let (work, stop) = (Arc::new(Mutex::new(work)), Arc::new(AtomicBool::new(false)));
    let start = |batch: host::batch::Batch| {
        let metrics = Arc::new(Mutex::new(batch.metrics()));
        let (work, stop, events, writer) = (work.clone(), stop.clone(), send.clone(), writer.clone());
        let worker = Worker { batch, work, events, writer, stop, metrics: metrics.clone(), asked: HashMap::new() };
        (metrics, std::thread::spawn(move || worker.run()))
    };
    let (progress, workers): (Vec<_>, Vec<_>) = batches.into_iter().map(start).unzip();
    // The sender of requests must notice when no worker takes them any more.
    drop(work);
    let held = Arc::new(Held::default());
    let in_order = ordered.then(|| held.clone());
    let mut ahead =
        Ahead { lines, requests, reader, done, output: to.clone(), shard, seen: HashMap::new(), held: in_order };
    std::thread::spawn(move || {
        if let Err(error) = ahead.run(&send_work, &send) {
            // Nobody receives this if the run has ended.
            let _ = send.send(Event::Unreadable(error));
        }
    });

    let mut run = Running {
        events,
        output: &mut output,
        ordered,
        held,
        waiting: BTreeMap::new(),
        stop,
        workers: workers.len(),
        progress,
        tally: Tally::default(),
        first_error: None,
        bar: Bar::start(survey, report.is_told()),
    };
    let ended = run.go_on();
    run.stop.store(true, Ordering::Relaxed);
    let (metrics, tally, first_error, bar) =
        (run.metrics(), run.tally, run.first_error.map(|(_, error)| error), run.bar);
    // Results that have arrived are written, whatever happened.
    let written = output.finish();
    let have_ended = ended.is_ok();
    let ended = ended.and_then(|ending| written.map(|()| ending));
    let summary = bar.end(&metrics, &tally, first_error, source.to_string(), devices, &ended);
    if report.is_told() {
        summary.summarise(report);
    }
    if report.json {
        printing::print_json(&summary, false)?;
    }
    if have_ended {
        // Everything is reported. What is left is to give the devices back, which takes a while for a card with much
        // memory.
        workers.into_iter().for_each(|worker| worker.join().unwrap_or_default());
    }
    ended
}

/// A fingerprint of what results depend on: the model, the context that was asked for, and the settings.
fn fingerprint(checkpoint: &Checkpoint, context: Option<usize>, defaults: &Defaults) -> String {
    let shape = defaults.shape(&checkpoint.generation);
    // By default a card's memory decides the context, and an answer is the same wherever it has room.
    let context = context.map_or("default".to_owned(), |context| context.to_string());
    format!("fp_{:016x}", xxh3_64(format!("{:x} {context} {shape}", checkpoint.digest()).as_bytes()))
}

/// Says how many tokens a request may have by default, if the model could have more.
fn tell_context(context: usize, most: usize) {
    if context < most {
        let more = format!("--context takes up to {most}, if memory does");
        printing::note(&format!("a request has {context} tokens at most; {more}"));
    }
}

/// What earlier runs have left in the output.
struct Earlier {
    /// For each line of the requests that has a result, its digest.
    done: HashMap<u64, u64>,
    /// Results without a seal.
    unsealed: u64,
}

/// Opens the output, to continue after what earlier runs of the same requests with this `fingerprint` have written.
fn open_output(to: &Path, ordered: bool, fingerprint: &str) -> anyhow::Result<(Output, Earlier)> {
    let mut earlier = Earlier { done: HashMap::new(), unsealed: 0 };
    let mut last = 0;
    let output = Output::open(to, &mut |Written { identity, fingerprint: theirs, seal }| {
        earlier.unsealed += u64::from(seal == Seal::None);
        if ordered && identity.line < std::mem::replace(&mut last, identity.line) {
            return Err(out_of_order(to));
        }
        if theirs.is_some_and(|theirs| theirs != fingerprint) {
            bail!(
                "{} was begun with another model or other settings (line {} of the requests); \
                 give the same, or name another output",
                to.display(),
                identity.line
            );
        }
        earlier.done.insert(identity.line, identity.digest);
        Ok(())
    })?;
    Ok((output, earlier))
}

/// The error for results that are not in the order of their requests.
fn out_of_order(output: &Path) -> anyhow::Error {
    anyhow!(
        "{} has results that are not in the order of the requests, behind which --ordered cannot go on; leave it out and \
         put them in order with `warpdraft batch merge` in the end, or name another output",
        output.display()
    )
}

/// Refuses to write results to the file of the requests: they would be read as requests.
fn refuse_same_file(requests: &Path, output: &Path) -> anyhow::Result<()> {
    match (std::fs::canonicalize(requests), std::fs::canonicalize(output)) {
        (Ok(from), Ok(to)) if from == to && from.is_file() => {
            bail!("{} is the requests and the output; name another output", output.display())
        }
        _ => Ok(()),
    }
}

/// The run, from the first request to the last result, as the writing thread sees it.
struct Running<'a> {
    events: Receiver<Event>,
    output: &'a mut Output,
    ordered: bool,
    /// Results that wait for one before them, if order matters; the reading thread sees through `held` how many they
    /// are.
    waiting: BTreeMap<u64, String>,
    held: Arc<Held>,
    stop: Arc<AtomicBool>,
    /// How many workers have not ended.
    workers: usize,
    progress: Vec<Arc<Mutex<Metrics>>>,
    tally: Tally,
    /// The place of the first request that was refused, and why.
    first_error: Option<(u64, Value)>,
    bar: Bar,
}

/// The error in a result's line.
fn error_of(result: &str) -> Value {
    serde_json::from_str::<Value>(result).map(|mut result| result["error"].take()).unwrap_or_default()
}

impl Running<'_> {
    fn go_on(&mut self) -> anyhow::Result<Ending> {
        let interrupt = Deferred::new();
        let mut failed = None;
        while self.workers > 0 {
            match self.events.recv_timeout(Duration::from_millis(20)) {
                Ok(Event::DoneBefore) => self.tally.before += 1,
                Ok(Event::Refused(number, line)) => {
                    let error = error_of(&line);
                    self.tally.refuse(error["code"].as_str().unwrap_or_default());
                    if self.first_error.as_ref().is_none_or(|(first, _)| number < *first) {
                        self.first_error = Some((number, error));
                    }
                    self.write(number, line);
                }
                Ok(Event::Answered(number, line, is_cut_off)) => {
                    self.tally.answered += 1;
                    self.tally.cut_off += u64::from(is_cut_off);
                    self.write(number, line);
                }
                // What was read before the error is answered all the same.
                Ok(Event::Unreadable(error)) => failed = failed.or(Some(error)),
                Ok(Event::Left(error)) => {
                    self.workers -= 1;
                    failed = error.or(failed);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("a worker was lost; this is a mistake in the program"),
            }
            self.output.write_due()?;
            if self.bar.is_due() {
                self.bar.show(&self.metrics(), &self.tally);
            }
            if interrupt.asked() {
                self.stop.store(true, Ordering::Relaxed);
            }
        }
        self.output.flush()?;
        match failed {
            Some(error) => Err(error),
            None if interrupt.asked() => Ok(Ending::Interrupted),
            None => Ok(Ending::Done),
        }
    }

    fn metrics(&self) -> Metrics {
        let all = self.progress.iter().map(|one| *one.lock().unwrap_or_else(PoisonError::into_inner));
        all.fold(Metrics::default(), Metrics::and)
    }

    fn write(&mut self, number: u64, line: String) {
        if !self.ordered {
            return self.output.push(&line);
        }
        self.held.bytes.fetch_add(line.len() as u64, Ordering::Relaxed);
        self.waiting.insert(number, line);
        let mut next = self.held.written.load(Ordering::Relaxed);
        while let Some(line) = self.waiting.remove(&next) {
            self.output.push(&line);
            self.held.bytes.fetch_sub(line.len() as u64, Ordering::Relaxed);
            next += 1;
        }
        self.held.written.store(next, Ordering::Relaxed);
    }
}
