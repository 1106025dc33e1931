//! The queue of requests for the devices.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

/// Most requests in the line.
const LINE: usize = 1024;

/// A queue of requests. While more may come, the first is served first. Once all have come, those with the longest
/// possible answers go first. The devices would otherwise end with a few long answers, in steps that are hardly cheaper
/// than full ones (longest processing time first: Graham, 1969, "Bounds on multiprocessing timing anomalies").
pub struct Queue<T> {
    /// The source of requests. None once all have come.
    more: Option<Receiver<T>>,
    line: VecDeque<T>,
    /// How long a request may take.
    length: fn(&T) -> usize,
}

impl<T> Queue<T> {
    /// A queue of the requests that `more` brings. `length` says how long a request may take, in any unit.
    pub fn new(more: Receiver<T>, length: fn(&T) -> usize) -> Self {
        Self { more: Some(more), line: VecDeque::new(), length }
    }

    /// Takes the next request. If there is none yet, waits for one, but no longer than `patience`.
    ///
    /// # Errors
    /// Timeout: none came in that time. Disconnected: there are no more.
    pub fn next(&mut self, patience: Duration) -> Result<T, RecvTimeoutError> {
        self.fill();
        if let Some(next) = self.line.pop_front() {
            return Ok(next);
        }
        self.more.as_ref().map_or(Err(RecvTimeoutError::Disconnected), |more| more.recv_timeout(patience))
    }

    /// Moves what has come into the line.
    fn fill(&mut self) {
        while self.line.len() < LINE
            && let Some(more) = &self.more
        {
            match more.try_recv() {
                Ok(next) => self.line.push_back(next),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.more = None;
                    let length = self.length;
                    self.line.make_contiguous().sort_by_key(|next| Reverse(length(next)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{channel, sync_channel};

    use super::*;

    /// A name and a length.
    type Named = (u32, usize);

    fn rest(queue: &mut Queue<Named>) -> Vec<u32> {
        std::iter::from_fn(|| queue.next(Duration::ZERO).ok()).map(|(name, _)| name).collect()
    }

    #[test]
    fn while_more_may_come_the_first_is_next() {
        let (send, more) = channel();
        let mut queue = Queue::new(more, |(_, length): &Named| *length);
        assert_eq!(queue.next(Duration::ZERO), Err(RecvTimeoutError::Timeout));
        for named in [(0, 1), (1, 9), (2, 5)] {
            send.send(named).unwrap();
        }
        assert_eq!(rest(&mut queue), [0, 1, 2]);
        assert_eq!(queue.next(Duration::from_millis(1)), Err(RecvTimeoutError::Timeout));
    }

    #[test]
    fn once_all_are_in_the_longest_is_next_and_of_equal_ones_the_first() {
        let (send, more) = channel();
        let mut queue = Queue::new(more, |(_, length): &Named| *length);
        for named in [(0, 1), (1, 5), (2, 9), (3, 5), (4, 9)] {
            send.send(named).unwrap();
        }
        assert_eq!(queue.next(Duration::ZERO), Ok((0, 1)));
        drop(send);
        assert_eq!(rest(&mut queue), [2, 4, 1, 3]);
        assert_eq!(queue.next(Duration::from_secs(9)), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn the_line_is_bounded_and_none_is_lost() {
        let (send, more) = sync_channel(8);
        let sender = std::thread::spawn(move || (0..3000).all(|name| send.send((name, name as usize)).is_ok()));
        let mut queue = Queue::new(more, |(_, length): &Named| *length);
        let mut names = Vec::new();
        loop {
            match queue.next(Duration::from_millis(20)) {
                Ok((name, _)) => names.push(name),
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => break,
            }
            assert!(queue.line.len() <= LINE);
        }
        assert!(sender.join().unwrap());
        names.sort_unstable();
        assert!(names.into_iter().eq(0..3000));
    }

    #[test]
    fn who_sends_knows_when_nobody_takes_them() {
        let (send, more) = channel();
        drop(Queue::new(more, |(_, length): &Named| *length));
        assert!(send.send((0, 0)).is_err());
    }
}
