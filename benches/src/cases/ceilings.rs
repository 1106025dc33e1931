//! What the card itself can do: the limits of every other case.

use bench_kernels::ceilings::{
    self, BULK_SHARED_BYTES, BULK_THREADS, CopyAll, MMA_THREADS, Multiply, Nothing, ReadAll, THREADS, UNIT_BYTES,
};
use cuda_std::bf16;

use crate::harness::{compare, spread_over};
use crate::random::random;
use crate::{Bench, BenchError, Case, Figures, Label, Path, Pool, Unit, Work};
use host::Error;
use host::device::{Buffer, Device};

/// Blocks of `ceiling_mma` for an SM.
const MMA_BLOCKS: u32 = 4;
/// Elements that are compared at each place.
const PROBE: usize = 2048;

/// How much to move, and how often to multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CeilingSizes {
    /// Bytes to read, and to copy, in device memory.
    pub bytes: u64,
    /// Bytes to move over the bus each way.
    pub bus_bytes: u64,
    /// Rounds of [`ceiling_mma`](struct@ceilings::ceiling_mma).
    pub rounds: u32,
}

impl CeilingSizes {
    /// For figures: 4 GiB in device memory, 164 MiB over the bus (as much as the published gather of 262,144 records).
    pub const PUBLISHED: Self = Self { bytes: 4 << 30, bus_bytes: 164 << 20, rounds: 4096 };
    /// For checks on the emulator.
    pub const SMALL: Self = Self { bytes: 160 << 10, bus_bytes: 16 << 10, rounds: 2 };

    /// Number of cases of [`run`] on a device.
    pub fn cases(&self, device: &Device) -> usize {
        6 + usize::from(device.capabilities().bulk_copies)
    }
}

/// Measures all limits. From then on `bench` compares cases with them.
///
/// # Errors
/// If there is too little memory, the device fails, or a result is wrong.
pub fn run(bench: &mut Bench<'_>, sizes: CeilingSizes) -> Result<(), BenchError> {
    bench.room_for(2 * sizes.bytes + sizes.bus_bytes, "--bytes")?;
    let (read, copy) = memory(bench, sizes.bytes)?;
    let (to_device, to_host) = bus(bench, sizes.bus_bytes)?;
    let matrix = multiply(bench, sizes.rounds)?;
    let launch = launch(bench)?;
    let rate = |figures: Option<Figures>, work: u64| figures.map_or(0.0, |f| work as f64 / f.seconds);
    let limits = &mut bench.limits;
    limits.read = rate(read, sizes.bytes);
    limits.copy = rate(copy, 2 * sizes.bytes);
    limits.to_device = rate(to_device, sizes.bus_bytes);
    limits.to_host = rate(to_host, sizes.bus_bytes);
    limits.matrix = matrix.0.map_or(0.0, |f| matrix.1 as f64 / f.seconds);
    limits.launch = launch.map_or(0.0, |f| f.seconds);
    Ok(())
}

fn case(name: &str, size: String, unit: Unit, work: Work) -> Case {
    let label = Label { bench: "ceilings", name: name.into(), size };
    Case { label, unit, work, path: Path::Unlimited, sets: 1 }
}

/// Bytes for a person, in the largest unit of which they are a whole number.
fn size_of(bytes: u64) -> String {
    match [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")]
        .into_iter()
        .find(|(unit, _)| bytes.is_multiple_of(*unit))
    {
        Some((unit, name)) => format!("{} {name}", bytes / unit),
        None => format!("{bytes} bytes"),
    }
}

/// Elements of two bytes in `bytes`, rounded up to whole units of 16 bytes.
fn elements(bytes: u64) -> usize {
    (bytes as usize).max(UNIT_BYTES).next_multiple_of(UNIT_BYTES) / 2
}

fn memory(bench: &mut Bench<'_>, bytes: u64) -> Result<(Option<Figures>, Option<Figures>), BenchError> {
    let device = bench.device();
    let len = elements(bytes);
    let units = (len * 2 / UNIT_BYTES) as u64;
    let pool = Pool::new(device, len)?;
    let blocks = device.sms();

    let sums = device.zeroed::<u32>((blocks * THREADS / 32) as usize)?;
    let params = ReadAll { from: pool.buffer().ptr().cast(), sums: sums.ptr_mut(), units };
    let check = |sums: &Buffer<u32>| {
        let mut words = vec![0; sums.len()];
        sums.read(0, &mut words)?;
        let found = words.iter().fold(0, |sum, word| sum ^ word);
        Ok((found != pool.exclusive_or()).then(|| "its checksum".into()))
    };
    let of_reads = |name| case(name, size_of(bytes), Unit::GigabytesPerSecond, Work { bytes, operations: 0 });
    let read = bench.case(
        of_reads("read"),
        // SAFETY: the pool holds `units`, and there is a sum for each warp of the grid.
        |_| unsafe { device.launch::<ceilings::ceiling_read>(blocks, 0, params) },
        || check(&sums),
    )?;
    let mut read = read.figures;
    if device.capabilities().bulk_copies {
        let sums = device.zeroed::<u32>((blocks * (BULK_THREADS / 32 - 1)) as usize)?;
        let params = ReadAll { sums: sums.ptr_mut(), ..params };
        let bulk = bench.case(
            of_reads("read, bulk copies"),
            // SAFETY: as above, for each warp that reads.
            |_| unsafe { device.launch::<ceilings::ceiling_read_bulk>(blocks, BULK_SHARED_BYTES, params) },
            || check(&sums),
        )?;
        // The limit is the best that the card shows.
        read = match (read, bulk.figures) {
            (Some(plain), Some(bulk)) if bulk.seconds > plain.seconds => Some(plain),
            (plain, bulk) => bulk.or(plain),
        };
    }

    // As much again, to be written; each byte moves twice.
    let to = device.zeroed::<bf16>(len)?;
    let params = CopyAll { from: pool.buffer().ptr().cast(), to: to.ptr_mut().cast(), units };
    let copy = bench.case(
        case(
            "copy, read + written",
            size_of(bytes),
            Unit::GigabytesPerSecond,
            Work { bytes: 2 * bytes, operations: 0 },
        ),
        // SAFETY: both hold `units`, and they are not the same.
        |_| unsafe { device.launch::<ceilings::ceiling_copy>(blocks, 0, params) },
        || {
            let mut found = vec![bf16::ZERO; PROBE.min(len)];
            for place in spread_over(len - found.len() + 1, 64) {
                to.read(place, &mut found)?;
                if found.iter().zip(pool.from(place)).any(|(f, e)| f.to_f64() != e) {
                    return Ok(Some(format!("near byte {}", 2 * place)));
                }
            }
            Ok(None)
        },
    )?;
    Ok((read, copy.figures))
}

fn bus(bench: &mut Bench<'_>, bytes: u64) -> Result<(Option<Figures>, Option<Figures>), BenchError> {
    let device = bench.device();
    let data = random(elements(bytes), 2);
    let len = data.len();
    let mut pinned = device.pinned::<bf16>(len)?;
    pinned.as_mut_slice()?.copy_from_slice(&data);
    let work = Work { bytes, operations: 0 };
    let size = size_of(bytes);

    let buffer = std::cell::RefCell::new(device.zeroed::<bf16>(len)?);
    let there = bench.case(
        case("copy engine, host to device", size.clone(), Unit::GibibytesPerSecond, work),
        // SAFETY: both outlive the case, which waits for what it enqueues.
        |_| unsafe { buffer.borrow_mut().copy_from_pinned(0, &pinned) },
        || differs(&data, |found| buffer.borrow().read(0, found)),
    )?;
    let there = there.figures;
    drop(pinned);

    let back = std::cell::RefCell::new(device.pinned::<bf16>(len)?);
    let back_row = bench.case(
        case("copy engine, device to host", size, Unit::GibibytesPerSecond, work),
        // SAFETY: as above.
        |_| unsafe { buffer.borrow().copy_to_pinned(0, &mut back.borrow_mut()) },
        || {
            differs(&data, |found| {
                found.copy_from_slice(&back.borrow().as_slice()?);
                Ok(())
            })
        },
    )?;
    Ok((there, back_row.figures))
}

/// Where the data that `read` delivers differs from `data`, if it does.
fn differs(data: &[bf16], read: impl FnOnce(&mut [bf16]) -> Result<(), Error>) -> Result<Option<String>, Error> {
    let mut found = vec![bf16::ZERO; data.len()];
    read(&mut found)?;
    let first = found.iter().zip(data).position(|(f, d)| f.to_bits() != d.to_bits());
    Ok(first.map(|at| format!("at byte {}", 2 * at)))
}

fn multiply(bench: &mut Bench<'_>, rounds: u32) -> Result<(Option<Figures>, u64), BenchError> {
    let device = bench.device();
    let blocks = MMA_BLOCKS * device.sms();
    let data = random(32 * 32, 3);
    let operands = device.upload(&data)?;
    let sums = device.zeroed::<f32>((blocks * MMA_THREADS) as usize)?;
    let params = Multiply { operands: operands.ptr().cast(), sums: sums.ptr_mut(), rounds };
    let operations = Multiply::operations(blocks, rounds);
    let row = bench.case(
        case("mma.sync, bf16", "m16n8k16".into(), Unit::TeraflopsPerSecond, Work { bytes: 0, operations }),
        // SAFETY: operands for 32 lanes, and a sum for each lane of the grid.
        |_| unsafe { device.launch::<ceilings::ceiling_mma>(blocks, 0, params) },
        || {
            let mut found = vec![0.0; sums.len()];
            sums.read(0, &mut found)?;
            let lanes: Vec<f64> = (0..32).map(|lane| f64::from(rounds) * lane_sum(&data, lane)).collect();
            let expected: Vec<f64> = lanes.iter().copied().cycle().take(found.len()).collect();
            Ok(compare(&found, &expected, 5e-3))
        },
    )?;
    Ok((row.figures, operations))
}

/// What `lane` adds up in one round: its elements of the products of the two A fragments and the four B fragments.
fn lane_sum(operands: &[bf16], lane: usize) -> f64 {
    let element = |lane: usize, word: usize, half: usize| operands[(lane * 16 + word) * 2 + half].to_f64();
    let (group, pair) = (lane / 4, lane % 4);
    let mut sum = 0.0;
    for (a, b) in (0..8).map(|j| (j / 4, j % 4)) {
        for (row, column) in (0..4).map(|e| (group + 8 * (e / 2), 2 * pair + e % 2)) {
            for k in 0..16 {
                let from_a = element(row % 8 * 4 + k % 8 / 2, a * 4 + row / 8 + 2 * (k / 8), k % 2);
                let from_b = element(column * 4 + k % 8 / 2, 8 + b * 2 + k / 8, k % 2);
                sum += from_a * from_b;
            }
        }
    }
    sum
}

fn launch(bench: &mut Bench<'_>) -> Result<Option<Figures>, BenchError> {
    let device: &Device = bench.device();
    let row = bench.case(
        case("launch in a graph", "empty kernel".into(), Unit::Microseconds, Work::default()),
        // SAFETY: it touches nothing.
        |_| unsafe { device.launch::<ceilings::ceiling_launch>(1, 0, Nothing { nothing: 0 }) },
        || Ok(None),
    )?;
    Ok(row.figures)
}
