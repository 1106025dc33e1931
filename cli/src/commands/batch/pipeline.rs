//! The threads of a run: one reads requests, and one for each device answers them. The writing thread, which starts
//! them, receives what they send as events.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::anyhow;
use host::batch::{Batch, Metrics, Queue};

use super::ahead::{Ahead, Work};
use super::result::Writer;
use super::worker::Worker;

/// Capacity of the two queues: of requests on their way to the devices, and of results on their way to the output.
const AHEAD: usize = 64;

/// What the writing thread receives.
#[derive(Debug)]
pub enum Event {
    /// An earlier run has done a request.
    DoneBefore,
    /// A request cannot be answered: its place among the requests, and the line of its result.
    Refused(u64, String),
    /// A request is answered: its place, the line of its result, and whether a limit cut the answer off.
    Answered(u64, String, bool),
    /// The reading thread has ended: all requests are read, or the rest of them cannot be.
    ReaderLeft(Option<anyhow::Error>),
    /// A worker has ended: all is answered, it was told to stop, or its device has failed.
    WorkerLeft(Option<anyhow::Error>),
}

/// Does a thread's `work`, and sends `left` with the error when the thread ends, even if it panics: nobody else would
/// notice. `who` is the thread's name in that error.
pub fn tell_end(
    events: SyncSender<Event>,
    left: fn(Option<anyhow::Error>) -> Event,
    who: &str,
    work: impl FnOnce() -> anyhow::Result<()>,
) {
    let lost = Some(anyhow!("{who} was lost; this is a mistake in the program"));
    let mut leaving = Leaving { events, left, error: lost };
    leaving.error = work().err();
}

/// Sends an event when it is dropped.
struct Leaving {
    events: SyncSender<Event>,
    left: fn(Option<anyhow::Error>) -> Event,
    error: Option<anyhow::Error>,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        // Nobody receives this if results cannot be written.
        let _ = self.events.send((self.left)(self.error.take()));
    }
}

/// The threads of a run.
pub struct Pipeline {
    /// What they send.
    pub events: Receiver<Event>,
    stop: Arc<AtomicBool>,
    /// How each worker is getting on.
    progress: Vec<Arc<Mutex<Metrics>>>,
    workers: Vec<JoinHandle<()>>,
}

impl Pipeline {
    /// Starts a thread that reads requests `ahead`, and a worker for each of `batches`.
    pub fn start(mut ahead: Ahead, batches: Vec<Batch>, writer: Writer) -> Self {
        let (send_work, work) = sync_channel(AHEAD);
        let (send, events) = sync_channel(AHEAD);
        let work = Arc::new(Mutex::new(Queue::new(work, |work: &Work| work.wanted.request.max_tokens)));
        let (writer, stop) = (Arc::new(writer), Arc::new(AtomicBool::new(false)));
        let start = |batch: Batch| {
            let metrics = Arc::new(Mutex::new(batch.metrics()));
            let (work, stop, events, writer) = (work.clone(), stop.clone(), send.clone(), writer.clone());
            let worker = Worker { batch, work, events, writer, stop, metrics: metrics.clone(), asked: HashMap::new() };
            (metrics, std::thread::spawn(move || worker.run()))
        };
        // Workers alone hold `work` from here on, so the reader notices when none of them takes requests any more.
        let (progress, workers) = batches.into_iter().map(start).unzip();
        // Nobody waits for this thread: it may be waiting for input that never comes.
        std::thread::spawn(move || {
            tell_end(send.clone(), Event::ReaderLeft, "the reader of requests", || ahead.run(&send_work, &send));
        });
        Self { events, stop, progress, workers }
    }

    /// How many workers there are.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Tells the workers to end before all is answered.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// How the workers are getting on together.
    pub fn metrics(&self) -> Metrics {
        let all = self.progress.iter().map(|one| *one.lock().unwrap_or_else(PoisonError::into_inner));
        all.fold(Metrics::default(), Metrics::and)
    }

    /// Waits until the workers have given their devices back, which takes a while for a card with much memory.
    pub fn join(self) {
        self.workers.into_iter().for_each(|worker| worker.join().unwrap_or_default());
    }
}

#[cfg(test)]
impl Pipeline {
    /// A pipeline of `events` that were thought up, the end of one worker among them.
    pub fn of(events: Vec<Event>) -> Self {
        let (send, received) = sync_channel(events.len());
        events.into_iter().for_each(|event| send.send(event).expect("there is room"));
        let (stop, workers) = (Arc::default(), vec![std::thread::spawn(|| ())]);
        Self { events: received, stop, progress: Vec::new(), workers }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    /// What a thread with this work sends when it ends.
    fn end_of(work: fn() -> anyhow::Result<()>) -> Option<String> {
        let (send, events) = sync_channel(1);
        let thread = std::thread::spawn(move || tell_end(send, Event::ReaderLeft, "the reader", work));
        let event = events.recv().expect("the end is told");
        let _ = thread.join();
        assert!(events.recv().is_err(), "once");
        match event {
            Event::ReaderLeft(error) => error.map(|error| error.to_string()),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_thread_tells_its_end_however_it_ends() {
        assert_eq!(end_of(|| Ok(())), None);
        assert_eq!(end_of(|| bail!("no more")).as_deref(), Some("no more"));
        let lost = "the reader was lost; this is a mistake in the program";
        assert_eq!(end_of(|| panic!("as a defect does")).as_deref(), Some(lost));
    }
}
