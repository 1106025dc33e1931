//! `warpdraft batch`: lines of requests in, lines of results out.

mod ahead;
mod form;
mod identity;
mod input;
mod merge;
mod messages;
mod metrics;
mod output;
mod pipeline;
mod request;
mod result;
mod survey;
mod worker;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use anyhow::{anyhow, bail};
use host::batch::{Batch, BatchOptions};
use host::{Coding, LoadOptions};
use model::{Checkpoint, OpenOptions};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::commands::batch::ahead::{Ahead, Held};
use crate::commands::batch::input::{LONGEST, Lines, is_file};
use crate::commands::batch::metrics::{Bar, Fate, Tally};
use crate::commands::batch::output::Output;
use crate::commands::batch::pipeline::{Event, Pipeline};
use crate::commands::batch::request::Reader;
use crate::commands::batch::result::{Seal, Writer, Written};
use crate::interrupt::Deferred;
use crate::progress::Progress;
use crate::resolve::batch::{Batch as Command, Defaults, Run};
use crate::{Ending, loading, output as printing};

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
    let lines = Lines::open(&requests, LONGEST)?;
    let _openings: Vec<_> = loads.iter().map(|load| load.device.open_ahead(&load.options)).collect();
    let checkpoint = loading::open(&source, OpenOptions { check_finite: false, weights }, report)?;
    // All devices are asked for the same context.
    let asked = loads[0].context;
    loads[0].context_for(&checkpoint.config)?;
    let fingerprint = fingerprint(&checkpoint, &loads[0], &defaults)?;

    // Before the model is loaded, so that what is wrong here is known at once.
    let (output, Earlier { done, unsealed }) = open_output(&to, ordered, &fingerprint)?;
    if report.is_told() {
        output::warn_of_unsealed(unsealed);
    }
    let seen = report.is_told() && Progress::is_seen();
    let survey = if is_file(&requests) && (seen || !done.is_empty()) {
        survey::survey(&requests, &to, shard, ordered, &done)?
    } else {
        None
    };
    let draft_model = loading::open_draft(defaults.answer.draft_source.as_ref(), report)?;
    let options = BatchOptions { sequences: options.sequences.or(input::count_few(&requests)), ..options };
    let load = |load| {
        let load = LoadOptions { draft_model: draft_model.clone(), ..load };
        loading::load_batch(checkpoint.clone(), load, options, report)
    };
    let batches = loads.into_iter().map(load).collect::<Result<Vec<Batch>, _>>()?;
    // Any device may get any request.
    let context = batches.iter().map(Batch::context).min().expect("at least one device");
    if report.is_told() && asked.is_none() {
        tell_context(context, checkpoint.config.max_position_embeddings);
    }
    let devices = batches.iter().map(Batch::device).collect::<Vec<_>>().join(", ");

    let reader = Reader::new(&checkpoint, defaults, context);
    let held = ordered.then(Arc::<Held>::default);
    let goes_on = output.can_go_on();
    let ahead = Ahead { lines, requests, reader, done, output: to, shard, seen: HashMap::new(), held: held.clone() };
    let writer = Writer { model: source.to_string(), fingerprint, tokenizer: checkpoint.tokenizer.clone() };
    let pipeline = Pipeline::start(ahead, batches, writer);
    let (ended, outcome) = Running::new(&pipeline, output, held, Bar::start(survey, report.is_told())).finish();
    let Outcome { tally, bar } = outcome;
    let summary = bar.end(&pipeline.metrics(), tally, source.to_string(), devices, &ended);
    if report.is_told() {
        summary.summarise(report);
        if goes_on && matches!(ended, Ok(Ending::Interrupted)) {
            printing::note("the same command goes on with the requests that are left");
        }
    }
    if report.json {
        printing::print_json(&summary, false)?;
    }
    if ended.is_ok() {
        // Everything is reported. What is left is to give the devices back.
        pipeline.join();
    }
    ended
}

/// A fingerprint of what results depend on: the model, how it is loaded, and the settings.
fn fingerprint(checkpoint: &Checkpoint, load: &LoadOptions, defaults: &Defaults) -> anyhow::Result<String> {
    let shape = defaults.shape(&checkpoint.generation);
    // By default a card's memory decides the context, and an answer is the same wherever it has room.
    let context = load.context.map_or("default".to_owned(), |context| context.to_string());
    let mut of = format!("{:x} {context} {shape}", checkpoint.digest());
    // Where codes in blocks are kept, activations are rounded to codes as well.
    if load.options.lossless == Some(false) && Coding::of(&checkpoint.weights()?).is_some_and(|coding| coding.in_blocks)
    {
        of += " plain";
    }
    Ok(format!("fp_{:016x}", xxh3_64(of.as_bytes())))
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
    if !is_file(requests) || !is_file(output) {
        return Ok(());
    }
    match (std::fs::canonicalize(requests), std::fs::canonicalize(output)) {
        (Ok(from), Ok(to)) if from == to => {
            bail!("{} is the requests and the output; name another output", output.display())
        }
        _ => Ok(()),
    }
}

/// The run, from the first request to the last result, as the writing thread sees it.
struct Running<'a> {
    pipeline: &'a Pipeline,
    output: Output,
    /// Results that wait for one before them, if order matters; the reading thread sees through `held` how many they
    /// are.
    waiting: BTreeMap<u64, (String, Fate)>,
    /// Requests whose results the output has gathered and not written.
    gathered: Vec<(u64, Fate)>,
    /// `None` if order does not matter.
    held: Option<Arc<Held>>,
    /// How many workers have not ended.
    workers: usize,
    outcome: Outcome,
}

/// What there is to report of a run.
struct Outcome {
    tally: Tally,
    bar: Bar,
}

/// The error in a result's line.
fn error_of(result: &str) -> Value {
    serde_json::from_str::<Value>(result).map(|mut result| result["error"].take()).unwrap_or_default()
}

impl<'a> Running<'a> {
    fn new(pipeline: &'a Pipeline, output: Output, held: Option<Arc<Held>>, bar: Bar) -> Self {
        let (waiting, gathered, workers) = (BTreeMap::new(), Vec::new(), pipeline.workers());
        Self { pipeline, output, waiting, gathered, held, workers, outcome: Outcome { tally: Tally::default(), bar } }
    }

    /// Writes results until the last worker has ended. Results that have arrived are written, whatever happens, but not
    /// those that wait for one before them.
    fn finish(mut self) -> (anyhow::Result<Ending>, Outcome) {
        let ended = self.go_on();
        self.pipeline.stop();
        let written = self.flush().and(self.output.finish());
        (ended.and_then(|ending| written.map(|()| ending)), self.outcome)
    }

    fn go_on(&mut self) -> anyhow::Result<Ending> {
        let interrupt = Deferred::new();
        let mut failed = None;
        while self.workers > 0 {
            match self.pipeline.events.recv_timeout(Duration::from_millis(20)) {
                Ok(Event::DoneBefore) => self.outcome.tally.before += 1,
                Ok(Event::Refused(number, line)) => {
                    let fate = Fate::Refused(error_of(&line));
                    self.write(number, line, fate);
                }
                Ok(Event::Answered(number, line, is_cut_off)) => {
                    self.write(number, line, Fate::Answered { is_cut_off });
                }
                // What was read before the error is answered all the same.
                Ok(Event::ReaderLeft(error)) => failed = failed.or(error),
                Ok(Event::WorkerLeft(error)) => {
                    self.workers -= 1;
                    if error.is_some() {
                        self.pipeline.stop();
                    }
                    failed = error.or(failed);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("a worker was lost; this is a mistake in the program"),
            }
            if self.output.is_due() {
                self.flush()?;
            }
            if self.outcome.bar.is_due() {
                self.outcome.bar.show(&self.pipeline.metrics(), &self.outcome.tally);
            }
            if interrupt.asked() {
                self.pipeline.stop();
            }
        }
        self.flush()?;
        match failed {
            Some(error) => Err(error),
            None if interrupt.asked() => Ok(Ending::Interrupted),
            None => Ok(Ending::Done),
        }
    }

    /// Takes the result of request `number`. If order matters, it waits until those before it are there.
    fn write(&mut self, number: u64, line: String, fate: Fate) {
        self.outcome.tally.not_written += 1;
        let Some(held) = self.held.clone() else { return self.push(number, &line, fate) };
        held.bytes.fetch_add(line.len() as u64, Ordering::Relaxed);
        self.waiting.insert(number, (line, fate));
        let mut next = held.written.load(Ordering::Relaxed);
        while let Some((line, fate)) = self.waiting.remove(&next) {
            self.push(next, &line, fate);
            held.bytes.fetch_sub(line.len() as u64, Ordering::Relaxed);
            next += 1;
        }
        held.written.store(next, Ordering::Relaxed);
    }

    fn push(&mut self, number: u64, line: &str, fate: Fate) {
        self.output.push(line);
        self.gathered.push((number, fate));
    }

    /// Writes what the output has gathered, and counts it once it is written.
    fn flush(&mut self) -> anyhow::Result<()> {
        // If this fails, they are lost, and stay among those that are not written.
        let gathered = std::mem::take(&mut self.gathered);
        self.output.flush()?;
        gathered.into_iter().for_each(|(number, fate)| self.outcome.tally.count_written(number, fate));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// How an ordered run of these events ends: the tally, and what is in the file.
    fn ordered(events: Vec<Event>) -> (Tally, String) {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let path = folder.path().join("results.jsonl");
        let output = Output::open(&path, &mut |_| Ok(())).expect("a file");
        let pipeline = Pipeline::of(events);
        let running = Running::new(&pipeline, output, Some(Arc::default()), Bar::start(None, false));
        let (ended, Outcome { tally, .. }) = running.finish();
        assert_eq!(ended.err().map(|error| error.to_string()).as_deref(), Some("the device is gone"));
        (tally, std::fs::read_to_string(path).expect("it is there"))
    }

    /// A device fails while results wait for one before them.
    #[test]
    fn results_that_still_wait_are_not_counted_as_done() {
        let error = |line: u64| json!({"code": "invalid_request", "message": "no", "line": line});
        let events = |first: Option<Event>| {
            let refused = |number, line| Event::Refused(number, json!({"error": error(line)}).to_string() + "\n");
            let waiting = [refused(3, 4), Event::Answered(1, "b\n".into(), true), refused(2, 3)];
            let end = Event::WorkerLeft(Some(anyhow!("the device is gone")));
            waiting.into_iter().chain(first).chain([end]).collect()
        };
        let (tally, text) = ordered(events(None));
        assert_eq!((tally.answered, tally.cut_off, tally.refused, tally.not_written), (0, 0, 0, 3));
        assert!(tally.first_error.is_none() && tally.refused_by_code.is_empty() && text.is_empty(), "{text}");
        // Once the first is there, so are all.
        let (tally, text) = ordered(events(Some(Event::Answered(0, "a\n".into(), false))));
        assert_eq!((tally.answered, tally.cut_off, tally.refused, tally.not_written), (2, 1, 2, 0));
        assert_eq!((tally.first_error, tally.refused_by_code["invalid_request"]), (Some((2, error(3))), 2));
        assert!(text.starts_with("a\nb\n") && text.lines().count() == 4, "{text}");
    }
}
