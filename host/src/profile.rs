//! Where the time of an answer goes: spans on the host's clock, for a viewer of traces.

use std::time::{Duration, Instant};

/// Spans, in the order in which they ended.
#[derive(Clone, Debug)]
pub struct Profile {
    start: Instant,
    /// What was recorded.
    pub spans: Vec<Span>,
}

/// Something that took time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// What it was.
    pub name: &'static str,
    /// Who was busy with it.
    pub track: Track,
    /// From the profile's start.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
    /// Numbers that describe it, by name.
    pub numbers: Vec<(&'static str, u64)>,
}

/// Who was busy. The spans of a track do not overlap, except that one may contain others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Track {
    /// The host's thread.
    Host,
    /// The first CTA of the device's decode steps.
    Device,
}

/// A part of a step on a device: what was done, and when it ended, in nanoseconds on the device's clock.
pub type Phase = (&'static str, u64);

impl Default for Profile {
    fn default() -> Self {
        Self { start: Instant::now(), spans: Vec::new() }
    }
}

impl Profile {
    /// Records what the host did from `start` until now.
    pub fn span(&mut self, name: &'static str, start: Instant, numbers: &[(&'static str, u64)]) {
        let duration = start.elapsed();
        let start = start.saturating_duration_since(self.start);
        self.spans.push(Span { name, track: Track::Host, start, duration, numbers: numbers.to_vec() });
    }

    /// Records the phases of a step whose end the host saw at `seen`. The device's clock is not the host's, so the last
    /// phase is taken to have ended at `seen`: too late by the time that the report took to reach the host.
    pub fn phases(&mut self, phases: &[Phase], seen: Instant) {
        let (Some(&(_, first)), Some(&(_, last))) = (phases.first(), phases.last()) else { return };
        let seen = seen.saturating_duration_since(self.start);
        let mut span = |name, from: u64, to: u64| {
            let start = seen.saturating_sub(Duration::from_nanos(last - from));
            let duration = Duration::from_nanos(to.saturating_sub(from));
            self.spans.push(Span { name, track: Track::Device, start, duration, numbers: Vec::new() });
        };
        for pair in phases.windows(2) {
            span(pair[1].0, pair[0].1, pair[1].1);
        }
        span("decode step", first, last);
    }
}
