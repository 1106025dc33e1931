//! `warpdraft batch`: lines of requests in, lines of results out.

mod identity;
mod input;
mod merge;
mod metrics;
mod output;
mod request;
mod result;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use anyhow::{Context, bail};
use host::batch::{Batch, Done, Job};
use xxhash_rust::xxh3::xxh3_64;

use crate::args::batch::Shard;
use crate::commands::batch::identity::{Identity, Key};
use crate::commands::batch::input::{Lines, cannot_read};
use crate::commands::batch::metrics::{Metrics, Tally};
use crate::commands::batch::output::Output;
use crate::commands::batch::request::{Form, Reader, Refusal, Wanted};
use crate::commands::batch::result::{Name, Writer, Written};
use crate::interrupt::Deferred;
use crate::progress::Progress;
use crate::resolve::batch::{Batch as Command, Run};
use crate::{Ending, loading, output as printing};

/// Requests understood ahead of the engine.
const AHEAD: usize = 64;
/// In order of the requests, finished results wait for slower ones before them: so many at most.
const HELD: usize = 8192;

/// Runs the command.
///
/// # Errors
/// Whatever is wrong with the model, the device, the files; never with a single request.
pub fn run(command: Command) -> anyhow::Result<Ending> {
    match command {
        Command::Run(command) => answer_all(*command),
        Command::Merge(command) => merge::run(&command),
    }
}

fn answer_all(command: Run) -> anyhow::Result<Ending> {
    let Run { requests, output: to, ordered, shard, source, load, options, defaults, report } = command;
    loading::start_log(report)?;
    refuse_same_file(&requests, &to)?;
    let lines = Lines::open(&requests)?;
    let checkpoint = loading::open(&source, false, report)?;
    let model = source.to_string();
    let context = load.context_for(&checkpoint.config)?;
    let fingerprint = fingerprint(&format!("{model} {context} {}", defaults.shape(&checkpoint.generation)));

    // Before the model is loaded: what is wrong here should be known at once.
    let mut done = HashMap::new();
    let mut output = Output::open(&to, &mut |Written { identity, fingerprint: theirs }| {
        if theirs.is_some_and(|theirs| theirs != fingerprint) {
            bail!(
                "{} was begun with another model or other settings (line {} of the requests); \
                 give the same, or name another output",
                to.display(),
                identity.line
            );
        }
        done.insert(identity.line, identity.digest);
        Ok(())
    })?;
    let total = match report.is_told() && Progress::is_seen() {
        true => count(&requests, shard)?,
        false => None,
    };
    let writer = Writer { model, fingerprint, tokenizer: checkpoint.tokenizer.clone() };
    let reader = Reader::new(&checkpoint, defaults);
    let mut batch = loading::load_batch(checkpoint, load, options, report)?;

    let (send, receive) = sync_channel(AHEAD);
    let stop_at = to.display().to_string();
    let from = requests.clone();
    std::thread::spawn(move || {
        let mut ahead = Ahead { lines, reader, done, shard, seen: HashMap::new(), answered: stop_at };
        if let Err(error) = ahead.run(&send) {
            // Nobody listens any more if the engine has stopped.
            let _ = send.send(Err(error.context(cannot_read(&from))));
        }
    });

    let mut run = Running {
        batch: &mut batch,
        receive,
        output: &mut output,
        writer,
        ordered,
        number: 0,
        next: 0,
        held: BTreeMap::new(),
        jobs: HashMap::new(),
        tally: Tally::default(),
        progress: Metrics::start(total, report.is_told()),
    };
    let ended = run.go_on();
    let (tally, progress) = (run.tally, run.progress);
    // Results that are there are written whatever happened.
    let written = output.finish();
    let metrics = progress.end(&batch, tally);
    if report.is_told() {
        metrics.summarise(&source.to_string(), &batch.device(), report);
    }
    let ending = ended?;
    written?;
    if report.json {
        printing::print_json(&metrics, false)?;
    }
    Ok(ending)
}

/// A hash of what shapes answers.
fn fingerprint(settings: &str) -> String {
    format!("fp_{:016x}", xxh3_64(settings.as_bytes()))
}

/// Results that go where requests come from would be read as requests.
fn refuse_same_file(requests: &Path, output: &Path) -> anyhow::Result<()> {
    match (std::fs::canonicalize(requests), std::fs::canonicalize(output)) {
        (Ok(from), Ok(to)) if from == to && from.is_file() => {
            bail!("{} is the requests and the output; name another output", output.display())
        }
        _ => Ok(()),
    }
}

/// How many requests there will be, if that can be told: for the progress bar.
fn count(requests: &Path, shard: Option<Shard>) -> anyhow::Result<Option<u64>> {
    if !requests.is_file() {
        return Ok(None);
    }
    let mut lines = Lines::open(requests)?;
    let mut count = 0;
    while let Some(line) = lines.next().with_context(|| cannot_read(requests))? {
        let key = line.bytes.map_or(Key::Line(line.number), |bytes| Key::of(line.number, &bytes));
        count += u64::from(key.is_in(shard));
    }
    Ok(Some(count))
}

/// What the thread that reads has made of a line.
enum Item {
    Wanted(Name, Wanted),
    Refused(Name, Refusal),
    /// An earlier run has done it.
    Done,
}

/// Reads ahead of the engine, in a thread of its own: lines, JSON, templates and tokens.
struct Ahead {
    lines: Lines,
    reader: Reader,
    /// Digests of the lines that the output has results for.
    done: HashMap<u64, u64>,
    shard: Option<Shard>,
    /// Hashes of the `custom_id`s so far, with their lines.
    seen: HashMap<u64, u64>,
    /// The output's name.
    answered: String,
}

impl Ahead {
    /// Sends every line of the share; ends early if nobody listens.
    fn run(&mut self, send: &SyncSender<anyhow::Result<Item>>) -> anyhow::Result<()> {
        while let Some(line) = self.lines.next()? {
            let item = match line.bytes {
                Some(bytes) => {
                    let key = Key::of(line.number, &bytes);
                    if !key.is_in(self.shard) {
                        continue;
                    }
                    self.item(Identity::of(line.number, &bytes), key, &bytes)?
                }
                None => {
                    let name = Name { identity: Identity::of(line.number, b""), key: Key::Line(line.number) };
                    if !name.key.is_in(self.shard) {
                        continue;
                    }
                    match self.is_done(name.identity)? {
                        true => Item::Done,
                        false => {
                            let most = input::LONGEST >> 20;
                            Item::Refused(
                                name,
                                Refusal::new("line_too_long", format!("the line is longer than {most} MiB")),
                            )
                        }
                    }
                }
            };
            if send.send(Ok(item)).is_err() {
                break;
            }
        }
        Ok(())
    }

    fn item(&mut self, identity: Identity, key: Key, bytes: &[u8]) -> anyhow::Result<Item> {
        let mut before = None;
        if key.id().is_some() {
            let first = *self.seen.entry(key.hash(0)).or_insert(identity.line);
            before = (first != identity.line).then_some(first);
        }
        if self.is_done(identity)? {
            return Ok(Item::Done);
        }
        let name = Name { identity, key };
        if let Some(first) = before {
            let message = format!("line {first} has the same `custom_id`");
            return Ok(Item::Refused(name, Refusal::new("duplicate_custom_id", message)));
        }
        Ok(match self.reader.read(bytes, &name.key) {
            Ok(wanted) => Item::Wanted(name, wanted),
            Err(refusal) => Item::Refused(name, refusal),
        })
    }

    fn is_done(&self, identity: Identity) -> anyhow::Result<bool> {
        match self.done.get(&identity.line) {
            None => Ok(false),
            Some(digest) if *digest == identity.digest => Ok(true),
            Some(_) => bail!(
                "line {} is not the one that {} has a result for: the requests have changed; \
                 give the same, or name another output",
                identity.line,
                self.answered
            ),
        }
    }
}

/// The run, from the first request to the last result.
struct Running<'a> {
    batch: &'a mut Batch,
    receive: Receiver<anyhow::Result<Item>>,
    output: &'a mut Output,
    writer: Writer,
    ordered: bool,
    /// Requests taken so far; each is known by its place among them.
    number: u64,
    /// The next to be written, where order matters.
    next: u64,
    held: BTreeMap<u64, String>,
    jobs: HashMap<u64, Asked>,
    tally: Tally,
    progress: Metrics,
}

/// A request that is being answered.
struct Asked {
    name: Name,
    form: Form,
    seed: Option<u64>,
}

impl Running<'_> {
    fn go_on(&mut self) -> anyhow::Result<Ending> {
        let interrupt = Deferred::new();
        let mut more = true;
        loop {
            if interrupt.asked() {
                return Ok(Ending::Interrupted);
            }
            more = more && self.take_requests()?;
            if self.batch.is_idle() {
                if !more {
                    break;
                }
            } else {
                for done in self.batch.step(&mut || interrupt.asked())? {
                    self.answer(done);
                }
            }
            self.output.write_due()?;
            self.progress.show(self.batch, self.tally);
        }
        self.output.flush()?;
        Ok(Ending::Done)
    }

    /// Takes the requests that there is room for; waits a little for one if there is nothing else to do. False when there are no more.
    fn take_requests(&mut self) -> anyhow::Result<bool> {
        while self.batch.has_room() && self.held.len() < HELD {
            let item = if self.batch.is_idle() {
                match self.receive.recv_timeout(Duration::from_millis(50)) {
                    Ok(item) => item?,
                    Err(RecvTimeoutError::Timeout) => return Ok(true),
                    Err(RecvTimeoutError::Disconnected) => return Ok(false),
                }
            } else {
                match self.receive.try_recv() {
                    Ok(item) => item?,
                    Err(TryRecvError::Empty) => return Ok(true),
                    Err(TryRecvError::Disconnected) => return Ok(false),
                }
            };
            match item {
                Item::Done => self.tally.before += 1,
                Item::Refused(name, refusal) => self.refuse(&name, &refusal),
                Item::Wanted(name, wanted) => self.submit(name, wanted),
            }
            // Many requests may be refused in a row.
            self.output.write_due()?;
            self.progress.show(self.batch, self.tally);
        }
        Ok(true)
    }

    fn submit(&mut self, name: Name, wanted: Wanted) {
        let Wanted { request, logprobs, form } = wanted;
        let seed = (request.sampling.temperature > 0.0).then_some(request.sampling.seed);
        match self.batch.submit(Job { id: self.number, request, logprobs }) {
            Ok(()) => {
                self.jobs.insert(self.number, Asked { name, form, seed });
                self.number += 1;
            }
            Err(error) => self.refuse(&name, &error.into()),
        }
    }

    fn refuse(&mut self, name: &Name, refusal: &Refusal) {
        self.tally.refused += 1;
        let number = self.number;
        self.number += 1;
        self.write(number, result::refusal(name, refusal));
    }

    fn answer(&mut self, done: Done) {
        let Some(Asked { name, form, seed }) = self.jobs.remove(&done.id) else { return };
        self.tally.answered += 1;
        let line = self.writer.answer(&name, form, &done.answer, seed);
        self.write(done.id, line);
    }

    fn write(&mut self, number: u64, line: String) {
        if !self.ordered {
            return self.output.push(&line);
        }
        self.held.insert(number, line);
        while let Some(line) = self.held.remove(&self.next) {
            self.output.push(&line);
            self.next += 1;
        }
    }
}
