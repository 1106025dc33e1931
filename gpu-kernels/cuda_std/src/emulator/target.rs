//! The host's bodies of the intrinsics: the same functions as in `ptx`, but emulated.

use std::panic::Location;

use super::access::{self, Address};
use super::collective::{self, Collective};
use super::race::Mode;
use super::world::{misuse, suspend, world};
use crate::atomic::Scope;

pub mod atomic;
mod bulk;
mod cluster;
mod math;
mod memory;
mod tensor;
mod wgmma;

pub use bulk::*;
pub use cluster::*;
pub use math::*;
pub use memory::*;
pub use tensor::*;
pub use wgmma::*;

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
    // Element [row][column] of the matrix that was given.
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
