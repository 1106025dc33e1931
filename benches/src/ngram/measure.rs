//! The measured cases: the published groups, and the two cases whose figures are held against targets.

use std::time::Instant;

use super::{Batch, Hit, OverHost, Peer, Published, Way};
use crate::{Bench, BenchError, Case, Figures, Label, Path, Samples, Unit, Work};

/// Bytes of tokens that launches rotate over: more than twice the L2 of an H100.
const ROTATED_BYTES: u64 = 128 << 20;
/// Most copies of a batch.
const MOST_SETS: u64 = 512;

/// A group of cases.
#[derive(Clone, Debug)]
pub struct Group {
    /// What varies in it.
    pub name: &'static str,
    /// Its cases, each with its name within the group.
    pub cases: Vec<(String, Published)>,
}

/// Batch 32, length 512: a call that should cost little beside the launch.
pub const SMALL: Published = Published { batch: 32, length: 512, threshold: 128, hit: Hit::PromptLate };
/// Batch 256, length 131,072, no match: every token is read.
pub const LARGE: Published = Published { batch: 256, length: 131_072, threshold: 1024, hit: Hit::None };

/// The five groups of the published benchmark.
pub fn groups() -> Vec<Group> {
    let late = |batch, length, threshold| Published { batch, length, threshold, hit: Hit::PromptLate };
    let thresholds = [16, 32, 64, 128, 256];
    let sweep = |batch| thresholds.map(|t| (t.to_string(), late(batch, 32_768, t))).to_vec();
    vec![
        Group {
            name: "length (batch 16, threshold 512)",
            cases: [1024, 4096, 16_384, 65_536, 131_072].map(|n| (n.to_string(), late(16, n, 512))).to_vec(),
        },
        Group {
            name: "batch (length 16384, threshold 8192)",
            cases: [1, 8, 32, 128, 512].map(|b| (b.to_string(), late(b, 16_384, 8192))).to_vec(),
        },
        Group {
            name: "where the match is (batch 16, length 32768, threshold 512)",
            cases: Hit::ALL
                .map(|hit| (hit.name().to_string(), Published { batch: 16, length: 32_768, threshold: 512, hit }))
                .to_vec(),
        },
        Group { name: "threshold (batch 8, length 32768)", cases: sweep(8) },
        Group { name: "threshold (batch 128, length 32768)", cases: sweep(128) },
    ]
}

/// The figures of one case. Those of the device are for calls in a graph that rotates over copies of the batch.
#[derive(Clone, Copy, Debug)]
pub struct Measurement {
    /// The case.
    pub published: Published,
    /// Copies that launches rotated over.
    pub sets: usize,
    /// This kernel; `None` if nothing is timed.
    pub kernel: Option<Figures>,
    /// [`Peer::Plain`].
    pub plain: Option<Figures>,
    /// [`Peer::BlockScan`].
    pub block_scan: Option<Figures>,
    /// Seconds of the serial algorithm on the host, on arrays that are there already.
    pub serial: Option<f64>,
    /// Seconds of the same, including the copies to the host and back: [`OverHost`].
    pub over_host: Option<f64>,
}

/// The number of copies to rotate over so that a launch finds none of its tokens in the cache.
fn sets(case: &Published) -> usize {
    ROTATED_BYTES.div_ceil(case.bytes()).clamp(2, MOST_SETS) as usize
}

fn label(case: &Published, name: &str) -> Label {
    let size = format!("batch {}, length {}, {}", case.batch, case.length, case.hit.name());
    Label { bench: "ngram", name: name.into(), size }
}

/// Runs one case: checks each design against the serial algorithm, and times it. With `peers`, also the slower designs
/// and the host.
///
/// # Errors
/// If the device fails, or a result is wrong.
pub fn run(bench: &mut Bench<'_>, published: Published, peers: bool) -> Result<Measurement, BenchError> {
    let inputs = published.inputs::<i64>();
    let expected = inputs.expected();
    let sets = if bench.is_timed() { sets(&published) } else { 1 };
    let mut batch = Batch::new(bench.device(), &inputs, sets)?;
    let case = |name: &str| Case {
        label: label(&published, name),
        unit: Unit::Microseconds,
        work: Work { bytes: published.bytes(), operations: 0 },
        path: Path::Read,
        sets,
    };
    let kernel = bench.case(case("one launch"), |set| batch.launch(set), || batch.check(0, &expected))?.figures;
    let mut measured =
        Measurement { published, sets, kernel, plain: None, block_scan: None, serial: None, over_host: None };
    if !peers {
        return Ok(measured);
    }
    for (peer, name) in [(Peer::Plain, "two launches, serial"), (Peer::BlockScan, "two launches, block scan")] {
        batch.reset(&inputs)?;
        let run = |set| batch.launch_peer(set, peer);
        let figures = bench.case(case(name), run, || batch.check(0, &expected))?.figures;
        match peer {
            Peer::Plain => measured.plain = figures,
            Peer::BlockScan => measured.block_scan = figures,
        }
    }
    if bench.is_timed() {
        let mut outcome = inputs.before();
        let work = Work { bytes: published.bytes(), operations: 0 };
        let mut on_host = |name: &str, samples: Option<Samples>| {
            samples.map(|samples| {
                bench.on_host(label(&published, name), work, &samples);
                samples.median()
            })
        };
        let serial = measured_on_host(|| {
            inputs.run_serial(&mut outcome);
            Ok(())
        })?;
        measured.serial = on_host("serial, on the CPU", serial);
        let mut over_host = OverHost::new(&mut batch)?;
        over_host.run()?;
        measured.over_host = on_host("serial, with copies", measured_on_host(|| Ok(over_host.run()?))?);
        if let Some(what) = batch.check(0, &expected)? {
            return Err(BenchError::Wrong { case: label(&published, "over the host").to_string(), what });
        }
    }
    Ok(measured)
}

/// Measures the seconds of `work` three times.
fn measured_on_host(mut work: impl FnMut() -> Result<(), BenchError>) -> Result<Option<Samples>, BenchError> {
    let mut samples = Vec::new();
    for _ in 0..3 {
        let start = Instant::now();
        work()?;
        samples.push(start.elapsed().as_secs_f64());
    }
    Ok(Samples::new(samples))
}

/// The figures of this kernel alone, launched in each of `ways`. It rotates over copies of the batch, or with `cached`
/// runs on one copy.
///
/// # Errors
/// A device error, or a wrong result.
pub fn in_ways(
    bench: &mut Bench<'_>,
    published: Published,
    ways: &[Way],
    cached: bool,
) -> Result<Vec<(Way, Option<Figures>)>, BenchError> {
    let inputs = published.inputs::<i64>();
    let expected = inputs.expected();
    let sets = if cached || !bench.is_timed() { 1 } else { sets(&published) };
    let batch = Batch::new(bench.device(), &inputs, sets)?;
    let mut found = Vec::new();
    for &way in ways {
        let name = format!("{way:?}{}", if cached { ", in the cache" } else { "" });
        let case = Case {
            label: label(&published, &name),
            unit: Unit::Microseconds,
            work: Work { bytes: published.bytes(), operations: 0 },
            path: Path::Read,
            sets,
        };
        let run = |set| batch.launch_with(set, way);
        found.push((way, bench.case(case, run, || batch.check(0, &expected))?.figures));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::device::Device;

    #[test]
    fn a_case_is_checked_on_the_emulator() {
        let device = Device::emulator(3);
        let mut watch = |_: crate::Event<'_>| {};
        let mut bench = Bench::new(&device, 1, &mut watch).unwrap();
        let case = Published { batch: 4, length: 80, threshold: 20, hit: Hit::PromptLate };
        assert!(run(&mut bench, case, true).unwrap().kernel.is_none());
        let ways = [Way::Blocks(1), Way::Blocks(3), Way::Together];
        assert_eq!(in_ways(&mut bench, case, &ways, true).unwrap().len(), 3);
        assert_eq!(bench.rows().len(), 6);
    }

    #[test]
    fn the_published_groups_are_complete() {
        let groups = groups();
        assert_eq!(groups.len(), 5);
        assert!(groups.iter().all(|group| group.cases.len() == 5));
    }
}
