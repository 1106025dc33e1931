//! The token-record gather through its interface: every variant, both directions, both types of index, each byte
//! compared. Under the emulator always; on a GPU where there is one, with many more records.

use std::process::ExitCode;

use benches::token_copy::{CheckedPairs, Error, RecordIndex, Region, Shape, TokenCopy, Variant};
use host::device::{self, Buffer, Device, Pinned};
use libtest_mimic::{Arguments, Failed, Trial};

/// What a byte that nobody wrote looks like.
const POISON: u8 = 0xA5;
/// What a slot that nobody noted holds.
const UNMAPPED: i32 = -7;

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let cards = device::cards().unwrap_or_default();
    type Test = fn(&Device, &[Shape]) -> Result<(), Failed>;
    let tests: [(&str, Test); 5] = [
        ("gathers_from_the_host", gathers_from_the_host),
        ("evicts_to_the_host", evicts_to_the_host),
        ("moves_within_the_device", moves_within_the_device),
        ("refuses_before_a_launch", refuses_before_a_launch),
        ("never_writes_outside", never_writes_outside),
    ];
    let mut trials = Vec::new();
    for (name, test) in tests {
        trials.push(Trial::test(format!("emulated::{name}"), move || {
            (1..4).try_for_each(|seed| test(&Device::emulator(seed), &shapes(70, 50)))
        }));
        let on_card = move || test(&benches::device(0)?, &shapes(70_000, 50_000));
        trials.push(Trial::test(format!("cuda::{name}"), on_card).with_ignored_flag(cards.is_empty()));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn shapes(src_records: usize, pairs: usize) -> Vec<Shape> {
    let shape = |record_bytes| Shape { record_bytes, src_records, dst_records: pairs + 9, max_pairs: pairs };
    [16, 656, 1008, 4096].map(shape).to_vec()
}

/// Different every 8 bytes.
fn contents(bytes: usize) -> Vec<u8> {
    (0..bytes.div_ceil(8) as u64)
        .flat_map(|i| (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes())
        .take(bytes)
        .collect()
}

/// Sources, some of them several times, and destinations, each once.
fn pairs(shape: &Shape) -> (Vec<usize>, Vec<usize>) {
    let mut state = 5u64;
    let mut below = |bound: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (((state >> 32) * bound as u64) >> 32) as usize
    };
    let src = (0..shape.max_pairs).map(|_| below(shape.src_records)).collect();
    let mut dst: Vec<_> = (0..shape.dst_records).collect();
    for i in 0..dst.len() {
        let j = i + below(dst.len() - i);
        dst.swap(i, j);
    }
    dst.truncate(shape.max_pairs);
    (src, dst)
}

/// A region that a test can fill and look at.
trait Contents: Region + Sized {
    fn make(device: &Device, bytes: &[u8]) -> Result<Self, host::Error>;
    fn fill(&mut self, bytes: &[u8]) -> Result<(), host::Error>;
    fn all(&self) -> Result<Vec<u8>, host::Error>;
}

impl Contents for Buffer<u8> {
    fn make(device: &Device, bytes: &[u8]) -> Result<Self, host::Error> {
        device.upload(bytes)
    }
    fn fill(&mut self, bytes: &[u8]) -> Result<(), host::Error> {
        self.write(0, bytes)
    }
    fn all(&self) -> Result<Vec<u8>, host::Error> {
        let mut bytes = vec![0; self.len()];
        self.read(0, &mut bytes)?;
        Ok(bytes)
    }
}

impl Contents for Pinned<u8> {
    fn make(device: &Device, bytes: &[u8]) -> Result<Self, host::Error> {
        let mut pinned = device.pinned(bytes.len())?;
        pinned.fill(bytes)?;
        Ok(pinned)
    }
    fn fill(&mut self, bytes: &[u8]) -> Result<(), host::Error> {
        self.as_mut_slice()?.copy_from_slice(bytes);
        Ok(())
    }
    fn all(&self) -> Result<Vec<u8>, host::Error> {
        self.as_slice().map(|bytes| bytes.to_vec())
    }
}

fn upload<I: RecordIndex + TryFrom<usize>>(device: &Device, index: &[usize]) -> Result<Buffer<I>, host::Error> {
    let index: Vec<I> = index.iter().filter_map(|&i| I::try_from(i).ok()).collect();
    device.upload(&index)
}

/// Copies by every variant and compares all of the destination and of the slot map.
fn compare<I, S, D>(device: &Device, shape: &Shape) -> Result<(), Failed>
where
    I: RecordIndex + TryFrom<usize> + From<i32> + PartialEq,
    S: Contents,
    D: Contents,
{
    let size = shape.record_bytes as usize;
    let source = contents(shape.src_records * size);
    let poison = vec![POISON; shape.dst_records * size];
    let (src, dst) = pairs(shape);
    let mut expected = poison.clone();
    for (&s, &d) in src.iter().zip(&dst) {
        expected[d * size..][..size].copy_from_slice(&source[s * size..][..size]);
    }
    let (from, mut to) = (S::make(device, &source)?, D::make(device, &poison)?);
    let (src_index, dst_index) = (upload::<I>(device, &src)?, upload::<I>(device, &dst)?);
    let mut map = device.zeroed::<I>(shape.src_records)?;
    let mut copier = TokenCopy::new(device, *shape)?;
    let checked = copier.check(&src_index, &dst_index)?;
    for variant in Variant::ALL.into_iter().filter(|variant| variant.takes(shape.record_bytes)) {
        for sms in [1, 3, 1000] {
            copier.set_sms(sms);
            to.fill(&poison)?;
            map.write(0, &vec![I::from(UNMAPPED); shape.src_records])?;
            copier.copy(variant, &checked, &from, &mut to, Some(&mut map))?;
            let mut slots = vec![I::from(0); shape.src_records];
            map.read(0, &mut slots)?;
            let what = format!("{variant}, {} bytes, {sms} SMs", shape.record_bytes);
            if to.all()? != expected {
                return Err(format!("{what}: other bytes").into());
            }
            let mut unnoted = vec![false; shape.src_records];
            src.iter().for_each(|&s| unnoted[s] = true);
            for (&s, &d) in src.iter().zip(&dst) {
                if I::try_from(d).is_ok_and(|d| slots[s] == d) {
                    unnoted[s] = false;
                    slots[s] = I::from(UNMAPPED);
                }
            }
            if unnoted.contains(&true) || slots.iter().any(|slot| *slot != I::from(UNMAPPED)) {
                return Err(format!("{what}: the slot map is wrong").into());
            }
            if variant < Variant::Capped {
                break;
            }
        }
    }
    Ok(())
}

fn gathers_from_the_host(device: &Device, shapes: &[Shape]) -> Result<(), Failed> {
    for shape in shapes {
        compare::<i32, Pinned<u8>, Buffer<u8>>(device, shape)?;
        compare::<i64, Pinned<u8>, Buffer<u8>>(device, shape)?;
    }
    Ok(())
}

fn evicts_to_the_host(device: &Device, shapes: &[Shape]) -> Result<(), Failed> {
    shapes.iter().try_for_each(|shape| compare::<i32, Buffer<u8>, Pinned<u8>>(device, shape))
}

fn moves_within_the_device(device: &Device, shapes: &[Shape]) -> Result<(), Failed> {
    shapes.iter().try_for_each(|shape| compare::<i64, Buffer<u8>, Buffer<u8>>(device, shape))
}

fn refuses_before_a_launch(device: &Device, shapes: &[Shape]) -> Result<(), Failed> {
    let shape = shapes[1];
    let mut copier = TokenCopy::new(device, shape)?;
    let (src, dst) = pairs(&shape);
    let dst_index = upload::<i32>(device, &dst)?;
    for bad in [-1, shape.src_records as i32, i32::MAX, i32::MIN] {
        let mut src_index = upload::<i32>(device, &src)?;
        src_index.write(shape.max_pairs / 2, &[bad])?;
        match copier.check(&src_index, &dst_index) {
            Err(Error::OutOfRange { refused: 1, .. }) => {}
            other => return Err(format!("{bad}: {:?}", other.map(|pairs| pairs.len())).into()),
        }
    }
    let src_index = upload::<i32>(device, &src)?;
    let checked = copier.check(&src_index, &dst_index)?;
    let refused = |copier: &mut TokenCopy, pairs: &CheckedPairs<'_, i32>, src: usize, dst: usize, map: usize| {
        let (src, mut dst) = (device.pinned::<u8>(src)?, device.zeroed::<u8>(dst)?);
        let mut map = device.zeroed::<i32>(map)?;
        match copier.copy(Variant::Grouped, pairs, &src, &mut dst, Some(&mut map)) {
            Err(Error::Size { .. } | Error::Variant { .. }) => Ok(()),
            other => Err(Failed::from(format!("{other:?}"))),
        }
    };
    let (src_bytes, dst_bytes) = (shape.src_records * 656, shape.dst_records * 656);
    refused(&mut copier, &checked, src_bytes - 1, dst_bytes, shape.src_records)?;
    refused(&mut copier, &checked, src_bytes, dst_bytes - 1, shape.src_records)?;
    refused(&mut copier, &checked, src_bytes, dst_bytes, shape.src_records - 1)?;
    // Pairs that were looked at for other regions, and records that the variant does not take.
    for other in [
        Shape { src_records: shape.src_records - 1, ..shape },
        Shape { dst_records: shape.dst_records + 1, ..shape },
        Shape { max_pairs: shape.max_pairs - 1, ..shape },
        Shape { record_bytes: 4096, ..shape },
    ] {
        let mut copier = TokenCopy::new(device, other)?;
        refused(&mut copier, &checked, src_bytes * 7, dst_bytes * 7, shape.src_records)?;
    }
    let short = upload::<i32>(device, &dst[1..])?;
    for record_bytes in [0, 8, 652] {
        if TokenCopy::new(device, Shape { record_bytes, ..shape }).is_ok() {
            return Err(format!("records of {record_bytes} bytes were taken").into());
        }
    }
    match copier.check(&src_index, &short) {
        Err(Error::Size { .. }) => Ok(()),
        _ => Err("lists of two lengths were taken".into()),
    }
}

fn never_writes_outside(device: &Device, shapes: &[Shape]) -> Result<(), Failed> {
    for shape in shapes {
        let size = shape.record_bytes as usize;
        let source = contents(shape.src_records * size);
        let (src, dst) = pairs(shape);
        let (mut src_index, mut dst_index) = (upload::<i64>(device, &src)?, upload::<i64>(device, &dst)?);
        src_index.write(3, &[shape.src_records as i64, -1])?;
        dst_index.write(10, &[i64::MIN, shape.dst_records as i64, 1 << 32])?;
        let mut expected = vec![POISON; shape.dst_records * size];
        for (i, (&s, &d)) in src.iter().zip(&dst).enumerate() {
            if ![3, 4, 10, 11, 12].contains(&i) {
                expected[d * size..][..size].copy_from_slice(&source[s * size..][..size]);
            }
        }
        let from = Pinned::make(device, &source)?;
        let mut to = Buffer::make(device, &expected)?;
        let mut copier = TokenCopy::new(device, *shape)?;
        for variant in Variant::ALL.into_iter().filter(|variant| variant.takes(shape.record_bytes)) {
            to.fill(&vec![POISON; expected.len()])?;
            let before = if cfg!(debug_assertions) { 0 } else { copier.refused()? };
            // SAFETY: nothing enqueued writes to the indices.
            let copied = unsafe { copier.copy_unchecked(variant, (&src_index, &dst_index), &from, &mut to, None) };
            match copied {
                Err(Error::OutOfRange { refused: 5, .. }) if cfg!(debug_assertions) => {}
                Ok(()) if !cfg!(debug_assertions) => {}
                other => return Err(format!("{variant}: {other:?}").into()),
            }
            if copier.refused()? - before != 5 {
                return Err(format!("{variant}: {} refused", copier.refused()?).into());
            }
            if to.all()? != expected {
                return Err(format!("{variant}, {} bytes: other bytes", shape.record_bytes).into());
            }
        }
    }
    Ok(())
}
