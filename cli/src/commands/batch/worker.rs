//! A device and the thread that keeps it busy.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Duration;

use host::Finish;
use host::batch::{Batch, Done, Job, Metrics, Queue};

use super::ahead::Work;
use super::pipeline::{Event, tell_end};
use super::request::{Endpoint, Wanted};
use super::result::{self, Name, Writer};

/// Answers requests on one device.
pub struct Worker {
    /// The device.
    pub batch: Batch,
    /// Requests; the worker that has room first takes the next.
    pub work: Arc<Mutex<Queue<Work>>>,
    /// Where results are sent.
    pub events: SyncSender<Event>,
    /// Makes lines of answers.
    pub writer: Arc<Writer>,
    /// Tells the worker to end before all is answered.
    pub stop: Arc<AtomicBool>,
    /// How it is going, for other threads.
    pub metrics: Arc<Mutex<Metrics>>,
    /// Requests that are being answered, by number.
    pub asked: HashMap<u64, Asked>,
}

/// What a result must say about its request.
pub struct Asked {
    name: Name,
    endpoint: Endpoint,
    seed: Option<u64>,
}

impl Worker {
    /// Answers requests until there are no more, or it is told to stop. Then it tells that it has left, before it gives
    /// its device back.
    pub fn run(mut self) {
        tell_end(self.events.clone(), Event::WorkerLeft, "a worker", || Ok(self.go_on()?));
    }

    fn go_on(&mut self) -> Result<(), host::Error> {
        let stop = self.stop.clone();
        let mut more = true;
        while !stop.load(Ordering::Relaxed) {
            more = more && self.take();
            self.batch.expect_more(more);
            if self.batch.is_idle() {
                if !more {
                    break;
                }
                continue;
            }
            let done = self.batch.step()?;
            *self.metrics.lock().unwrap_or_else(PoisonError::into_inner) = self.batch.metrics();
            if !done.into_iter().all(|done| self.answer(done)) {
                break;
            }
        }
        Ok(())
    }

    /// Takes as many requests as there is room for. If there is nothing else to do, waits a little for one. Returns
    /// false when there are no more.
    fn take(&mut self) -> bool {
        if !self.batch.has_room() {
            return true;
        }
        let work = self.work.clone();
        let mut work = match work.try_lock() {
            Ok(work) => work,
            // Another worker waits for requests, or takes some. A worker that has something to run does not wait for
            // it.
            Err(TryLockError::WouldBlock) if !self.batch.is_idle() => return true,
            Err(_) => work.lock().unwrap_or_else(PoisonError::into_inner),
        };
        while self.batch.has_room() {
            let patience = if self.batch.is_idle() { Duration::from_millis(20) } else { Duration::ZERO };
            match work.next(patience) {
                Ok(work) => self.submit(work),
                Err(error) => return error == RecvTimeoutError::Timeout,
            }
        }
        true
    }

    fn submit(&mut self, work: Work) {
        let Work { number, name, wanted: Wanted { request, logprobs, endpoint } } = work;
        let seed = (!request.sampling.is_greedy()).then_some(request.sampling.seed);
        match self.batch.submit(Job { id: number, request, logprobs }) {
            Ok(()) => {
                self.asked.insert(number, Asked { name, endpoint, seed });
            }
            Err(error) => {
                let line = result::refusal(&name, &error.into());
                let _ = self.events.send(Event::Refused(number, line));
            }
        }
    }

    /// Sends an answer on. Returns false if nobody receives it.
    fn answer(&mut self, done: Done) -> bool {
        let Some(Asked { name, endpoint, seed }) = self.asked.remove(&done.id) else { return true };
        let event = match done.answer {
            Ok(answer) => {
                let line = self.writer.answer(&name, &endpoint, &answer, seed);
                Event::Answered(done.id, line, answer.finish == Finish::Length)
            }
            Err(error) => Event::Refused(done.id, result::refusal(&name, &error.into())),
        };
        self.events.send(event).is_ok()
    }
}
