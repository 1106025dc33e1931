//! The harness of the benchmarks, which compares each kernel with the limit of the card that it runs on.
//!
//! A case is checked against a plain result, then timed. To be timed it is enqueued many times in one CUDA graph, over
//! inputs that change from launch to launch so that no cache flatters it. The graph is replayed, and timed by device
//! events. The figure is the median of the replays. The limits are measured in the same run
//! ([`ceilings`](crate::cases::ceilings)), because cards of one name differ. A case that moves bytes is compared with
//! the measured bandwidth of their path, one that multiplies with the measured rate of the tensor cores; a case that
//! does both, with the slower of the two.
//!
//! On the emulator, a case runs once, at a small size, and is only checked.

use std::fmt;

use host::device::Device;
use host::{Error, gib};

use crate::Samples;

/// Device time that a graph should fill, in milliseconds: long beside the resolution of events, half a microsecond.
const GRAPH_MS: f64 = 1.5;
/// Most launches in a graph.
const MOST_LAUNCHES: usize = 512;
/// Replays before the first that counts.
const WARM_UP: usize = 3;
/// Seconds after which a slow case has been measured often enough, and the least number of its measurements.
const PATIENCE: (f64, usize) = (1.0, 5);

/// Why a benchmark could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A device error.
    #[error(transparent)]
    Device(#[from] Error),
    /// A kernel's result differs from the plain one.
    #[error("{case}: the kernel's result differs from the plain one ({what}); please report this")]
    Wrong {
        /// The case.
        case: String,
        /// The size of the difference, or its place.
        what: String,
    },
    /// A size that the kernels or the device cannot take.
    #[error("{0}")]
    Size(String),
}

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// 10⁹ bytes a second.
    GigabytesPerSecond,
    /// 2³⁰ bytes a second.
    GibibytesPerSecond,
    /// 10¹² operations a second.
    TeraflopsPerSecond,
    /// Microseconds a launch; less is better.
    Microseconds,
}

impl Unit {
    /// `work` done in `seconds`, in this unit.
    pub fn figure(self, work: Work, seconds: f64) -> f64 {
        match self {
            Self::GigabytesPerSecond => work.bytes as f64 / seconds / 1e9,
            Self::GibibytesPerSecond => work.bytes as f64 / seconds / (1u64 << 30) as f64,
            Self::TeraflopsPerSecond => work.operations as f64 / seconds / 1e12,
            Self::Microseconds => seconds * 1e6,
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::GigabytesPerSecond => "GB/s",
            Self::GibibytesPerSecond => "GiB/s",
            Self::TeraflopsPerSecond => "TFLOP/s",
            Self::Microseconds => "µs",
        })
    }
}

/// The least that a case must do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes that must move.
    pub bytes: u64,
    /// Multiplications and additions.
    pub operations: u64,
}

/// The path that a case's bytes take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// From device memory.
    Read,
    /// From pinned host memory to the device.
    ToDevice,
    /// From the device to pinned host memory.
    ToHost,
    /// This case measures a limit; it has none.
    Unlimited,
}

/// What limits a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// Reading device memory.
    Read,
    /// The copy engine, host to device.
    ToDevice,
    /// The copy engine, device to host.
    ToHost,
    /// The tensor cores.
    Matrix,
    /// The launch itself.
    Launch,
}

impl fmt::Display for LimitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::ToDevice => "to device",
            Self::ToHost => "to host",
            Self::Matrix => "mma",
            Self::Launch => "launch",
        })
    }
}

/// What the card can do, as measured.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Bytes a second read from device memory.
    pub read: f64,
    /// Bytes a second read and written, together, by a copy within device memory.
    pub copy: f64,
    /// Bytes a second from pinned host memory by the copy engine.
    pub to_device: f64,
    /// Bytes a second to pinned host memory by the copy engine.
    pub to_host: f64,
    /// Operations a second by the tensor cores through `mma.sync`, bf16.
    pub matrix: f64,
    /// Seconds that an empty launch takes in a graph.
    pub launch: f64,
}

impl Limits {
    /// The least seconds that `work` can take on `path`, and what sets them; `None` without a limit.
    pub fn floor(&self, work: Work, path: Path) -> Option<(f64, LimitKind)> {
        let (rate, kind) = match path {
            Path::Read => (self.read, LimitKind::Read),
            Path::ToDevice => (self.to_device, LimitKind::ToDevice),
            Path::ToHost => (self.to_host, LimitKind::ToHost),
            Path::Unlimited => return None,
        };
        [
            (work.bytes as f64 / rate, kind),
            (work.operations as f64 / self.matrix, LimitKind::Matrix),
            (self.launch, LimitKind::Launch),
        ]
        .into_iter()
        .filter(|(seconds, _)| seconds.is_finite())
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .filter(|(seconds, _)| *seconds > 0.0)
    }
}

/// The name of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// The benchmark: `linear`.
    pub bench: &'static str,
    /// The case within the benchmark: `qkv 4096 × 6144`.
    pub name: String,
    /// Its size: `M = 8`.
    pub size: String,
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, {}", self.bench, self.name, self.size)
    }
}

/// A result.
#[derive(Clone, Debug)]
pub struct Row {
    /// Which case this is.
    pub label: Label,
    /// The unit of the figure.
    pub unit: Unit,
    /// The least that it must do.
    pub work: Work,
    /// The figures; `None` on the emulator, where the case was only checked.
    pub figures: Option<Figures>,
}

/// The figures of a row.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Median seconds of a launch.
    pub seconds: f64,
    /// The median in the row's unit.
    pub median: f64,
    /// [`Samples::spread`].
    pub spread: f64,
    /// Number of measurements.
    pub repeats: usize,
    /// The card's limit, if the case has one.
    pub limit: Option<Limit>,
}

/// A limit of the card.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// The limit in the row's unit.
    pub value: f64,
    /// What sets it.
    pub kind: LimitKind,
    /// The least possible time ÷ the measured one: 1 is as fast as can be.
    pub ratio: f64,
}

/// What happens while benchmarks run.
#[derive(Debug)]
pub enum Event<'a> {
    /// A case begins.
    Begin(&'a Label),
    /// The case is done.
    Done(&'a Row),
}

/// A case to run.
pub struct Case {
    /// Its name.
    pub label: Label,
    /// The unit of its figure.
    pub unit: Unit,
    /// The least that it must do.
    pub work: Work,
    /// The path of its bytes.
    pub path: Path,
    /// The number of inputs that it rotates over.
    pub sets: usize,
}

/// Runs cases on a device, and keeps their results.
pub struct Bench<'a> {
    device: &'a Device,
    repeats: usize,
    timed: bool,
    pub(crate) limits: Limits,
    pub(crate) rows: Vec<Row>,
    watch: &'a mut dyn FnMut(Event<'_>),
}

impl<'a> Bench<'a> {
    /// A bench on `device`, with up to `repeats` measurements of each case (fewer if a case is slow). `watch` is called
    /// as cases begin and end.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn new(device: &'a Device, repeats: usize, watch: &'a mut dyn FnMut(Event<'_>)) -> Result<Self, BenchError> {
        // The emulator uses the host's memory, and has no clock of its own.
        let timed = device.free_memory()?.is_some();
        Ok(Self { device, repeats: repeats.max(1), timed, limits: Limits::default(), rows: Vec::new(), watch })
    }

    /// The device.
    pub fn device(&self) -> &'a Device {
        self.device
    }

    /// Whether cases are timed: not on the emulator.
    pub fn is_timed(&self) -> bool {
        self.timed
    }

    /// The limits that cases are compared with.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The results so far.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Ends the bench, and returns the results.
    pub fn into_rows(self) -> Vec<Row> {
        self.rows
    }

    /// Checks that `bytes` more fit into the device's memory.
    ///
    /// # Errors
    /// [`BenchError::Size`], which names the `flag` to make smaller.
    pub(crate) fn room_for(&self, bytes: u64, flag: &str) -> Result<(), BenchError> {
        match self.device.free_memory()? {
            Some(free) if bytes > free => Err(BenchError::Size(format!(
                "this benchmark needs {} of device memory and {} are free; make {flag} smaller",
                gib(bytes),
                gib(free)
            ))),
            _ => Ok(()),
        }
    }

    /// Launches a case with `run`, which is given the number of the input to take. Then `check` looks at the result of
    /// input 0, and returns what is wrong with it, if anything. Then the case is timed, if this device can be timed.
    /// `run` only enqueues.
    ///
    /// # Errors
    /// If the device fails, or a result is wrong.
    pub fn case(
        &mut self,
        case: Case,
        mut run: impl FnMut(usize) -> Result<(), Error>,
        check: impl FnOnce() -> Result<Option<String>, Error>,
    ) -> Result<&Row, BenchError> {
        (self.watch)(Event::Begin(&case.label));
        run(0)?;
        self.device.synchronize()?;
        if let Some(what) = check()? {
            return Err(BenchError::Wrong { case: case.label.to_string(), what });
        }
        let mut figures = None;
        if self.is_timed() {
            let samples = self.time(case.sets.max(1), &mut run)?;
            let seconds = samples.median();
            figures = Some(Figures {
                seconds,
                median: case.unit.figure(case.work, seconds),
                spread: samples.spread(),
                repeats: samples.count(),
                limit: self.limits.floor(case.work, case.path).map(|(floor, kind)| Limit {
                    value: case.unit.figure(case.work, floor),
                    kind,
                    ratio: floor / seconds,
                }),
            });
        }
        self.rows.push(Row { label: case.label, unit: case.unit, work: case.work, figures });
        let row = &self.rows[self.rows.len() - 1];
        (self.watch)(Event::Done(row));
        Ok(row)
    }

    /// Adds a row for what the host does in place of a kernel. The row has no limit, and `watch` is not called.
    pub(crate) fn on_host(&mut self, label: Label, work: Work, samples: &Samples) {
        let (seconds, unit) = (samples.median(), Unit::Microseconds);
        let median = unit.figure(work, seconds);
        let (spread, repeats) = (samples.spread(), samples.count());
        let figures = Some(Figures { seconds, median, spread, repeats, limit: None });
        self.rows.push(Row { label, unit, work, figures });
    }

    /// Measures the seconds of a launch repeatedly.
    fn time(&self, sets: usize, run: &mut dyn FnMut(usize) -> Result<(), Error>) -> Result<Samples, Error> {
        let timer = self.device.timer()?;
        // How many launches fill a graph is estimated from a few launches without one.
        let some = sets.clamp(2, 8);
        let once = timer.time(|| (0..some).try_for_each(|i| run(i % sets)))? / some as f64;
        let launches = ((GRAPH_MS / once.max(1e-4)).ceil() as usize).clamp(1, MOST_LAUNCHES);
        // Whole rounds, so that every input is used equally often.
        let launches = launches.next_multiple_of(sets.min(MOST_LAUNCHES));
        let mut graph = self.device.capture(|| (0..launches).try_for_each(|i| run(i % sets)))?;
        for _ in 0..WARM_UP {
            graph.launch()?;
        }
        let enough = (PATIENCE.0 / (2e-3 * once * launches as f64)) as usize;
        let repeats = self.repeats.min(enough.max(PATIENCE.1));
        let mut samples = Vec::with_capacity(repeats);
        for _ in 0..repeats {
            // The device is busy with this one while the host enqueues the next, so that no gap is timed.
            graph.launch()?;
            let ms = timer.time(|| graph.launch())?;
            samples.push(ms / 1e3 / launches as f64);
        }
        drop(graph);
        // There is at least one sample, and events give numbers.
        Samples::new(samples).ok_or(Error::Driver { doing: "timing".into(), reason: "no time was measured".into() })
    }
}

/// What is wrong with `found`, if its largest difference from `expected` is more than `tolerance` of the largest
/// expected magnitude.
pub(crate) fn compare(found: &[f32], expected: &[f64], tolerance: f64) -> Option<String> {
    if found.len() != expected.len() {
        return Some(format!("{} values instead of {}", found.len(), expected.len()));
    }
    let scale = expected.iter().fold(1e-30f64, |m, v| m.max(v.abs()));
    let error = found.iter().zip(expected).fold(0f64, |m, (&f, e)| {
        let error = (f64::from(f) - e).abs();
        // NaN must not get lost in the maximum.
        if error.is_nan() { f64::INFINITY } else { m.max(error) }
    });
    (error > tolerance * scale).then(|| format!("by {:.2e} of the largest value", error / scale))
}

/// Up to `most` numbers below `len`, evenly spread, the first and the last among them.
pub(crate) fn spread_over(len: usize, most: usize) -> Vec<usize> {
    if len <= most {
        return (0..len).collect();
    }
    (0..most).map(|i| i * (len - 1) / (most - 1).max(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { read: 3e12, copy: 3e12, to_device: 5e10, to_host: 5e10, matrix: 6e14, launch: 2e-6 };

    #[test]
    fn the_slower_of_bytes_and_operations_is_the_floor() {
        let few = Work { bytes: 3_000_000_000, operations: 1_000_000 };
        assert_eq!(LIMITS.floor(few, Path::Read), Some((1e-3, LimitKind::Read)));
        let many = Work { bytes: 3_000_000_000, operations: 1_200_000_000_000 };
        assert_eq!(LIMITS.floor(many, Path::Read), Some((2e-3, LimitKind::Matrix)));
        let slow = Work { bytes: 50_000_000, operations: 0 };
        assert_eq!(LIMITS.floor(slow, Path::ToDevice), Some((1e-3, LimitKind::ToDevice)));
        assert_eq!(LIMITS.floor(Work { bytes: 10, operations: 0 }, Path::Read), Some((2e-6, LimitKind::Launch)));
        assert_eq!(LIMITS.floor(few, Path::Unlimited), None);
    }

    #[test]
    fn without_limits_there_is_no_floor() {
        assert_eq!(Limits::default().floor(Work { bytes: 10, operations: 10 }, Path::Read), None);
    }

    #[test]
    fn figures_are_rates_or_times() {
        let work = Work { bytes: 1 << 30, operations: 2_000_000_000_000 };
        assert_eq!(Unit::GibibytesPerSecond.figure(work, 0.5), 2.0);
        assert_eq!(Unit::TeraflopsPerSecond.figure(work, 0.5), 4.0);
        assert_eq!(Unit::Microseconds.figure(work, 0.5), 5e5);
        assert!((Unit::GigabytesPerSecond.figure(work, 1.0) - 1.073741824).abs() < 1e-12);
    }

    #[test]
    fn differences_are_found_and_nan_is_one() {
        assert_eq!(compare(&[1.0, 2.0], &[1.0, 2.0], 0.0), None);
        assert_eq!(compare(&[1.0, 2.001], &[1.0, 2.0], 1e-2), None);
        assert!(compare(&[1.0, 2.1], &[1.0, 2.0], 1e-2).is_some());
        assert!(compare(&[1.0, f32::NAN], &[1.0, 2.0], 1e9).is_some());
        assert!(compare(&[1.0], &[1.0, 2.0], 1.0).is_some());
    }

    #[test]
    fn a_wrong_result_is_an_error_and_no_row() {
        let device = Device::emulator(0);
        let mut seen = Vec::new();
        let mut watch = |event: Event<'_>| {
            seen.push(match event {
                Event::Begin(label) => format!("begin {label}"),
                Event::Done(row) => format!("done {}", row.label),
            });
        };
        let mut bench = Bench::new(&device, 1, &mut watch).unwrap();
        let case = |name: &str| Case {
            label: Label { bench: "test", name: name.into(), size: "small".into() },
            unit: Unit::Microseconds,
            work: Work::default(),
            path: Path::Read,
            sets: 3,
        };
        let mut launched = Vec::new();
        let run = |set| {
            launched.push(set);
            Ok(())
        };
        let good = bench.case(case("good"), run, || Ok(None)).unwrap();
        assert!(good.figures.is_none(), "nothing is timed");
        assert_eq!(launched, [0], "once");
        let error = bench.case(case("bad"), |_| Ok(()), || Ok(Some("by 7".into()))).unwrap_err();
        assert!(matches!(&error, BenchError::Wrong { case, .. } if case == "test: bad, small"));
        assert!(error.to_string().contains("differs from the plain one (by 7)"));
        assert_eq!(bench.rows().len(), 1);
        assert_eq!(seen, ["begin test: good, small", "done test: good, small", "begin test: bad, small"]);
    }

    #[test]
    fn samples_are_spread_from_first_to_last() {
        assert_eq!(spread_over(3, 8), [0, 1, 2]);
        assert_eq!(spread_over(100, 3), [0, 49, 99]);
        assert_eq!(spread_over(100, 1), [0]);
    }
}
