//! The n-gram match on a GPU, at scale: exact equality with the serial algorithm, however it is launched. Without a GPU
//! every test here reports itself as ignored.

use std::process::ExitCode;

use benches::ngram::{Batch, Hit, Inputs, Operator, Peer, Published, TokenId, Way};
use gpu_kernels::ngram::MOST_SEQUENCES;
use host::device::{self, Device};
use libtest_mimic::{Arguments, Failed, Trial};

type Test = fn() -> Result<(), Failed>;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // A recording fails if another thread waits for the card meanwhile.
    arguments.test_threads = Some(1);
    let cards = device::cards().unwrap_or_default();
    let tests: [(&str, Test); 5] = [
        ("random_batches_of_64_bit_ids", random_batches::<i64>),
        ("random_batches_of_32_bit_ids", random_batches::<i32>),
        ("large_batches_of_long_texts", large_batches),
        ("slower_designs_agree", slower_designs_agree),
        ("a_recorded_launch_can_be_replayed", a_recorded_launch_can_be_replayed),
    ];
    let trials =
        tests.into_iter().map(|(name, test)| Trial::test(name, test).with_ignored_flag(cards.is_empty())).collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// In every way.
fn check<T: TokenId>(device: &Device, batch: usize, longest: usize, seed: u64) -> Result<(), Failed> {
    let inputs = Inputs::<T>::random(batch, longest, seed);
    let expected = inputs.expected();
    let mut on_device = Batch::new(device, &inputs, 1)?;
    let together = (batch <= MOST_SEQUENCES as usize).then_some(Way::Together);
    for way in [on_device.way(), Way::Blocks(1), Way::Blocks(3), Way::Blocks(400)].into_iter().chain(together) {
        on_device.reset(&inputs)?;
        on_device.launch_with(0, way)?;
        if let Some(what) = on_device.check(0, &expected)? {
            return Err(format!("batch {batch}, longest {longest}, seed {seed}, {way:?}: {what}").into());
        }
    }
    Ok(())
}

fn random_batches<T: TokenId>() -> Result<(), Failed> {
    let device = benches::device(0)?;
    for (i, batch) in [1, 2, 7, 31, 32, 33, 100, 256, 1023, 1024, 1025, 2500, 4096].into_iter().enumerate() {
        for (j, longest) in [1, 2, 3, 16, 129, 511, 2048, 20_000, 131_072].into_iter().enumerate() {
            // 32 MiB of ids at most.
            if batch * longest <= 4 << 20 {
                check::<T>(&device, batch, longest, (i * 100 + j) as u64)?;
            }
        }
    }
    Ok(())
}

fn large_batches() -> Result<(), Failed> {
    let device = benches::device(0)?;
    check::<i32>(&device, 256, 131_072, 1)?;
    check::<i64>(&device, 200, 131_072, 2)?;
    check::<i64>(&device, 4096, 8192, 3)?;
    check::<i32>(&device, 4096, 16_384, 4)
}

fn slower_designs_agree() -> Result<(), Failed> {
    let device = benches::device(0)?;
    let mut tried = 0;
    for seed in 0..60 {
        let inputs = Inputs::<i64>::random(1 + seed as usize * 37 % 1500, 1 + seed as usize * 997 % 3000, seed);
        if inputs.operator != Operator::Match {
            continue;
        }
        let expected = inputs.expected();
        let mut batch = Batch::new(&device, &inputs, 1)?;
        for peer in [Peer::Plain, Peer::BlockScan] {
            batch.reset(&inputs)?;
            batch.launch_peer(0, peer)?;
            if let Some(what) = batch.check(0, &expected)? {
                return Err(format!("seed {seed}, {peer:?}: {what}").into());
            }
        }
        tried += 1;
    }
    if tried < 10 { Err("too few batches for the operator".into()) } else { Ok(()) }
}

fn a_recorded_launch_can_be_replayed() -> Result<(), Failed> {
    let device = benches::device(0)?;
    for hit in Hit::ALL {
        for (batch, length) in [(32, 512), (64, 20_000)] {
            let inputs = Published { batch, length, threshold: 200, hit }.inputs::<i64>();
            let on_device = Batch::new(&device, &inputs, 2)?;
            on_device.launch(0)?;
            let mut graph = device.capture(|| (0..2).try_for_each(|set| on_device.launch(set)))?;
            for _ in 0..50 {
                graph.launch()?;
            }
            drop(graph);
            let expected = inputs.expected();
            for set in 0..2 {
                if let Some(what) = on_device.check(set, &expected)? {
                    return Err(format!("batch {batch}, length {length}, {}: {what}", hit.name()).into());
                }
            }
        }
    }
    Ok(())
}
