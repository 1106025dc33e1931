//! The decode loop never waits for the device: what a token takes is a few launches.

use host::device::Device;
use host::{Gpu, NgramDraft};
use integration_tests::{check_decode_calls, golden_cases, greedy};
use model::{Checkpoint, Sampling};

#[test]
fn a_token_takes_launches_and_nothing_else() {
    let case = golden_cases().remove(0);
    let checkpoint = Checkpoint::open(&case.dir).unwrap();
    let device = Device::emulator(0);
    let mut gpu = Gpu::new(&checkpoint, &device, 64, &mut |_, _| std::ops::ControlFlow::Continue(())).unwrap();
    let sampling = Sampling { temperature: 0.8, seed: 1, ..Sampling::default() };
    // A step is planned, with drafts or without, run and accepted; in between tokens are drawn. With drafts two kernels
    // may run it, since the device alone knows whether it has one row.
    for (sampling, draft, launches) in [
        (Sampling::default(), None, 3),
        (sampling, None, 4),
        // Nothing matches, so that a step brings a token.
        (sampling, Some(NgramDraft { max: 60, min: 60, ..NgramDraft::default() }), 4),
    ] {
        let request = host::Request { sampling, ..greedy(&case.prompt[..4], 6, draft) };
        check_decode_calls(&mut gpu, &device, &request, launches).unwrap();
    }
}
