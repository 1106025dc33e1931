//! Requests, read and understood before a device has room for them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use anyhow::bail;

use super::identity::{Identity, Key};
use super::input::{LONGEST, Line, Lines};
use super::request::{Reader, Refusal, Wanted};
use super::result::{self, Name};
use super::{Event, HELD};
use crate::args::batch::Shard;

/// Reads ahead of the devices, in a thread of its own: lines, JSON, templates and tokens.
pub struct Ahead {
    /// The requests.
    pub lines: Lines,
    /// Understands them.
    pub reader: Reader,
    /// Digests of the lines that the output has results for.
    pub done: HashMap<u64, u64>,
    /// Which of them are wanted.
    pub shard: Option<Shard>,
    /// Hashes of the `custom_id`s so far, with their lines.
    pub seen: HashMap<u64, u64>,
    /// The output's name.
    pub answered: String,
    /// In order of the requests: how many results were written.
    pub written: Option<Arc<AtomicU64>>,
}

/// A request that can be answered.
pub struct Work {
    /// Its place among the requests of this run.
    pub number: u64,
    /// Whose.
    pub name: Name,
    /// What.
    pub wanted: Wanted,
}

/// What the thread has made of a line.
enum Item {
    Wanted(Name, Wanted),
    Refused(Name, Refusal),
    /// An earlier run has done it.
    Done,
}

impl Ahead {
    /// Sends every line of the share on; ends early if nobody listens.
    ///
    /// # Errors
    /// If lines cannot be read, or are not those that the output has results for.
    pub fn run(&mut self, work: &SyncSender<Work>, events: &SyncSender<Event>) -> anyhow::Result<()> {
        let mut number = 0;
        while let Some(line) = self.lines.next()? {
            let key = line.bytes.as_ref().map_or(Key::Line(line.number), |bytes| Key::of(line.number, bytes));
            if !key.is_in(self.shard) {
                continue;
            }
            let sent = match self.item(line, key)? {
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
            // Where results are held back for a slow one before them, they must not become ever more.
            let held = |written: &Arc<AtomicU64>| number - written.load(Ordering::Relaxed) > HELD;
            while self.written.as_ref().is_some_and(held) {
                std::thread::sleep(Duration::from_millis(2));
            }
            if !sent {
                break;
            }
        }
        Ok(())
    }

    fn item(&mut self, line: Line, key: Key) -> anyhow::Result<Item> {
        let identity = Identity::of(line.number, line.bytes.as_deref().unwrap_or_default());
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
        let Some(bytes) = line.bytes else {
            let message = format!("the line is longer than {} MiB", LONGEST >> 20);
            return Ok(Item::Refused(name, Refusal::new("line_too_long", message)));
        };
        Ok(match self.reader.read(&bytes, &name.key) {
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
