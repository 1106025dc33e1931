//! The n-gram drafting operators: microseconds a call, compared with the time that reading the tokens takes.

use crate::ngram::measure::{self, LARGE, SMALL};
use crate::ngram::{Hit, Published};
use crate::{Bench, BenchError};

/// The batches to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NgramSizes {
    /// The cases.
    pub cases: Vec<Published>,
    /// Whether to measure the published designs beside this one, and, on a card, the host too.
    pub peers: bool,
}

impl NgramSizes {
    /// The two cases whose figures are held against targets, and the five groups of the published benchmark.
    pub fn published() -> Self {
        let groups = measure::groups();
        let cases = [SMALL, LARGE].into_iter().chain(groups.into_iter().flat_map(|g| g.cases).map(|(_, case)| case));
        Self { cases: cases.collect(), peers: false }
    }

    /// Small cases, for checks on the emulator: a match in each place, with the published designs beside this one.
    pub fn small() -> Self {
        let case = |hit| Published { batch: 4, length: 80, threshold: 20, hit };
        Self { cases: Hit::ALL.map(case).to_vec(), peers: true }
    }

    /// Number of rows of [`run`], without the host's.
    pub fn cases(&self) -> usize {
        self.cases.len() * if self.peers { 3 } else { 1 }
    }
}

/// Measures every case.
///
/// # Errors
/// If there is too little memory, the device fails, or a result is wrong.
pub fn run(bench: &mut Bench<'_>, sizes: &NgramSizes) -> Result<(), BenchError> {
    for case in &sizes.cases {
        if case.batch == 0 || case.length == 0 {
            return Err(BenchError::Size("--batch and --length must be 1 or more".into()));
        }
        bench.room_for(2 * case.bytes(), "--batch or --length")?;
        let before = bench.rows.len();
        measure::run(bench, *case, sizes.peers)?;
        let Published { batch, length, threshold, hit } = case;
        for row in &mut bench.rows[before..] {
            // Two of the groups vary only the threshold.
            row.label.size = format!("batch {batch}, length {length}, threshold {threshold}, {}", hit.name());
        }
    }
    Ok(())
}
