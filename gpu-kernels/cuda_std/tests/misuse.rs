//! Mistakes on which a GPU would hang, or which it would not notice, are reported with the lanes and places concerned.

mod common;

use common::{Io, fails, run};
use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::emulator::{self, Buffer, EmulatorError, Launch, launch};
use cuda_std::{Global, kernel, shared, thread, warp, wgmma};

/// A kernel of one expression, whose safety is what the test is about.
macro_rules! broken {
    ($(#[$doc:meta])* $name:ident, $threads:literal, |$p:ident| $body:expr) => {
        $(#[$doc])*
        #[kernel(threads = $threads)]
        pub unsafe fn $name($p: Io) {
            // SAFETY: deliberately broken; the emulator notices.
            #[allow(unused_unsafe)]
            unsafe {
                $body
            }
        }
    };
}

broken!(
    /// Half a warp votes, half shuffles.
    two_collectives, 64, |p| {
        let lane = thread::lane_id();
        let value = if lane < 16 { warp::ballot(true) } else { warp::shuffle_xor(lane, 1) };
        p.output.store(lane as usize, value);
    }
);
broken!(
    /// One lane ends while its warp waits for it.
    early_exit, 64, |_p| {
        if thread::thread_idx_x() != 37 {
            warp::sync_warp();
        }
    }
);
broken!(
    /// One warp ends while its block waits for it.
    missed_barrier, 96, |_p| {
        if thread::warp_id() != 1 {
            thread::sync_threads();
        }
    }
);
broken!(
    /// Two warps wait for four.
    too_few, 128, |_p| {
        if thread::warp_id() < 2 {
            thread::sync_named(3, 128);
        }
    }
);
broken!(
    /// The block's warps share out more registers than the block has: 168 a lane.
    too_many_registers, 384, |_p| {
        if thread::warp_id() < 8 {
            wgmma::take_registers::<232>();
        } else {
            wgmma::give_registers::<48>();
        }
    }
);
broken!(
    /// The block's warps share out exactly the registers that it has.
    all_registers, 384, |_p| {
        if thread::warp_id() < 8 {
            wgmma::take_registers::<232>();
        } else {
            wgmma::give_registers::<40>();
        }
    }
);
broken!(
    /// Two warps disagree on how many meet.
    disagreement, 128, |_p| {
        thread::sync_named(3, if thread::warp_id() == 0 { 64 } else { 128 });
    }
);
broken!(
    /// Polls for a value that nobody writes.
    livelock, 32, |p| {
        while atomic::load(p.zeros, 5, Ordering::Acquire, Scope::Device) == 0 {}
    }
);
broken!(
    /// Never ends, though it makes progress each time.
    endless, 32, |p| {
        loop {
            atomic::fetch_add(p.zeros, 5, 1, Ordering::Relaxed, Scope::Device);
        }
    }
);
broken!(
    /// Writes beyond the end of a buffer.
    beyond, 32, |p| p.output.store(thread::lane_id() as usize + p.n as usize - 30, 1)
);
broken!(
    /// Reads before the start of a buffer.
    before, 32, |p| p.output.store(Global::<u32>::from_raw(p.output.addr() - 4).load(0) as usize, 1)
);
broken!(
    /// Reads from the null address.
    null, 32, |p| p.output.store(0, Global::<u32>::default().load(0))
);
broken!(
    /// Reads sixteen bytes from an address that is only a multiple of four.
    misaligned, 32, |p| p.output.store(0, p.input.load16(1)[0])
);
broken!(
    /// Writes beyond the launch's shared memory.
    beyond_shared, 32, |_p| shared::dynamic::<u32>(4096).store(0, 1)
);
broken!(
    /// Reads a word that nobody wrote.
    uninitialised, 32, |p| p.zeros.store(thread::lane_id() as usize, p.output.load(9))
);
broken!(
    /// Reads a word of which only a part was written.
    partly_initialised, 32, |p| {
        if thread::lane_id() == 0 {
            p.output.cast::<u8>().store(2, 1);
            p.zeros.store(0, p.output.load(0));
        }
    }
);
broken!(
    /// Reads a word of shared memory that nobody wrote.
    uninitialised_shared, 32, |p| p.output.store(0, shared::dynamic::<u32>(64).load(0))
);
broken!(
    /// An index too large for an array.
    panics, 32, |p| {
        let array = [1u32, 2, 3];
        p.output.store(thread::lane_id() as usize, array[(thread::lane_id() / 8) as usize]);
    }
);
broken!(
    /// Tells the compiler something that does not hold.
    assumes, 32, |p| {
        cuda_std::assume(p.n > 64);
        p.output.store(0, 1000 / (p.n - 64));
    }
);
broken!(
    /// One lane traps.
    traps, 32, |_p| {
        if thread::lane_id() == 5 {
            thread::trap();
        }
    }
);

const ONE: fn(u32) -> Launch = |threads| Launch::new(1, threads);

#[test]
fn divergence_names_the_lanes() {
    let text = fails::<two_collectives>(ONE(64), 64, &["diverged"]);
    assert!(text.contains("ballot at") && text.contains("shuffle_xor at") && text.contains("misuse.rs"), "{text}");
    let text = fails::<early_exit>(ONE(64), 64, &["diverged"]);
    assert!(text.contains("lanes 37 of block (0, 0, 0) exited"), "{text}");
    let text = fails::<missed_barrier>(ONE(96), 64, &["diverged"]);
    assert!(text.contains("wait at sync_threads"), "{text}");
}

#[test]
fn deadlock_says_who_waits_for_what() {
    let text = fails::<too_few>(ONE(128), 64, &["deadlock"]);
    assert!(text.contains("lanes 0-63 of block (0, 0, 0) wait at named barrier 3 at"), "{text}");
    assert!(text.contains("lanes 64-127 of block (0, 0, 0) exited"), "{text}");
    fails::<disagreement>(ONE(128), 64, &["barrier 3 is for", "deadlock"]);
}

#[test]
fn livelock_runs_into_a_limit() {
    let how = Launch { idle_steps: 10_000, steps: 100_000, ..ONE(32) };
    let text = fails::<livelock>(how, 64, &["livelock: for 10000 steps lanes did nothing but poll"]);
    assert!(text.contains("lanes 0-31 of block (0, 0, 0) poll memory at"), "{text}");
    fails::<endless>(how, 64, &["livelock: not done after 100000 steps"]);
}

#[test]
fn bad_addresses_are_named() {
    let text = fails::<beyond>(ONE(32), 64, &["past the end of buffer `output` ([u32; 64])"]);
    assert!(text.contains("out of bounds") && text.contains("lane 3"), "{text}");
    fails::<before>(ONE(32), 64, &["out of bounds"]);
    fails::<null>(ONE(32), 64, &["(null) is out of bounds"]);
    fails::<misaligned>(ONE(32), 64, &["byte 4 of buffer `input`"]);
    fails::<beyond_shared>(ONE(32), 64, &["shared offset 4096 is out of bounds: the launch has 4096 bytes"]);
}

#[test]
fn uninitialised_reads_are_named() {
    let text = fails::<uninitialised>(ONE(32), 64, &["4 bytes at byte 36 of buffer `output` ([u32; 64])"]);
    assert!(text.contains("not initialised"), "{text}");
    fails::<partly_initialised>(ONE(32), 64, &["byte 0 of buffer `output` ([u32; 64])"]);
    fails::<uninitialised_shared>(ONE(32), 64, &["shared offset 64 are read but not initialised"]);
}

#[test]
fn panics_and_traps_are_errors() {
    let text = fails::<panics>(ONE(32), 64, &["panicked: index out of bounds: the len is 3 but the index is 3"]);
    assert!(text.contains("of block (0, 0, 0)"), "{text}");
    let text = fails::<assumes>(ONE(32), 64, &["panicked: a kernel assumes what does not hold"]);
    assert!(text.contains("of block (0, 0, 0)"), "{text}");
    fails::<traps>(ONE(32), 64, &["lane 5 of block (0, 0, 0)"]);
    // After these errors the thread can still launch kernels.
    assert!(run::<common_sum>(ONE(32), 64).result.is_ok());
}

broken!(
    /// Nothing wrong with this one.
    common_sum, 32, |p| p.output.store(thread::lane_id() as usize, p.input.load(thread::lane_id() as usize))
);

#[test]
fn more_registers_than_there_are() {
    fails::<too_many_registers>(ONE(384), 32, &["ask for 65536 registers, and 64512 is all"]);
    assert!(run::<all_registers>(ONE(384), 32).result.is_ok());
}

#[test]
fn impossible_launches_are_refused() {
    let refused = |how: Launch, why: &str| {
        let text = launch::<common_sum>(&how, run::<common_sum>(ONE(32), 64).params()).unwrap_err().to_string();
        assert!(text.contains(why), "{text}");
    };
    refused(ONE(64), "blocks of 64 lanes: whole warps, at most 32 lanes");
    refused(ONE(20), "blocks of 20 lanes");
    refused(Launch::new(0, 32), "a grid of 0 blocks");
    refused(Launch { shared_bytes: 1 << 20, ..ONE(32) }, "1048576 bytes of shared memory");
}

broken!(
    /// Writes a word, and has another thread launch a kernel that writes it too.
    written_by_two, 32, |p| {
        if thread::lane_id() == 0 {
            p.output.store(0, 1);
            beside(|| {
                launch::<common_sum>(&ONE(32), p).unwrap_or_else(|error| panic!("{error}"));
            });
        }
    }
);
broken!(
    /// Writes a word that the host then reads from another thread.
    written_and_copied, 32, |p| {
        if thread::lane_id() == 0 {
            p.output.store(0, 1);
            beside(|| emulator::read(p.output.addr(), &mut [0; 4]));
        }
    }
);
broken!(
    /// Reads a word that a launch of another thread reads, too.
    read_by_two, 32, |p| {
        let lane = thread::lane_id() as usize;
        let word = p.input.load(lane);
        if lane == 0 {
            let output = Buffer::<u32>::new_poisoned(32);
            beside(|| {
                launch::<common_sum>(&ONE(32), Io { output: output.ptr_mut(), ..p }).unwrap();
            });
            assert_eq!(output.to_vec()[7], 7);
        }
        p.output.store(lane, word);
    }
);

/// Runs `does` on another thread, and waits for it.
fn beside(does: impl FnOnce() + Send) {
    if let Err(payload) = std::thread::scope(|scope| scope.spawn(does).join()) {
        std::panic::resume_unwind(payload);
    }
}

#[test]
fn memory_that_another_thread_writes_is_not_used() {
    fails::<written_by_two>(ONE(32), 64, &["buffer `output` ([u32; 64]) is used here while it is written elsewhere"]);
    fails::<written_and_copied>(ONE(32), 64, &["buffer `output` ([u32; 64]) is used here while it is written"]);
    let run = run::<read_by_two>(ONE(32), 64);
    run.result.unwrap();
    assert_eq!(run.output.to_vec()[..32], run.input.to_vec()[..32]);
}

#[test]
fn a_dropped_buffer_is_gone() {
    let mut params = run::<common_sum>(ONE(32), 64).params();
    let output = Buffer::<u32>::new_poisoned(64);
    params.output = output.ptr_mut();
    let error = launch::<common_sum>(&ONE(32), params).unwrap_err();
    assert!(matches!(error, EmulatorError::Misuse { .. }), "{error}");
}
