//! Requests that are read and parsed before a device has room for them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};

use super::identity::{Identity, Key};
use super::input::{LONGEST, Line, Lines, cannot_read};
use super::out_of_order;
use super::pipeline::Event;
use super::request::{Reader, Refusal, Wanted};
use super::result::{self, Name};
use crate::args::batch::Shard;

/// Reads ahead of the devices, in a thread of its own: lines, JSON, templates and tokens.
pub struct Ahead {
    /// The requests.
    pub lines: Lines,
    /// Where the requests come from.
    pub requests: PathBuf,
    /// Parses requests.
    pub reader: Reader,
    /// For each line that the output has a result for, the request's digest.
    pub done: HashMap<u64, u64>,
    /// The output's path.
    pub output: PathBuf,
    /// The share of the requests that is wanted.
    pub shard: Option<Shard>,
    /// For the hash of each `custom_id` so far, its line.
    pub seen: HashMap<u64, u64>,
    /// Results that are held back, if results are written in the order of the requests.
    pub held: Option<Arc<Held>>,
}

/// Finished results that wait for slower ones before them.
#[derive(Default)]
pub struct Held {
    /// How many results were written.
    pub written: AtomicU64,
    /// Bytes of the results that wait.
    pub bytes: AtomicU64,
}

impl Held {
    /// Most results that may wait…
    const MOST: u64 = 8192;
    /// …and roughly the most bytes of them.
    const MOST_BYTES: u64 = 256 << 20;

    /// Whether too much waits to take on another request. `begun` requests were taken on so far.
    fn is_full(&self, begun: u64) -> bool {
        begun - self.written.load(Ordering::Relaxed) > Self::MOST
            || self.bytes.load(Ordering::Relaxed) > Self::MOST_BYTES
    }
}

/// A request that can be answered.
pub struct Work {
    /// Its place among the requests of this run.
    pub number: u64,
    /// How its result is named.
    pub name: Name,
    /// What is asked for.
    pub wanted: Wanted,
}

/// What became of a line.
enum Item {
    Wanted(Name, Wanted),
    Refused(Name, Refusal),
    /// An earlier run has answered it.
    Done,
}

impl Ahead {
    /// Sends on every line of the share. Ends early if nobody receives them.
    ///
    /// # Errors
    /// If lines cannot be read, or are not those that the output has results for.
    pub fn run(&mut self, work: &SyncSender<Work>, events: &SyncSender<Event>) -> anyhow::Result<()> {
        let (mut number, mut last) = (0, 0);
        // Lines so far that the output has results for.
        let mut done = 0;
        while let Some(line) = self.lines.next().with_context(|| cannot_read(&self.requests))? {
            last = line.number;
            let key = line.bytes.as_ref().map_or(Key::Line(line.number), |bytes| Key::of(line.number, bytes));
            if !key.is_in(self.shard) {
                continue;
            }
            let item = self.item(line, key)?;
            if let Item::Done = item {
                done += 1;
            } else if self.held.is_some() && done < self.done.len() {
                // A later line has a result. (If the requests are a file that can be read twice, this was seen before.)
                return Err(out_of_order(&self.output));
            }
            let sent = match item {
                Item::Done => events.send(Event::DoneBefore).is_ok(),
                Item::Refused(name, refusal) => {
                    number += 1;
                    events.send(Event::Refused(number - 1, result::refusal(&name, &refusal))).is_ok()
                }
                Item::Wanted(name, wanted) => {
                    number += 1;
                    work.send(Work { number: number - 1, name, wanted }).is_ok()
                }
            };
            // Results that are held back for a slow one before them must not pile up without bound.
            while self.held.as_ref().is_some_and(|held| held.is_full(number)) {
                std::thread::sleep(Duration::from_millis(2));
            }
            if !sent {
                return Ok(());
            }
        }
        let beyond_last = self.done.keys().filter(|line| **line > last).count();
        if beyond_last > 0 { Err(beyond(beyond_last, &self.output)) } else { Ok(()) }
    }

    fn item(&mut self, line: Line, key: Key) -> anyhow::Result<Item> {
        let identity = Identity::of(line.number, line.bytes.as_deref().unwrap_or_default());
        let mut before = None;
        if key.id().is_some() {
            let first = *self.seen.entry(key.hash(0)).or_insert(identity.line);
            before = (first != identity.line).then_some(first);
        }
        if is_done(&self.done, identity, &self.output)? {
            return Ok(Item::Done);
        }
        let name = Name { identity, key };
        if let Some(first) = before {
            let message = format!("line {first} has the same `custom_id`");
            return Ok(Item::Refused(name, Refusal::new("duplicate_custom_id", message)));
        }
        let Some(bytes) = line.bytes else {
            let message = format!("the line is longer than {} MiB", LONGEST >> 20);
            return Ok(Item::Refused(name, Refusal::new("line_too_long", message)));
        };
        Ok(match self.reader.read(&bytes, &name.key) {
            Ok(wanted) => Item::Wanted(name, wanted),
            Err(refusal) => Item::Refused(name, refusal),
        })
    }
}

/// Whether the output has a result for this line. `done` has the digests of the lines that it has results for.
///
/// # Errors
/// If the output has a result for another line of this number.
pub fn is_done(done: &HashMap<u64, u64>, identity: Identity, output: &Path) -> anyhow::Result<bool> {
    match done.get(&identity.line) {
        None => Ok(false),
        Some(digest) if *digest == identity.digest => Ok(true),
        Some(_) => bail!(
            "line {} of the requests is not the one that {} has a result for: they have changed; give the same, or name another output",
            identity.line,
            output.display()
        ),
    }
}

/// The error for an output that has `count` results of lines that are not among the requests.
pub fn beyond(count: usize, output: &Path) -> anyhow::Error {
    anyhow!(
        "{} has {count} results of lines that are not among the requests: they have changed; give the same, or name another output",
        output.display()
    )
}
