//! Measures the token-record gather: every variant on the published workload, after a check of every byte.
//!
//! `token_copy [records pairs]`. Without arguments it copies 262,144 pairs of 300,000 records on the first CUDA card.
//! With arguments it uses the emulator if there is no card. Rates are GiB/s of payload, from the median device time of
//! all that a variant does.

use std::time::Instant;

use bench_kernels::ceilings::{self, ReadAll};
use benches::token_copy::{CheckedPairs, Region, Shape, TokenCopy, Variant};
use benches::{Arguments, Random};
use host::device::{self, Buffer, Device, Pinned, Timer};

type Failure = Box<dyn std::error::Error>;

const MLA: u32 = 656;

/// `count` different numbers of `0..bound`, in random order.
fn unique(random: &mut Random, count: usize, bound: usize) -> Vec<i32> {
    let mut all: Vec<i32> = (0..bound as i32).collect();
    for i in 0..count {
        let j = i + random.below((bound - i) as u64) as usize;
        all.swap(i, j);
    }
    all.truncate(count);
    all
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn gib_s(bytes: u64, ms: f64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64 / (ms * 1e-3)
}

/// What every measurement needs.
struct Bench {
    device: Device,
    timer: Timer,
    records: usize,
    pairs: usize,
    repeats: usize,
}

impl Bench {
    fn time(&self, repeats: usize, mut work: impl FnMut() -> Result<(), Failure>) -> Result<f64, Failure> {
        let mut times = Vec::new();
        for i in 0..repeats + 1 {
            self.timer.start()?;
            work()?;
            self.timer.stop()?;
            let ms = self.timer.elapsed_ms()?;
            // The first run warms up.
            if i > 0 {
                times.push(ms);
            }
        }
        Ok(median(times))
    }

    fn copier(&self, record_bytes: u32) -> Result<TokenCopy, Failure> {
        let (src_records, max_pairs) = (self.records, self.pairs);
        Ok(TokenCopy::new(&self.device, Shape { record_bytes, src_records, dst_records: max_pairs, max_pairs })?)
    }

    /// The rate of one variant.
    fn rate(
        &self,
        copier: &mut TokenCopy,
        variant: Variant,
        pairs: &CheckedPairs<'_, i32>,
        src: &impl Region,
        dst: &mut impl Region,
    ) -> Result<f64, Failure> {
        let repeats = if variant == Variant::Bytewise { 3 } else { self.repeats };
        let bytes = copier.shape().payload(pairs.len());
        Ok(gib_s(bytes, self.time(repeats, || Ok(copier.copy(variant, pairs, src, dst, None)?))?))
    }
}

fn main() -> Result<(), Failure> {
    let arguments = Arguments::read()?;
    let numbers: Vec<usize> = arguments.words.iter().map(|word| word.parse()).collect::<Result<_, _>>()?;
    let cuda = !device::cards()?.is_empty();
    let (records, pairs, repeats) = match (numbers.as_slice(), cuda) {
        ([], true) => (300_000, 262_144, 15),
        (&[records, pairs], _) => (records, pairs, 3),
        _ => return Err("no CUDA card; for the emulator, say how many records and pairs".into()),
    };
    let device = if cuda { arguments.device()? } else { arguments.emulator() };
    let bench = Bench { timer: device.timer()?, device, records, pairs, repeats };
    println!("{}, {} SMs; {pairs} pairs of {records} records", bench.device.name(), bench.device.sms());
    let mut random = Random(1);
    let repeated: Vec<i32> = (0..pairs).map(|_| random.below(records as u64) as i32).collect();
    let unique = unique(&mut random, pairs, records);
    let sequential: Vec<i32> = (0..pairs as i32).collect();
    let mut ordered = repeated.clone();
    ordered.sort_unstable();
    let sets =
        [("random", &repeated), ("unique", &unique), ("sequential", &sequential), ("random, in order", &ordered)];
    let dst: Vec<i32> = (0..pairs as i32).collect();

    correct(&bench, &sets, &dst)?;
    ladder(&bench, &sets, &dst)?;
    sms(&bench, &sets[..2], &dst)?;
    packets(&bench)?;
    details(&bench, &repeated, &dst)?;
    eviction(&bench, &unique)?;
    neighbour(&bench, &repeated, &dst)
}

fn filled(device: &Device, bytes: usize) -> Result<Pinned<u8>, Failure> {
    let mut pinned = device.pinned::<u8>(bytes)?;
    for (i, word) in pinned.as_mut_slice()?.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *word = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes();
    }
    Ok(pinned)
}

fn correct(bench: &Bench, sets: &[(&str, &Vec<i32>)], dst_index: &[i32]) -> Result<(), Failure> {
    for record_bytes in [MLA, 4096, 1008] {
        let records = if record_bytes == 4096 { bench.records / 8 } else { bench.records };
        let pairs = if record_bytes == 4096 { bench.pairs / 8 } else { bench.pairs };
        let size = record_bytes as usize;
        let shape = Shape { record_bytes, src_records: records, dst_records: pairs, max_pairs: pairs };
        let mut copier = TokenCopy::new(&bench.device, shape)?;
        let src = filled(&bench.device, records * size)?;
        let poison = vec![0xA5u8; pairs * size];
        let mut dst = bench.device.zeroed::<u8>(poison.len())?;
        let mut map = bench.device.zeroed::<i32>(records)?;
        let mut found = vec![0u8; poison.len()];
        let mut slots = vec![0i32; records];
        for (name, set) in &sets[..if record_bytes == MLA { 2 } else { 1 }] {
            let set: Vec<i32> = set[..pairs].iter().map(|s| s % records as i32).collect();
            let src_index = bench.device.upload(&set)?;
            let dst_index = bench.device.upload(&dst_index[..pairs])?;
            let checked = copier.check(&src_index, &dst_index)?;
            for variant in Variant::ALL.into_iter().filter(|v| v.takes(record_bytes)) {
                dst.write(0, &poison)?;
                map.write(0, &vec![-7; records])?;
                copier.copy(variant, &checked, &src, &mut dst, Some(&mut map))?;
                dst.read(0, &mut found)?;
                map.read(0, &mut slots)?;
                let source = src.as_slice()?;
                let mut expected = vec![-7; records];
                for (i, &s) in set.iter().enumerate() {
                    let s = s as usize;
                    if found[i * size..][..size] != source[s * size..][..size] {
                        return Err(format!("{variant}, {name}, {record_bytes}: record {i} differs").into());
                    }
                    if slots[s] == i as i32 {
                        expected[s] = i as i32;
                    } else if expected[s] == -7 {
                        expected[s] = -8;
                    }
                }
                if slots != expected {
                    return Err(format!("{variant}, {name}, {record_bytes}: the slot map is wrong").into());
                }
            }
        }
        println!("records of {record_bytes} bytes: every byte and slot as it should be, all variants");
    }
    Ok(())
}

fn ladder(bench: &Bench, sets: &[(&str, &Vec<i32>)], dst_index: &[i32]) -> Result<(), Failure> {
    let mut copier = bench.copier(MLA)?;
    let src = filled(&bench.device, bench.records * MLA as usize)?;
    let bytes = copier.shape().payload(bench.pairs);
    let mut dst = bench.device.zeroed::<u8>(bytes as usize)?;
    let mut whole = filled(&bench.device, bytes as usize)?;
    // SAFETY: both live to the end of this function, and are used by the timed copies alone.
    let to_device = bench.time(bench.repeats, || Ok(unsafe { dst.copy_from_pinned(0, &whole) }?))?;
    // SAFETY: as above.
    let to_host = bench.time(bench.repeats, || Ok(unsafe { dst.copy_to_pinned(0, &mut whole) }?))?;
    println!("\ncopy engine: {:.2} to the device, {:.2} to the host", gib_s(bytes, to_device), gib_s(bytes, to_host));
    print!("{:<24}", "");
    sets.iter().for_each(|(name, _)| print!("{name:>18}"));
    println!();
    let dst_index = bench.device.upload(dst_index)?;
    for variant in Variant::ALL.into_iter().filter(|v| *v != Variant::SortedByDestination) {
        print!("{variant:<24}");
        for (_, set) in sets {
            let src_index = bench.device.upload(set)?;
            let pairs = copier.check(&src_index, &dst_index)?;
            let rate = bench.rate(&mut copier, variant, &pairs, &src, &mut dst)?;
            let sort = bench.time(bench.repeats, || Ok(copier.prepare(variant, &pairs)?))?;
            print!("{:>18}", format!("{rate:.2} ({:.0} us)", sort * 1e3));
        }
        println!();
    }
    Ok(())
}

fn sms(bench: &Bench, sets: &[(&str, &Vec<i32>)], dst_index: &[i32]) -> Result<(), Failure> {
    let mut copier = bench.copier(MLA)?;
    let src = filled(&bench.device, bench.records * MLA as usize)?;
    let mut dst = bench.device.zeroed::<u8>(bench.pairs * MLA as usize)?;
    let dst_index = bench.device.upload(dst_index)?;
    let counts = [2, 4, 6, 8, 12, 16, 24, 32, 64, 132];
    print!("\n{:<24}", "sms");
    counts.iter().for_each(|n| print!("{n:>7}"));
    println!();
    for (name, set) in sets {
        let src_index = bench.device.upload(set)?;
        let pairs = copier.check(&src_index, &dst_index)?;
        for variant in [Variant::Capped, Variant::Sorted, Variant::Grouped] {
            print!("{:<24}", format!("{variant}, {name}"));
            for n in counts {
                copier.set_sms(n);
                print!("{:>7.2}", bench.rate(&mut copier, variant, &pairs, &src, &mut dst)?);
            }
            println!();
        }
    }
    Ok(())
}

/// What the bus gives to records that are whole lines, and to records that are not.
fn packets(bench: &Bench) -> Result<(), Failure> {
    println!("\nsequential records, by size");
    let bytes = bench.pairs * MLA as usize;
    for record_bytes in [128, 512, 640, 656, 672, 768, 1024, 4096] {
        let pairs = bytes / record_bytes as usize;
        let shape = Shape { record_bytes, src_records: pairs, dst_records: pairs, max_pairs: pairs };
        let mut copier = TokenCopy::new(&bench.device, shape)?;
        let src = filled(&bench.device, pairs * record_bytes as usize)?;
        let mut dst = bench.device.zeroed::<u8>(pairs * record_bytes as usize)?;
        let index = bench.device.upload(&(0..pairs as i32).collect::<Vec<_>>())?;
        let pairs = copier.check(&index, &index)?;
        let rate = bench.rate(&mut copier, Variant::Capped, &pairs, &src, &mut dst)?;
        println!("{record_bytes:>6} bytes {rate:>7.2}");
    }
    Ok(())
}

fn details(bench: &Bench, set: &[i32], dst: &[i32]) -> Result<(), Failure> {
    let mut copier = bench.copier(MLA)?;
    let src = filled(&bench.device, bench.records * MLA as usize)?;
    let mut to = bench.device.zeroed::<u8>(bench.pairs * MLA as usize)?;
    let mut map = bench.device.zeroed::<i32>(bench.records)?;
    let bytes = copier.shape().payload(bench.pairs);
    let (src_index, dst_index) = (bench.device.upload(set)?, bench.device.upload(dst)?);
    let mut waits = Vec::new();
    for _ in 0..bench.repeats + 1 {
        let start = Instant::now();
        copier.check(&src_index, &dst_index)?;
        waits.push(start.elapsed().as_secs_f64() * 1e6);
    }
    println!("\nchecking {} pairs before a launch: {:.1} us of the host's time", bench.pairs, median(waits));
    let mut bad = src_index;
    bad.write(bench.pairs / 2, &[bench.records as i32])?;
    match copier.check(&bad, &dst_index) {
        Err(error) => println!("one index out of range: {error}"),
        Ok(_) => return Err("an index out of range was not refused".into()),
    }
    bad.write(bench.pairs / 2, &set[bench.pairs / 2..][..1])?;
    let pairs = copier.check(&bad, &dst_index)?;
    let variant = Variant::best(&copier.shape(), bench.pairs);
    let plain = bench.time(3 * bench.repeats, || Ok(copier.copy(variant, &pairs, &src, &mut to, None)?))?;
    let mapped =
        bench.time(3 * bench.repeats, || Ok(copier.copy(variant, &pairs, &src, &mut to, Some(&mut map))?))?;
    println!("{variant}: {:.2}, with a slot map {:.2}", gib_s(bytes, plain), gib_s(bytes, mapped));
    {
        let mut graph = bench.device.capture(|| {
            copier.copy(variant, &pairs, &src, &mut to, None).map_err(|e| match e {
                benches::token_copy::Error::Device(error) => error,
                other => host::Error::Emulator(other.to_string()),
            })
        })?;
        let replayed = bench.time(3 * bench.repeats, || Ok(graph.launch()?))?;
        println!("{variant} as a recorded graph: {:.2}", gib_s(bytes, replayed));
    }
    let wide = |index: &[i32]| bench.device.upload(&index.iter().map(|&i| i as i64).collect::<Vec<_>>());
    let (src_wide, dst_wide) = (wide(set)?, wide(dst)?);
    let pairs = copier.check(&src_wide, &dst_wide)?;
    let ms = bench.time(bench.repeats, || Ok(copier.copy(variant, &pairs, &src, &mut to, None)?))?;
    println!("{variant} with 64-bit indices: {:.2}", gib_s(bytes, ms));
    let shuffled = bench.device.upload(&unique(&mut Random(9), bench.pairs, bench.pairs))?;
    let pairs = copier.check(&bad, &shuffled)?;
    let ms = bench.time(bench.repeats, || Ok(copier.copy(variant, &pairs, &src, &mut to, None)?))?;
    println!("{variant}, destinations in random order: {:.2}", gib_s(bytes, ms));
    println!("few pairs (us, and GiB/s):");
    for count in [64, 512, 2048, 8192, 32768, 65536, 98304, 131072, 196608] {
        let count = count.min(bench.pairs);
        let (few, places) = (bench.device.upload(&set[..count])?, bench.device.upload(&dst[..count])?);
        let pairs = copier.check(&few, &places)?;
        let bytes = copier.shape().payload(count);
        print!("{count:>7}");
        for variant in [Variant::LoadsFirst, Variant::Capped, Variant::Sorted, Variant::Grouped] {
            let ms = bench.time(bench.repeats, || Ok(copier.copy(variant, &pairs, &src, &mut to, None)?))?;
            print!("  {variant} {:.1} us {:.2}", ms * 1e3, gib_s(bytes, ms));
        }
        println!();
    }
    Ok(())
}

/// The way back: copies records of the device to random places in the host's memory.
fn eviction(bench: &Bench, places: &[i32]) -> Result<(), Failure> {
    let shape =
        Shape { record_bytes: MLA, src_records: bench.pairs, dst_records: bench.records, max_pairs: bench.pairs };
    let mut copier = TokenCopy::new(&bench.device, shape)?;
    let size = MLA as usize;
    let contents = filled(&bench.device, bench.pairs * size)?;
    let src: Buffer<u8> = bench.device.upload(&contents.as_slice()?)?;
    let mut dst = bench.device.pinned::<u8>(bench.records * size)?;
    let src_index = bench.device.upload(&(0..bench.pairs as i32).collect::<Vec<_>>())?;
    let dst_index = bench.device.upload(places)?;
    let pairs = copier.check(&src_index, &dst_index)?;
    println!("\nto the host, random places");
    for variant in [Variant::Warp, Variant::LoadsFirst, Variant::Capped, Variant::SortedByDestination] {
        dst.as_mut_slice()?.fill(0xA5);
        copier.copy(variant, &pairs, &src, &mut dst, None)?;
        let (from, to) = (contents.as_slice()?, dst.as_slice()?);
        let mut written = vec![false; bench.records];
        for (i, &place) in places.iter().enumerate() {
            written[place as usize] = true;
            if to[place as usize * size..][..size] != from[i * size..][..size] {
                return Err(format!("{variant}: record {i} differs").into());
            }
        }
        for (record, _) in written.iter().enumerate().filter(|(_, written)| !**written) {
            if to[record * size..][..size].iter().any(|&byte| byte != 0xA5) {
                return Err(format!("{variant}: record {record} was written").into());
            }
        }
        print!("{variant:<24}");
        for n in [8, 16, 132] {
            copier.set_sms(n);
            print!("{:>7.2}", bench.rate(&mut copier, variant, &pairs, &src, &mut dst)?);
        }
        println!("   (8, 16, 132 SMs)");
    }
    Ok(())
}

/// What a copy on one queue costs a kernel on another queue that reads memory as fast as it can.
fn neighbour(bench: &Bench, set: &[i32], dst: &[i32]) -> Result<(), Failure> {
    let side = bench.device.beside()?;
    let (src_records, max_pairs) = (bench.records, bench.pairs);
    let shape = Shape { record_bytes: MLA, src_records, dst_records: max_pairs, max_pairs };
    let mut copier = TokenCopy::new(&side, shape)?;
    let src = filled(&side, bench.records * MLA as usize)?;
    let mut to = side.zeroed::<u8>(bench.pairs * MLA as usize)?;
    let whole = filled(&side, bench.pairs * MLA as usize)?;
    let (src_index, dst_index) = (side.upload(set)?, side.upload(dst)?);
    let pairs = copier.check(&src_index, &dst_index)?;
    let bytes = copier.shape().payload(bench.pairs);
    let most = bench.device.sms();
    let units: u64 = if most > 4 { 1 << 29 } else { 1 << 12 };
    let memory = bench.device.zeroed::<u8>(units as usize * ceilings::UNIT_BYTES)?;
    let sums = bench.device.zeroed::<u32>(most as usize * 32)?;
    let read = |blocks: u32| -> Result<(), Failure> {
        let params = ReadAll { from: memory.ptr(), sums: sums.ptr_mut(), units };
        // SAFETY: the memory is that large, and lives to the end of this function.
        unsafe { bench.device.launch::<ceilings::ceiling_read>(blocks, 0, params)? };
        Ok(())
    };
    println!("\na kernel that reads {} MiB of device memory, beside copies", (units * 16) >> 20);
    let timer = side.timer()?;
    for blocks in [most, most - most / 8] {
        let alone = bench.time(bench.repeats, || read(blocks))?;
        let copied = {
            let mut times = Vec::new();
            for _ in 0..bench.repeats {
                times.push(timer.time(|| copy(&mut copier, Variant::Grouped, &pairs, &src, &mut to))?);
            }
            median(times)
        };
        println!("{blocks} blocks alone: {alone:.3} ms; grouped copy alone {:.2}", gib_s(bytes, copied));
        // SAFETY: both live to the end of this function, and only the copy engine uses them now.
        let engine = |to: &mut Buffer<u8>| unsafe { to.copy_from_pinned(0, &whole) };
        for _ in 0..2 * bench.repeats + 4 {
            engine(&mut to)?;
        }
        let beside = bench.time(bench.repeats, || read(blocks))?;
        side.synchronize()?;
        println!("  the copy engine: the read takes {beside:.3} ms ({:+.1} %)", (beside / alone - 1.0) * 100.0);
        for variant in [Variant::Grouped, Variant::Sorted, Variant::Capped] {
            for n in [8, 12, 16] {
                copier.set_sms(n);
                // More copies than the reads need, so that every read has one beside it.
                for _ in 0..2 * bench.repeats + 4 {
                    copy(&mut copier, variant, &pairs, &src, &mut to)?;
                }
                let beside = bench.time(bench.repeats, || read(blocks))?;
                side.synchronize()?;
                for _ in 0..2 * bench.repeats + 4 {
                    read(blocks)?;
                }
                let mut times = Vec::new();
                for _ in 0..bench.repeats.min(5) {
                    times.push(timer.time(|| copy(&mut copier, variant, &pairs, &src, &mut to))?);
                }
                bench.device.synchronize()?;
                println!(
                    "  {variant} on {n}: the read takes {beside:.3} ms ({:+.1} %), the copy {:.2}",
                    (beside / alone - 1.0) * 100.0,
                    gib_s(bytes, median(times))
                );
            }
        }
    }
    Ok(())
}

fn copy(
    copier: &mut TokenCopy,
    variant: Variant,
    pairs: &CheckedPairs<'_, i32>,
    src: &Pinned<u8>,
    dst: &mut Buffer<u8>,
) -> Result<(), host::Error> {
    copier.copy(variant, pairs, src, dst, None).map_err(|e| match e {
        benches::token_copy::Error::Device(error) => error,
        other => host::Error::Emulator(other.to_string()),
    })
}
