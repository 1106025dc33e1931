//! Failing schedules are made short, and what was made short fails again.

mod common;

use common::{Io, kernels};
use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::emulator::{Buffer, EmulatorError, Launch, launch, replay, shrink, shrink_if};
use cuda_std::{Kernel, kernel, thread};

/// Three buffers: `n` words that are 0, 1, 2 and so on, `n` poisoned words, and 64 zeros.
type Buffers = [Buffer<u32>; 3];

fn memory(n: u32) -> (Buffers, Io) {
    let input = Buffer::from_slice(&(0..n).collect::<Vec<_>>()).named("input");
    let output = Buffer::new_poisoned(n as usize).named("output");
    let zeros = Buffer::from_slice(&[0; 64]).named("zeros");
    let params = Io { input: input.ptr(), output: output.ptr_mut(), zeros: zeros.ptr_mut(), n };
    ([input, output, zeros], params)
}

/// A seed under which a kernel goes wrong. Checks that it does so under some seeds of 400, but under fewer than 300.
fn rare<K: Kernel<Params = Io>>(how: Launch, wrong: impl Fn(&Result<(), EmulatorError>, &Buffers) -> bool) -> u64 {
    let fails = |seed: &u64| {
        let (buffers, params) = memory(64);
        let result = launch::<K>(&Launch { seed: *seed, ..how }, params).map(drop);
        wrong(&result, &buffers)
    };
    let found: Vec<u64> = (0..400).filter(fails).collect();
    assert!(!found.is_empty() && found.len() < 300, "{} of 400 seeds", found.len());
    found[0]
}

/// Lane 40 stores to two words. Lane 7, in another warp, trusts that it sees both stores or neither. Each warp also
/// counts in a word of its own, which is only noise.
#[kernel(threads = 256)]
pub unsafe fn between_stores(p: Io) {
    // SAFETY: 64 words of zeros.
    unsafe {
        let (first, second) = (p.zeros, p.zeros.at(1));
        let relaxed = Ordering::Relaxed;
        for _ in 0..10 {
            atomic::fetch_add(p.zeros.at(2 + thread::warp_id() as usize), 0, 1, relaxed, Scope::Device);
        }
        if thread::thread_idx_x() == 40 {
            atomic::store(first, 0, 1, relaxed, Scope::Device);
            atomic::store(second, 0, 1, relaxed, Scope::Device);
        }
        if thread::thread_idx_x() == 7 {
            let seen = atomic::load(first, 0, relaxed, Scope::Device);
            assert!(seen == atomic::load(second, 0, relaxed, Scope::Device), "half of the two stores");
        }
    }
}

#[test]
fn a_rare_failure_is_made_short() {
    let how = Launch::new(1, 256);
    let seed = rare::<between_stores>(how, |result, _| result.is_err());
    let how = Launch { seed, ..how };
    let failure = shrink::<between_stores, _>(&how, || memory(64)).expect("the seed fails");
    println!("{failure}");
    // Of thousands of choices one is left: lane 40's warp runs between the loads of lane 7's warp.
    assert!(failure.before.choices > 1000, "{failure}");
    assert_eq!(failure.schedule.len(), 1, "{failure}");
    assert!(failure.after.switches <= 12 && failure.after.switches < failure.before.switches / 4, "{failure}");
    let (_buffers, params) = memory(64);
    assert!(replay::<between_stores>(&how, &"plain".parse().unwrap(), params).is_ok());
    let text = failure.schedule.to_string();
    // It fails again from what was printed, and again.
    for _ in 0..3 {
        let (_buffers, params) = memory(64);
        assert_eq!(replay::<between_stores>(&how, &text.parse().unwrap(), params), failure.result);
    }
    let words = failure.to_string();
    for word in ["half of the two stores", &format!("seed {seed}: "), &format!("schedule: {text}"), "warp 1 of block 0"]
    {
        assert!(words.contains(word), "no {word:?} in {words}");
    }
}

/// Adds up by a load and a store. Each is atomic, but not both together.
#[kernel(threads = 64)]
pub unsafe fn lost_update(p: Io) {
    // SAFETY: 64 words of zeros.
    unsafe {
        if thread::lane_id() == 0 {
            let old = atomic::load(p.zeros, 0, Ordering::Relaxed, Scope::Device);
            atomic::store(p.zeros, 0, old + 1, Ordering::Relaxed, Scope::Device);
        }
    }
}

#[test]
fn wrong_results_are_made_short_too() {
    let lost = |buffers: &Buffers| buffers[2].to_vec()[0] == 1;
    let how = Launch::new(1, 64);
    let seed = rare::<lost_update>(how, |result, buffers| result.is_ok() && lost(buffers));
    let how = Launch { seed, ..how };
    let wrong = |result: &Result<_, _>, buffers: &Buffers| result.is_ok() && lost(buffers);
    let failure = shrink_if::<lost_update, _>(&how, || memory(1), wrong).expect("the seed's sum is wrong");
    println!("{failure}");
    assert_eq!(failure.schedule.len(), 1, "{failure}");
    assert!(failure.to_string().starts_with("the launch ended, with wrong results"), "{failure}");
    let (buffers, params) = memory(1);
    replay::<lost_update>(&how, &failure.schedule, params).unwrap();
    assert!(lost(&buffers));
}

#[test]
fn what_does_not_fail_is_not_made_short() {
    assert!(shrink::<kernels::xor, _>(&Launch::new(1, 32), || memory(64)).is_none());
}

/// Reads what its neighbour writes, and nothing orders the two: a race in any order of lanes.
#[kernel(threads = 64)]
pub unsafe fn always(p: Io) {
    // SAFETY: 64 words.
    unsafe {
        let thread = thread::thread_idx_x() as usize;
        p.output.store(thread, 1);
        p.zeros.store(thread, p.output.load(thread ^ 32));
    }
}

#[test]
fn what_fails_in_any_order_fails_in_the_plain_one() {
    let how = Launch { seed: 3, ..Launch::new(1, 64) };
    let failure = shrink::<always, _>(&how, || memory(64)).expect("a race");
    assert_eq!(failure.schedule.to_string(), "plain", "{failure}");
    assert_eq!(failure.runs, 2);
}

/// Each block waits for the last, which need not be resident.
#[kernel(threads = 32)]
pub unsafe fn waits_for_the_last_block(p: Io) {
    // SAFETY: 64 words.
    unsafe {
        if thread::lane_id() == 0 {
            let block = thread::block_idx_x();
            atomic::store(p.zeros, block as usize, 1, Ordering::Release, Scope::Device);
            let last = thread::grid_dim_x() - 1;
            while atomic::load(p.zeros, last as usize, Ordering::Acquire, Scope::Device) == 0 {}
        }
    }
}

#[test]
fn a_livelock_is_one_in_the_plain_order() {
    let how = Launch { idle_steps: 10_000, ..Launch::new(6, 32) };
    let seed = rare::<waits_for_the_last_block>(how, |result, _| result.is_err());
    let failure =
        shrink::<waits_for_the_last_block, _>(&Launch { seed, ..how }, || memory(64)).expect("the seed fails");
    assert!(matches!(failure.result, Err(EmulatorError::Livelock { .. })), "{failure}");
    assert!(failure.schedule.is_empty(), "{failure}");
}
