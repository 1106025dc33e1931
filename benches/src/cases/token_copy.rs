//! The token-record gather: payload from pinned host memory, compared with what the copy engine moves.

use std::cell::RefCell;
use std::fmt;

use crate::Random;
use crate::harness::spread_over;
use crate::token_copy::{self, Shape, TokenCopy, Variant};
use crate::{Bench, BenchError, Case, Label, Path, Unit, Work};
use host::Error;
use host::device::{Buffer, Device};

/// Bytes of payload that a case rotates over: more than twice the L2 of an H100.
const ROTATED_BYTES: u64 = 128 << 20;
/// Most lists of pairs.
const MOST_SETS: u64 = 16;
/// Pairs that are compared with their sources.
const PROBES: usize = 512;

/// The order of the sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Drawn anew for each pair, so that some come twice.
    Random,
    /// Each at most once, in random order.
    Unique,
    /// One after the other.
    Sequential,
}

impl Order {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Random, Self::Unique, Self::Sequential];
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Random => "random with repeats",
            Self::Unique => "unique",
            Self::Sequential => "sequential",
        })
    }
}

/// Number and size of the records, and the orders and ways to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenCopySizes {
    /// Records to copy.
    pub records: usize,
    /// Records of the region on the host.
    pub slots: usize,
    /// Bytes of a record.
    pub record_bytes: u32,
    /// The orders.
    pub orders: Vec<Order>,
    /// The ways to copy.
    pub variants: Vec<Variant>,
}

impl TokenCopySizes {
    /// As published: 262,144 records of 656 bytes among 300,000, every order and every way.
    pub fn published() -> Self {
        Self {
            records: 262_144,
            slots: 300_000,
            record_bytes: 656,
            orders: Order::ALL.to_vec(),
            variants: Variant::ALL.to_vec(),
        }
    }

    /// Small, for checks on the emulator.
    pub fn small() -> Self {
        Self { records: 70, slots: 90, ..Self::published() }
    }

    /// Number of rows of [`run`].
    pub fn cases(&self) -> usize {
        let gathers: usize = self.orders.iter().map(|&order| self.gathers(order).count()).sum();
        gathers + self.scatters().count()
    }

    /// The ways to read from the host that are measured in this order. The two slow ones are measured in one order
    /// only.
    fn gathers(&self, order: Order) -> impl Iterator<Item = Variant> + '_ {
        self.variants.iter().copied().filter(move |&variant| match variant {
            Variant::SortedByDestination => false,
            Variant::Bytewise | Variant::Vectors => order == self.orders[0],
            _ => variant.takes(self.record_bytes),
        })
    }

    /// The ways to write to the host that are measured.
    fn scatters(&self) -> impl Iterator<Item = Variant> + '_ {
        self.variants.iter().copied().filter(|v| matches!(v, Variant::Capped | Variant::SortedByDestination))
    }

    fn check(&self) -> Result<(), BenchError> {
        let Self { records, slots, .. } = *self;
        if records == 0 || slots < records || slots >= i32::MAX as usize {
            return Err(BenchError::Size(format!(
                "--records {records} --slots {slots}: at least one record, and no more than there are slots"
            )));
        }
        Ok(())
    }
}

/// Lists of pairs on the device, and their content.
struct Pairs {
    host_side: Vec<Vec<i32>>,
    device_side: Vec<Vec<i32>>,
    buffers: Vec<(Buffer<i32>, Buffer<i32>)>,
}

impl Pairs {
    fn new(device: &Device, sizes: &TokenCopySizes, order: Order, sets: usize) -> Result<Self, BenchError> {
        let mut random = Random(order as u64 + 1);
        let TokenCopySizes { records, slots, .. } = *sizes;
        let mut shuffled = |count: usize| {
            let mut all: Vec<i32> = (0..count as i32).collect();
            for i in (1..count).rev() {
                all.swap(i, random.below(i as u64 + 1) as usize);
            }
            all
        };
        let (mut host_side, mut device_side) = (Vec::new(), Vec::new());
        for set in 0..sets {
            let shift = set * records % (slots - records + 1);
            device_side.push(if order == Order::Sequential {
                (0..records as i32).collect()
            } else {
                shuffled(records)
            });
            host_side.push(match order {
                Order::Random => Vec::new(),
                Order::Unique => shuffled(slots)[..records].to_vec(),
                Order::Sequential => (0..records).map(|i| (shift + i) as i32).collect(),
            });
        }
        if order == Order::Random {
            for list in &mut host_side {
                *list = (0..records).map(|_| random.below(slots as u64) as i32).collect();
            }
        }
        let buffers = host_side
            .iter()
            .zip(&device_side)
            .map(|(host, card)| Ok((device.upload(host)?, device.upload(card)?)))
            .collect::<Result<_, Error>>()?;
        Ok(Self { host_side, device_side, buffers })
    }
}

/// Measures every way to read from the host in every order, then the ways to write to it.
///
/// # Errors
/// If the kernels cannot take the sizes, there is too little memory, the device fails, or a result is wrong.
pub fn run(bench: &mut Bench<'_>, sizes: &TokenCopySizes) -> Result<(), BenchError> {
    sizes.check()?;
    let payload = sizes.records as u64 * u64::from(sizes.record_bytes);
    let sets = if bench.is_timed() { ROTATED_BYTES.div_ceil(payload).clamp(1, MOST_SETS) as usize } else { 1 };
    bench.room_for(payload + sets as u64 * sizes.records as u64 * 24, "--records")?;
    for &order in &sizes.orders {
        let pairs = Pairs::new(bench.device(), sizes, order, sets)?;
        for variant in sizes.gathers(order) {
            gather(bench, sizes, variant, order, &pairs)?;
        }
    }
    let pairs = Pairs::new(bench.device(), sizes, Order::Unique, sets)?;
    for variant in sizes.scatters() {
        scatter(bench, sizes, variant, &pairs)?;
    }
    Ok(())
}

fn case(sizes: &TokenCopySizes, variant: Variant, order: Order, path: Path, sets: usize) -> Case {
    let way = if path == Path::ToHost { "to host, " } else { "" };
    Case {
        label: Label { bench: "token-copy", name: format!("{way}{variant}"), size: order.to_string() },
        unit: Unit::GibibytesPerSecond,
        work: Work { bytes: sizes.records as u64 * u64::from(sizes.record_bytes), operations: 0 },
        path,
        sets,
    }
}

fn bytes(len: usize) -> impl Iterator<Item = u8> {
    let mut random = Random(9);
    (0..len.div_ceil(8)).flat_map(move |_| random.bits().to_le_bytes()).take(len)
}

/// A copy's error, as a device error.
fn device_error(error: token_copy::Error) -> Error {
    match error {
        token_copy::Error::Device(error) => error,
        other => Error::Driver { doing: "copying records".into(), reason: other.to_string() },
    }
}

fn refused(error: token_copy::Error) -> BenchError {
    match error {
        token_copy::Error::Device(error) => error.into(),
        other => BenchError::Size(other.to_string()),
    }
}

fn gather(
    bench: &mut Bench<'_>,
    sizes: &TokenCopySizes,
    variant: Variant,
    order: Order,
    pairs: &Pairs,
) -> Result<(), BenchError> {
    let device = bench.device();
    let TokenCopySizes { records, slots, record_bytes, .. } = *sizes;
    let size = record_bytes as usize;
    let shape = Shape { record_bytes, src_records: slots, dst_records: records, max_pairs: records };
    let mut copier = TokenCopy::new(device, shape).map_err(refused)?;
    let mut host = device.pinned::<u8>(slots * size)?;
    for (to, byte) in host.as_mut_slice()?.iter_mut().zip(bytes(slots * size)) {
        *to = byte;
    }
    // Zeroed, so that what an earlier way left there does not pass for a copy.
    let card = RefCell::new(device.zeroed::<u8>(records * size)?);
    let checked: Vec<_> =
        pairs.buffers.iter().map(|(src, dst)| copier.check(src, dst)).collect::<Result<_, _>>().map_err(refused)?;
    bench.case(
        case(sizes, variant, order, Path::ToDevice, checked.len()),
        |set| copier.copy(variant, &checked[set], &host, &mut *card.borrow_mut(), None).map_err(device_error),
        || {
            let host = host.as_slice()?;
            let mut found = vec![0; size];
            for pair in spread_over(records, PROBES) {
                let (from, to) = (pairs.host_side[0][pair] as usize, pairs.device_side[0][pair] as usize);
                card.borrow().read(to * size, &mut found)?;
                if found != host[from * size..][..size] {
                    return Ok(Some(format!("record {from} did not arrive at {to}")));
                }
            }
            Ok(None)
        },
    )?;
    Ok(())
}

fn scatter(bench: &mut Bench<'_>, sizes: &TokenCopySizes, variant: Variant, pairs: &Pairs) -> Result<(), BenchError> {
    let device = bench.device();
    let TokenCopySizes { records, slots, record_bytes, .. } = *sizes;
    let size = record_bytes as usize;
    let shape = Shape { record_bytes, src_records: records, dst_records: slots, max_pairs: records };
    let mut copier = TokenCopy::new(device, shape).map_err(refused)?;
    let data: Vec<u8> = bytes(records * size).collect();
    let card = device.upload(&data)?;
    let host = RefCell::new(device.pinned::<u8>(slots * size)?);
    let checked: Vec<_> =
        pairs.buffers.iter().map(|(to, from)| copier.check(from, to)).collect::<Result<_, _>>().map_err(refused)?;
    bench.case(
        case(sizes, variant, Order::Unique, Path::ToHost, checked.len()),
        |set| copier.copy(variant, &checked[set], &card, &mut *host.borrow_mut(), None).map_err(device_error),
        || {
            let host = host.borrow();
            let host = host.as_slice()?;
            for pair in spread_over(records, PROBES) {
                let (to, from) = (pairs.host_side[0][pair] as usize, pairs.device_side[0][pair] as usize);
                if data[from * size..][..size] != host[to * size..][..size] {
                    return Ok(Some(format!("record {from} did not arrive at {to}")));
                }
            }
            Ok(None)
        },
    )?;
    Ok(())
}
