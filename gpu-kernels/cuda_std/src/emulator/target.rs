//! The host's bodies of the intrinsics: the same functions as in `ptx`, emulated.

use std::panic::Location;

use super::access::{self, Address};
use super::collective::{self, Collective};
use super::copies;
use super::race::Mode;
use super::world::{SHARED_BASE, misuse, suspend, world};
use super::{tensor, wgmma};
use crate::atomic::Scope;

pub fn thread_idx_x() -> u32 {
    world().thread()
}

pub fn block_dim_x() -> u32 {
    world().launch.threads
}

macro_rules! indices {
    ($($block:ident $grid:ident $axis:literal;)*) => {
        $(
            pub fn $block() -> u32 {
                world().block().index[$axis]
            }
            pub fn $grid() -> u32 {
                world().launch.grid[$axis]
            }
        )*
    };
}

indices! {
    block_idx_x grid_dim_x 0;
    block_idx_y grid_dim_y 1;
    block_idx_z grid_dim_z 2;
}

#[track_caller]
pub fn sync_threads() {
    collective::barrier(0, None, Location::caller());
}

#[track_caller]
pub fn sync_named(id: u32, count: u32) {
    collective::barrier(id, Some(count), Location::caller());
}

pub fn fence(scope: Scope) {
    access::fence(scope);
}

#[track_caller]
pub fn nanosleep(_ns: u32) {
    access::poll(world(), true, Location::caller());
    suspend();
}

pub fn opaque(value: u32) -> u32 {
    value
}

pub fn keep_rolled() {}

pub fn global_timer() -> u64 {
    world().report.steps
}

#[track_caller]
pub fn trap() -> ! {
    misuse(Location::caller(), "trap".to_string())
}

macro_rules! shuffles {
    ($($name:ident $collective:ident |$lane:ident, $argument:ident| $source:expr;)*) => {
        $(
            #[track_caller]
            pub fn $name(value: u32, $argument: u32) -> u32 {
                let $lane = world().thread() % 32;
                let table = collective::gather_warp(Collective::$collective, [value], Location::caller());
                table[$source as usize][0]
            }
        )*
    };
}

shuffles! {
    shuffle_xor ShuffleXor |lane, mask| (lane ^ (mask & 31));
    shuffle_idx ShuffleIdx |_lane, source| (source & 31);
    shuffle_up ShuffleUp |lane, delta| if delta & 31 > lane { lane } else { lane - (delta & 31) };
    shuffle_down ShuffleDown |lane, delta| if lane + (delta & 31) > 31 { lane } else { lane + (delta & 31) };
}

#[track_caller]
pub fn ballot(predicate: bool) -> u32 {
    let table = collective::gather_warp(Collective::Ballot, [u32::from(predicate)], Location::caller());
    (0..32).fold(0, |bits, lane| bits | table[lane][0] << lane)
}

#[track_caller]
pub fn any(predicate: bool) -> bool {
    collective::gather_warp(Collective::Any, [u32::from(predicate)], Location::caller())
        .iter()
        .any(|words| words[0] != 0)
}

#[track_caller]
pub fn all(predicate: bool) -> bool {
    collective::gather_warp(Collective::All, [u32::from(predicate)], Location::caller())
        .iter()
        .all(|words| words[0] != 0)
}

#[track_caller]
pub fn max_of_warp(value: u32) -> u32 {
    let table = collective::gather_warp(Collective::Max, [value], Location::caller());
    table.iter().map(|words| words[0]).max().expect("lanes")
}

#[track_caller]
pub fn sync_warp() {
    collective::gather_warp(Collective::SyncWarp, [], Location::caller());
}

#[track_caller]
pub fn elect() -> bool {
    collective::gather_warp(Collective::Elect, [], Location::caller());
    world().thread().is_multiple_of(32)
}

#[track_caller]
pub fn mma_m16n8k16_bf16(c: [f32; 4], a: [u32; 4], b: [u32; 2]) -> [f32; 4] {
    let lane = world().thread() as usize % 32;
    let [c0, c1, c2, c3] = c.map(f32::to_bits);
    let words = [c0, c1, c2, c3, a[0], a[1], a[2], a[3], b[0], b[1]];
    let d = &collective::gather_warp(Collective::Mma, words, Location::caller())[lane];
    [d[0], d[1], d[2], d[3]].map(f32::from_bits)
}

#[track_caller]
pub fn movmatrix(word: u32) -> u32 {
    let lane = world().thread() as usize % 32;
    let words = collective::gather_warp(Collective::Movmatrix, [word], Location::caller());
    // Element [row][column] of what was given.
    let element = |row: usize, column: usize| words[row * 4 + column / 2][0] >> (column % 2 * 16) & 0xffff;
    let (row, column) = (lane / 4, lane % 4 * 2);
    element(column, row) | element(column + 1, row) << 16
}

#[track_caller]
pub unsafe fn ldmatrix_x4(row: u32) -> [u32; 4] {
    let lane = world().thread() as usize % 32;
    let site = Location::caller();
    let rows = collective::gather_warp(Collective::Ldmatrix, [row], site);
    [0, 1, 2, 3].map(|matrix| {
        let row = rows[matrix * 8 + lane / 4][0];
        access::load(Address::Shared(row + lane as u32 % 4 * 4), Mode::Read, site)
    })
}

#[track_caller]
pub unsafe fn ldmatrix_x4_trans(row: u32) -> [u32; 4] {
    let lane = world().thread() as usize % 32;
    let site = Location::caller();
    let rows = collective::gather_warp(Collective::Ldmatrix, [row], site);
    [0, 1, 2, 3].map(|matrix| {
        let [low, high] = [0, 1].map(|next| {
            let row = rows[matrix * 8 + lane % 4 * 2 + next][0];
            u32::from(access::load::<u16>(Address::Shared(row + lane as u32 / 4 * 2), Mode::Read, site))
        });
        high << 16 | low
    })
}

#[track_caller]
pub unsafe fn stmatrix_x4(row: u32, words: [u32; 4]) {
    let lane = world().thread() as usize % 32;
    let site = Location::caller();
    let rows = collective::gather_warp(Collective::Stmatrix, [row], site);
    for (matrix, word) in words.into_iter().enumerate() {
        let row = rows[matrix * 8 + lane / 4][0];
        access::store(Address::Shared(row + lane as u32 % 4 * 4), word, site);
    }
}

pub fn dynamic_shared() -> u32 {
    SHARED_BASE
}

/// Sixteen bytes with their alignment, which [`access::load`] asks for.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
struct Vector([u32; 4]);

macro_rules! memory {
    ($($load:ident $load16:ident $address:ident $space:ident $mode:ident;)*) => {
        $(
            #[inline]
            #[track_caller]
            pub unsafe fn $load<T: Copy>(address: $address) -> T {
                const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8), "an element has 1, 2, 4 or 8 bytes") };
                access::load(Address::$space(address), Mode::$mode, Location::caller())
            }

            #[inline]
            #[track_caller]
            pub unsafe fn $load16(address: $address) -> [u32; 4] {
                access::load::<Vector>(Address::$space(address), Mode::$mode, Location::caller()).0
            }
        )*
    };
    (stores $($store:ident $store16:ident $address:ident $space:ident;)*) => {
        $(
            #[inline]
            #[track_caller]
            pub unsafe fn $store<T: Copy>(address: $address, value: T) {
                const { assert!(matches!(size_of::<T>(), 1 | 2 | 4 | 8), "an element has 1, 2, 4 or 8 bytes") };
                access::store(Address::$space(address), value, Location::caller());
            }

            #[inline]
            #[track_caller]
            pub unsafe fn $store16(address: $address, value: [u32; 4]) {
                access::store(Address::$space(address), Vector(value), Location::caller());
            }
        )*
    };
}

memory! {
    load_global load_global16 u64 Global Read;
    load_global_nc load_global16_nc u64 Global ReadConstant;
    load_shared load_shared16 u32 Shared Read;
}
memory! { stores
    store_global store_global16 u64 Global;
    store_shared store_shared16 u32 Shared;
}

#[inline]
#[track_caller]
pub unsafe fn load_global_stream<T: Copy>(address: u64) -> T {
    // SAFETY: the caller's.
    unsafe { load_global_nc(address) }
}

#[inline]
#[track_caller]
pub unsafe fn load_global16_stream(address: u64) -> [u32; 4] {
    // SAFETY: the caller's.
    unsafe { load_global16_nc(address) }
}

#[inline]
#[track_caller]
pub unsafe fn store_global_if<T: Copy>(condition: bool, address: u64, value: T) {
    if condition {
        // SAFETY: the caller's.
        unsafe { store_global(address, value) }
    }
}

#[inline]
#[track_caller]
pub unsafe fn load_global_if<T: Copy>(condition: bool, address: u64, otherwise: T) -> T {
    // SAFETY: the caller's.
    if condition { unsafe { load_global(address) } } else { otherwise }
}

#[inline]
#[track_caller]
pub unsafe fn store_global16_stream(address: u64, value: [u32; 4]) {
    // SAFETY: the caller's.
    unsafe { store_global16(address, value) }
}

#[inline]
#[track_caller]
pub unsafe fn store_global16_kept(address: u64, value: [u32; 4]) {
    // SAFETY: the caller's.
    unsafe { store_global16(address, value) }
}

#[track_caller]
pub unsafe fn async_copy16(destination: u32, source: u64) {
    let (destination, source) = (Address::Shared(destination), Address::Global(source));
    copies::start_grouped(|lane| &mut lane.async_copies, destination, source, 16, Location::caller());
}

pub fn async_commit() {
    copies::commit(|lane| &mut lane.async_copies);
}

pub fn async_wait<const PENDING: usize>() {
    copies::wait(|lane| &mut lane.async_copies, PENDING, true);
}

#[track_caller]
pub unsafe fn mbarrier_init(barrier: u32, count: u32) {
    copies::mbarrier_init(barrier, count, Location::caller());
}

#[track_caller]
pub unsafe fn mbarrier_arrive(barrier: u32) {
    copies::mbarrier_arrive(barrier, 0, Location::caller());
}

#[track_caller]
pub unsafe fn mbarrier_arrive_if(barrier: u32, condition: bool) {
    if condition {
        copies::mbarrier_arrive(barrier, 0, Location::caller());
    }
}

#[track_caller]
pub unsafe fn mbarrier_arrive_expect_tx(barrier: u32, bytes: u32) {
    copies::mbarrier_arrive(barrier, bytes, Location::caller());
}

#[track_caller]
pub unsafe fn mbarrier_wait(barrier: u32, parity: u32) {
    copies::mbarrier_wait(barrier, parity, Location::caller());
}

#[track_caller]
pub unsafe fn mbarrier_try_wait(barrier: u32, parity: u32) -> bool {
    copies::mbarrier_try_wait(barrier, parity, Location::caller())
}

#[track_caller]
pub unsafe fn mbarrier_test_wait(barrier: u32, parity: u32) -> bool {
    copies::mbarrier_test_wait(barrier, parity, Location::caller())
}

pub fn fence_mbarrier_init() {
    copies::fence_mbarrier_init();
}

pub fn fence_proxy_async() {
    copies::fence_proxy_async();
}

/// Copies from global memory are checked for races alone.
pub fn fence_proxy_async_global() {}

#[track_caller]
pub unsafe fn bulk_to_shared(destination: u32, source: u64, bytes: u32, barrier: u32) {
    copies::bulk_to_shared(destination, source, bytes, barrier, Location::caller());
}

#[track_caller]
pub unsafe fn bulk_to_shared_once(destination: u32, source: u64, bytes: u32, barrier: u32) {
    copies::bulk_to_shared(destination, source, bytes, barrier, Location::caller());
}

#[track_caller]
pub unsafe fn bulk_to_shared_multicast(destination: u32, source: u64, bytes: u32, barrier: u32, blocks: u16) {
    copies::bulk_multicast(destination, source, bytes, barrier, blocks, Location::caller());
}

#[track_caller]
pub unsafe fn bulk_to_global(destination: u64, source: u32, bytes: u32) {
    let (destination, source) = (Address::Global(destination), Address::Shared(source));
    copies::start_grouped(|lane| &mut lane.bulk_stores, destination, source, bytes, Location::caller());
}

pub fn bulk_commit() {
    copies::commit(|lane| &mut lane.bulk_stores);
}

pub fn bulk_wait_read<const PENDING: usize>() {
    copies::wait(|lane| &mut lane.bulk_stores, PENDING, false);
}

pub fn bulk_wait<const PENDING: usize>() {
    copies::wait(|lane| &mut lane.bulk_stores, PENDING, true);
}

/// A map that the emulator reads is visible once it is in memory.
pub unsafe fn tensor_acquire(_map: u64) {}

#[track_caller]
pub unsafe fn tensor_load(destination: u32, map: u64, x: u32, y: u32, barrier: u32) {
    tensor::load(destination, map, [x, y], barrier, Location::caller());
}

#[track_caller]
pub unsafe fn tensor_load_box_once(destination: u32, map: u64, at: [u32; 4], barrier: u32) {
    tensor::load_box(destination, map, at, barrier, Location::caller());
}

#[track_caller]
pub unsafe fn tensor_load_multicast(destination: u32, map: u64, x: u32, y: u32, barrier: u32, blocks: u16) {
    tensor::load_multicast(destination, map, [x, y], barrier, blocks, Location::caller());
}

#[track_caller]
pub unsafe fn tensor_store_if(condition: bool, map: u64, x: u32, y: u32, source: u32) {
    if condition {
        tensor::store(map, [x, y], source, Location::caller());
    }
}

pub fn wait_for_launches() {}

pub fn allow_next_launch() {}

pub fn cluster_rank() -> u32 {
    world().rank()
}

#[track_caller]
pub fn cluster_sync() {
    collective::cluster_barrier(false, Location::caller());
}

#[track_caller]
pub fn cluster_sync_made() {
    collective::cluster_barrier(true, Location::caller());
}

pub fn cluster_map(address: u32, rank: u32) -> u32 {
    copies::map(address, rank)
}

#[track_caller]
pub unsafe fn cluster_send16(destination: u32, words: [u32; 4], barrier: u32) {
    copies::send16(destination, words, barrier, Location::caller());
}

#[track_caller]
pub unsafe fn cluster_arrive_if(barrier: u32, condition: bool) {
    if condition {
        copies::peer_arrive(barrier, Location::caller());
    }
}

pub fn wgmma_declare() {}

pub fn wgmma_fence() {
    wgmma::fence();
}

pub fn wgmma_commit() {
    wgmma::commit();
}

#[track_caller]
pub fn wgmma_wait<const PENDING: u64>() {
    wgmma::wait(PENDING as usize, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_n256(a: u32, b: u32, keep: bool) {
    wgmma::from_shared(wgmma::OperandA::Swizzled(a), wgmma::OperandB::Cores(b), 256, 0, keep, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_n128_by_cores(a: u32, b: u32, keep: bool) {
    wgmma::from_shared(wgmma::OperandA::Swizzled(a), wgmma::OperandB::Cores(b), 128, 0, keep, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_n128(a: u32, b: u32, keep: bool) {
    wgmma::from_shared(wgmma::OperandA::Swizzled(a), wgmma::OperandB::OperandA(b), 128, 0, keep, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_n64<const SECOND: bool>(a: u32, b: u32, keep: bool) {
    let (a, b) = (wgmma::OperandA::Swizzled(a), wgmma::OperandB::OperandA(b));
    wgmma::from_shared(a, b, 64, 64 + 32 * usize::from(SECOND), keep, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_n64_columns<const SECOND: bool>(a: u32, b: u32, keep: bool) {
    let (a, b) = (wgmma::OperandA::Swizzled(a), wgmma::OperandB::Columns(b));
    wgmma::from_shared(a, b, 64, 64 + 32 * usize::from(SECOND), keep, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_n128_columns<const STEP: usize>(b: u32, keep: bool) {
    wgmma::from_registers(STEP, wgmma::OperandB::Columns(b), 128, keep, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_n64_upper<const STEP: usize>(b: u32, keep: bool) {
    wgmma::from_registers(STEP, wgmma::OperandB::OperandA(b), 64, keep, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_n128_upper<const STEP: usize>(b: u32, keep: bool) {
    wgmma::from_registers(STEP, wgmma::OperandB::OperandA(b), 128, keep, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_load_fragments<const STEP: usize>(row: u32) {
    let site = Location::caller();
    // SAFETY: the caller's.
    let words = unsafe { ldmatrix_x4(row) };
    for (i, word) in words.into_iter().enumerate() {
        wgmma::set_fragment(4 * STEP + i, word, site);
    }
}

#[track_caller]
pub unsafe fn wgmma_n128_cores(a: u32, b: u32, keep: bool) {
    wgmma::from_shared(wgmma::OperandA::Cores(a), wgmma::OperandB::OperandA(b), 128, 64, keep, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_n96_cores(a: u32, b: u32, keep: bool) {
    wgmma::from_shared(wgmma::OperandA::Cores(a), wgmma::OperandB::OperandA(b), 96, 64, keep, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_e4m3_n128<const SECOND: bool>(a: u32, b: u32, keep: bool) {
    wgmma::of_e4m3(wgmma::OperandA::Swizzled(a), b, 128, 64 * usize::from(SECOND), keep, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_e4m3_n8_cores(a: u32, b: u32, keep: bool) {
    wgmma::of_e4m3(wgmma::OperandA::Cores(a), b, 8, 64, keep, Location::caller());
}

#[track_caller]
pub unsafe fn wgmma_e4m3_n64_cores(a: u32, b: u32, keep: bool) {
    wgmma::of_e4m3(wgmma::OperandA::Cores(a), b, 64, 0, keep, Location::caller());
}

#[track_caller]
pub fn wgmma_set_fragment<const I: usize>(low: f32, high: f32) {
    wgmma::set_fragment(I, pack_bf16(low, high), Location::caller());
}

#[track_caller]
pub fn wgmma_put_fragment<const I: usize>(word: u32) {
    wgmma::set_fragment(I, word, Location::caller());
}

#[track_caller]
pub fn wgmma_get<const I: usize>() -> f32 {
    *wgmma::accumulator(I, Location::caller())
}

#[track_caller]
pub fn wgmma_set<const I: usize>(value: f32) {
    *wgmma::accumulator(I, Location::caller()) = value;
}

#[track_caller]
pub fn take_registers<const COUNT: u32>() {
    wgmma::share_registers(COUNT, Location::caller());
}

#[track_caller]
pub fn give_registers<const COUNT: u32>() {
    wgmma::share_registers(COUNT, Location::caller());
}

/// Subnormals are zero, as `.ftz` has it.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

macro_rules! unary {
    ($($name:ident |$x:ident| $value:expr;)*) => {
        $(
            pub fn $name($x: f32) -> f32 {
                $value
            }
        )*
    };
}

unary! {
    exp2 |x| flush(flush(x).exp2());
    log2 |x| flush(flush(x).log2());
    rcp |x| flush(flush(x).recip());
    rsqrt |x| flush(flush(x).sqrt().recip());
    sqrt |x| x.sqrt();
    abs |x| x.abs();
}

pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

pub fn fma_bf16x2(a: u32, b: u32, c: u32) -> u32 {
    let half = |at: u32| {
        let wide = |word: u32| f64::from(f32::from_bits(word >> at << 16));
        // A product of two is exact. What comes after it is rounded to odd: then the last rounding is as if it were the
        // only one.
        let (product, c) = (wide(a) * wide(b), wide(c));
        let sum = product + c;
        let of_product = sum - c;
        let rest = (product - of_product) + (c - (sum - of_product));
        let odd = |even: bool, rest: f64, up: bool| {
            if even && rest != 0.0 { if (rest > 0.0) == up { 1 } else { -1 } } else { 0 }
        };
        if !sum.is_finite() {
            return sum as f32;
        }
        let sum =
            f64::from_bits(sum.to_bits().wrapping_add_signed(odd(sum.to_bits().is_multiple_of(2), rest, sum > 0.0)));
        let single = sum as f32;
        let rest = sum - f64::from(single);
        let step = odd(single.to_bits().is_multiple_of(2) && single.is_finite(), rest, sum > 0.0);
        f32::from_bits(single.to_bits().wrapping_add_signed(step as i32))
    };
    pack_bf16(half(0), half(16))
}

pub fn permute(low: u32, high: u32, which: u32) -> u32 {
    let bytes = u64::from(high) << 32 | u64::from(low);
    (0..4).fold(0, |word, i| word | ((bytes >> (8 * (which >> (4 * i) & 7))) as u32 & 0xff) << (8 * i))
}

pub fn pack_e4m3(x: [f32; 4]) -> u32 {
    u32::from_le_bytes(x.map(super::e4m3::nearest))
}

pub fn pack_bf16(low: f32, high: f32) -> u32 {
    let round = |x: f32| {
        let bits = x.to_bits();
        // Half of the last place that stays, less one if that place is even: ties go to even.
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        if x.is_nan() { 0x7fff } else { rounded }
    };
    round(high) << 16 | round(low)
}

/// One module for each memory and type, a function for each operation.
pub mod atomic {
    macro_rules! space {
        ($module:ident $space:ident $address:ident) => {
            pub mod $module {
                space!(value u32 $space $address);
                space!(value i32 $space $address);
                space!(value u64 $space $address);
                space!(value i64 $space $address);
            }
        };
        (value $t:ident $space:ident $address:ident) => {
            pub mod $t {
                use std::panic::Location;

                use crate::atomic::{Ordering, Scope};
                use crate::emulator::access::{self, Address};

                #[track_caller]
                pub unsafe fn load(address: $address, ordering: Ordering, scope: Scope) -> $t {
                    access::atomic_load(Address::$space(address), ordering, scope, Location::caller())
                }

                #[track_caller]
                pub unsafe fn store(address: $address, value: $t, ordering: Ordering, scope: Scope) {
                    access::atomic_store(Address::$space(address), value, ordering, scope, Location::caller());
                }

                space!(update $t $space $address fetch_add(value) |old| Some(old.wrapping_add(value)));
                space!(update $t $space $address fetch_min(value) |old| Some(old.min(value)));
                space!(update $t $space $address fetch_max(value) |old| Some(old.max(value)));
                space!(update $t $space $address exchange(value) |_old| Some(value));
                space!(update $t $space $address compare_exchange(expected, new)
                    |old| (old == expected).then_some(new));
            }
        };
        (update $t:ident $space:ident $address:ident $name:ident($($argument:ident),*) |$old:ident| $new:expr) => {
            #[track_caller]
            pub unsafe fn $name(address: $address, $($argument: $t,)* ordering: Ordering, scope: Scope) -> $t {
                access::update(Address::$space(address), ordering, scope, Location::caller(), |$old: $t| $new)
            }
        };
    }

    space!(global Global u64);
    space!(shared Shared u32);
}
