//! What goes wrong in GEMMs for Hopper: each mistake is planted in a small kernel that is right without it, and must be
//! found.
//!
//! The kernel is warp-specialised. A producer warp fills a ring of stages by TMA; a warpgroup multiplies from the ring
//! with `wgmma`, and releases each stage one product later. What such kernels hide best is a wait that is missing, too
//! late, or for too little: on a card they mostly give the right result nevertheless.

mod common;

use cuda_std::bulk::{self, Barrier};
use cuda_std::emulator::{Buffer, Failure, Launch, launch, replay, shrink};
use cuda_std::tensor::{self, Matrix, TensorMap};
use cuda_std::wgmma::{self, Operand};
use cuda_std::{Global, GlobalMut, Kernel, Layout, bf16, kernel, shared, thread};

/// The shape of a stage: rows of A, rows of B, and elements along K.
const M: u32 = 64;
const N: u32 = 128;
const K: u32 = 64;
/// Bytes of a stage: A, then B.
const A_BYTES: u32 = M * K * 2;
const STAGE: u32 = A_BYTES + N * K * 2;
const STAGES: u32 = 2;
const SHARED: u32 = STAGES * STAGE + 2 * STAGES * 8;
/// The length of K in stages: the ring is filled several times.
const TILES: u32 = 5;
/// The warpgroup that multiplies, and the producer warp.
const THREADS: u32 = 128 + 32;

/// C = A · Bᵀ.
#[repr(C)]
#[derive(Clone, Copy, Layout)]
pub struct Gemm {
    a: Global<TensorMap>,
    b: Global<TensorMap>,
    c: GlobalMut<f32>,
    tiles: u32,
}

/// A mistake to plant.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Plant {
    Nothing,
    // The producer.
    NoEmptyWait,
    EmptyWaitLate,
    EmptyParityWrong,
    NoExpect,
    ExpectTooFew,
    ExpectTooMany,
    // The barriers.
    NoInitFence,
    NoInitBarrier,
    TooManyConsumers,
    // The consumers.
    NoFullWait,
    FullWaitLate,
    FullWaitByOneWarp,
    FullParityWrong,
    FullParityStuck,
    NoRelease,
    ReleaseBeforeWait,
    ReleaseTwice,
    // Operands that the lanes write themselves.
    Scaled,
    ScaledWithoutProxyFence,
    ScaledProxyFenceLate,
    ScaledWithoutBarrier,
    // Products.
    NoProductFence,
    NoFenceAfterSet,
    NoCommit,
    NoProductWait,
    ProductWaitForTooFew,
}

/// Stores accumulators by number, one word after another.
macro_rules! store_accumulators {
    ($to:expr, $($i:literal)*) => { $( $to.store($i, wgmma::get::<$i>()); )* };
}

/// All lanes rewrite the elements of `a`, each lane its own words, as a kernel does that unpacks weights on their way
/// to `wgmma`.
unsafe fn rewrite(a: shared::Shared<u8>, thread: u32) {
    for i in 0..A_BYTES / 4 / 128 {
        // SAFETY: words of the stage, each one lane's.
        unsafe {
            let word = a.cast::<u32>().at((i * 128 + thread) as usize);
            word.store(0, word.load(0));
        }
    }
}

/// Computes C, unless a mistake is planted. Both matrices have `tiles` tiles; C has 64 words for each of 128 lanes.
unsafe fn gemm(p: Gemm, plant: Plant) {
    let has = |other: Plant| plant == other;
    // SAFETY: the caller's, and what is planted is what the tests are about.
    unsafe {
        wgmma::declare();
        let thread = thread::thread_idx_x();
        let barriers = shared::dynamic::<u64>(STAGES * STAGE);
        let full = |tile: u32| Barrier::at(barriers.at((tile % STAGES) as usize));
        let empty = |tile: u32| Barrier::at(barriers.at((STAGES + tile % STAGES) as usize));
        let stage = |tile: u32| shared::dynamic::<u8>(tile % STAGES * STAGE);
        if thread == 0 {
            for i in 0..STAGES {
                full(i).init(1);
                empty(i).init(if has(Plant::TooManyConsumers) { 5 } else { 4 });
            }
            if !has(Plant::NoInitFence) {
                bulk::fence_init();
            }
        }
        if !has(Plant::NoInitBarrier) {
            thread::sync_threads();
        }
        if thread >= 128 {
            if thread == 128 {
                produce(p, plant, full, empty, stage);
            }
            return;
        }
        let releases = thread.is_multiple_of(32) && !has(Plant::NoRelease);
        let release = |tile: u32| {
            empty(tile).arrive_if(releases);
            empty(tile).arrive_if(releases && has(Plant::ReleaseTwice));
        };
        for tile in 0..p.tiles {
            let parity = match plant {
                Plant::FullParityWrong => (tile / STAGES % 2) ^ 1,
                Plant::FullParityStuck => 0,
                _ => tile / STAGES % 2,
            };
            let waits = match plant {
                Plant::NoFullWait | Plant::FullWaitLate => false,
                Plant::FullWaitByOneWarp => thread < 32,
                _ => true,
            };
            if waits {
                full(tile).wait(parity);
            }
            if let Plant::Scaled
            | Plant::ScaledWithoutProxyFence
            | Plant::ScaledProxyFenceLate
            | Plant::ScaledWithoutBarrier = plant
            {
                rewrite(stage(tile), thread);
                if matches!(plant, Plant::Scaled | Plant::ScaledWithoutBarrier) {
                    bulk::fence_proxy_async();
                }
                if !has(Plant::ScaledWithoutBarrier) {
                    thread::sync_named(1, 128);
                }
            }
            if !has(Plant::NoProductFence) {
                wgmma::fence();
            }
            if has(Plant::NoFenceAfterSet) {
                wgmma::set::<5>(0.0);
            }
            let (a, b) = (Operand::at(stage(tile)), Operand::at(stage(tile).at(A_BYTES as usize)));
            for step in 0..K / 16 {
                wgmma::mma_n128(a.advance(step * 32), b.advance(step * 32), tile + step > 0);
            }
            if !has(Plant::NoCommit) {
                wgmma::commit();
            }
            if has(Plant::FullWaitLate) {
                full(tile).wait(parity);
            }
            if has(Plant::ScaledProxyFenceLate) {
                bulk::fence_proxy_async();
            }
            if has(Plant::ReleaseBeforeWait) {
                release(tile);
            }
            wgmma::wait::<1>();
            if tile > 0 && !has(Plant::ReleaseBeforeWait) {
                release(tile - 1);
            }
        }
        match plant {
            Plant::NoProductWait => {}
            Plant::ProductWaitForTooFew => wgmma::wait::<1>(),
            _ => wgmma::wait::<0>(),
        }
        let c = p.c.at((thread * 64) as usize);
        store_accumulators!(c, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32
            33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63);
    }
}

/// The loop of the producer's lane.
unsafe fn produce(
    p: Gemm,
    plant: Plant,
    full: impl Fn(u32) -> Barrier,
    empty: impl Fn(u32) -> Barrier,
    stage: impl Fn(u32) -> shared::Shared<u8>,
) {
    // SAFETY: as for `gemm`.
    unsafe {
        tensor::acquire(p.a);
        tensor::acquire(p.b);
        for tile in 0..p.tiles {
            let fresh = (tile / STAGES % 2) ^ 1;
            let parity = if plant == Plant::EmptyParityWrong { fresh ^ 1 } else { fresh };
            if !matches!(plant, Plant::NoEmptyWait | Plant::EmptyWaitLate) {
                empty(tile).wait(parity);
            }
            match plant {
                Plant::NoExpect => full(tile).arrive(),
                Plant::ExpectTooFew => full(tile).arrive_expect_tx(A_BYTES),
                Plant::ExpectTooMany => full(tile).arrive_expect_tx(STAGE + 16),
                _ => full(tile).arrive_expect_tx(STAGE),
            }
            tensor::load(stage(tile), p.a, [tile * K, 0], full(tile));
            tensor::load(stage(tile).at(A_BYTES as usize), p.b, [tile * K, 0], full(tile));
            if plant == Plant::EmptyWaitLate {
                empty(tile).wait(parity);
            }
        }
    }
}

macro_rules! kernels {
    ($($name:ident $plant:ident)*) => {
        $(
            #[doc = concat!("With `", stringify!($plant), "`.")]
            #[kernel(threads = 160)]
            pub unsafe fn $name(p: Gemm) {
                // SAFETY: the caller's, and what is planted is what the tests are about.
                unsafe { gemm(p, Plant::$plant) }
            }
        )*
    };
}

kernels! {
    right Nothing
    no_empty_wait NoEmptyWait
    empty_wait_late EmptyWaitLate
    empty_parity_wrong EmptyParityWrong
    no_expect NoExpect
    expect_too_few ExpectTooFew
    expect_too_many ExpectTooMany
    no_init_fence NoInitFence
    no_init_barrier NoInitBarrier
    too_many_consumers TooManyConsumers
    no_full_wait NoFullWait
    full_wait_late FullWaitLate
    full_wait_by_one_warp FullWaitByOneWarp
    full_parity_wrong FullParityWrong
    full_parity_stuck FullParityStuck
    no_release NoRelease
    release_before_wait ReleaseBeforeWait
    release_twice ReleaseTwice
    scaled Scaled
    scaled_without_proxy_fence ScaledWithoutProxyFence
    scaled_proxy_fence_late ScaledProxyFenceLate
    scaled_without_barrier ScaledWithoutBarrier
    no_product_fence NoProductFence
    no_fence_after_set NoFenceAfterSet
    no_commit NoCommit
    no_product_wait NoProductWait
    product_wait_for_too_few ProductWaitForTooFew
}

/// The buffers of a run.
struct Memory {
    a: Buffer<bf16>,
    b: Buffer<bf16>,
    c: Buffer<f32>,
    _maps: [Buffer<TensorMap>; 2],
}

fn value(i: usize) -> bf16 {
    bf16::from_f32((i * 7919 % 257) as f32 / 64.0 - 2.0)
}

fn memory() -> (Memory, Gemm) {
    let columns = (TILES * K) as usize;
    let matrix = |rows: u32, from: usize| {
        Buffer::from_slice(&(0..rows as usize * columns).map(|i| value(i + from)).collect::<Vec<_>>())
    };
    let (a, b) = (matrix(M, 0).named("A"), matrix(N, 5).named("B"));
    let map = |buffer: &Buffer<bf16>, rows: u32| {
        let whole = Matrix::dense(buffer.ptr().addr(), rows.into(), columns as u64, rows);
        Buffer::from_slice(&[TensorMap::emulated(&whole)])
    };
    let maps = [map(&a, M), map(&b, N)];
    let c = Buffer::new_poisoned((M * N) as usize).named("C");
    let params = Gemm { a: maps[0].ptr(), b: maps[1].ptr(), c: c.ptr_mut(), tiles: TILES };
    (Memory { a, b, c, _maps: maps }, params)
}

fn how(seed: u64) -> Launch {
    Launch { shared_bytes: SHARED, seed, idle_steps: 100_000, ..Launch::new(1, THREADS) }
}

/// Runs a kernel under many seeds and checks C.
fn passes<G: Kernel<Params = Gemm>>() {
    for seed in 0..20 {
        let (memory, params) = memory();
        launch::<G>(&how(seed), params).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        let columns = (TILES * K) as usize;
        let [a, b] = [&memory.a, &memory.b].map(Buffer::to_vec);
        for (i, found) in memory.c.to_vec().into_iter().enumerate() {
            let (thread, accumulator) = (i / 64, i % 64);
            let row = thread / 32 * 16 + thread % 32 / 4 + accumulator / 2 % 2 * 8;
            let column = accumulator / 4 * 8 + thread % 4 * 2 + accumulator % 2;
            let products = (0..columns).map(|k| a[row * columns + k].to_f32() * b[column * columns + k].to_f32());
            let sum: f32 = products.sum();
            assert!((found - sum).abs() <= 0.02, "seed {seed}: {row}, {column}: {found} for {sum}");
        }
    }
}

/// Runs a kernel that must fail under all seeds, each time for one of the reasons in `words`; then shrinks a failure.
fn fails<G: Kernel<Params = Gemm>>(words: &[&str]) -> Failure {
    for seed in 0..10 {
        let (_memory, params) = memory();
        let error = match launch::<G>(&how(seed), params) {
            Ok(_) => panic!("{}: seed {seed} does not find it", G::NAME),
            Err(error) => error.to_string(),
        };
        assert!(words.iter().any(|word| error.contains(word)), "{}: not for {words:?}: {error}", G::NAME);
    }
    let failure = shrink::<G, _>(&how(7), memory).expect("seed 7 fails");
    assert!(failure.after.choices <= failure.before.choices && failure.after.switches <= failure.before.switches);
    assert!(failure.schedule.len() <= 20, "{}: {failure}", G::NAME);
    let (_memory, params) = memory();
    let written = failure.schedule.to_string().parse().expect("a schedule is read as it is written");
    assert_eq!(replay::<G>(&how(7), &written, params), failure.result, "{}", G::NAME);
    failure
}

const RACE: &str = "race on shared offset";

#[test]
fn the_kernel_is_right() {
    passes::<right>();
    passes::<scaled>();
}

#[test]
fn the_producer_waits_for_free_stages() {
    let many = "more lanes arrive at the mbarrier";
    fails::<no_empty_wait>(&[RACE, many]);
    fails::<empty_wait_late>(&[RACE, many]);
    fails::<empty_parity_wrong>(&["deadlock"]);
}

#[test]
fn a_phase_waits_for_its_bytes() {
    fails::<no_expect>(&[RACE, "not initialised"]);
    fails::<expect_too_few>(&[RACE, "not initialised", "deadlock"]);
    fails::<expect_too_many>(&["deadlock"]);
}

#[test]
fn barriers_are_made_before_they_are_used() {
    fails::<no_init_fence>(&["no fence_init stands between this copy and its mbarrier"]);
    fails::<no_init_barrier>(&[RACE, "not initialised", "no mbarrier was made"]);
    fails::<too_many_consumers>(&["deadlock"]);
}

#[test]
fn consumers_wait_for_full_stages() {
    fails::<no_full_wait>(&[RACE, "not initialised"]);
    fails::<full_wait_late>(&[RACE]);
    fails::<full_wait_by_one_warp>(&[RACE, "not initialised"]);
    fails::<full_parity_wrong>(&[RACE, "not initialised", "deadlock"]);
    fails::<full_parity_stuck>(&[RACE, "deadlock"]);
}

#[test]
fn stages_are_released_once_and_not_too_early() {
    fails::<no_release>(&["deadlock"]);
    let failure = fails::<release_before_wait>(&[RACE]);
    assert!(failure.to_string().contains("by a copy that is not known to be done"), "{failure}");
    fails::<release_twice>(&[RACE, "more lanes arrive at the mbarrier", "deadlock"]);
}

#[test]
fn operands_that_lanes_wrote_are_fenced() {
    fails::<scaled_without_proxy_fence>(&["no fence_proxy_async stands between"]);
    fails::<scaled_proxy_fence_late>(&["no fence_proxy_async stands between"]);
    fails::<scaled_without_barrier>(&[RACE]);
}

#[test]
fn products_are_fenced_and_waited_for() {
    fails::<no_product_fence>(&["no wgmma::fence stands before the first product"]);
    fails::<no_fence_after_set>(&["no wgmma::fence stands between this product and the use of accumulator 5"]);
    let late = "is used before the product that it is part of was waited for";
    fails::<no_commit>(&[late, RACE]);
    fails::<no_product_wait>(&[late]);
    fails::<product_wait_for_too_few>(&[late]);
}
