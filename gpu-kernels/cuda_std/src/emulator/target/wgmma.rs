//! MMAs of a warpgroup, and registers that pass from warp to warp.

use std::panic::Location;

use super::{ldmatrix_x4, pack_bf16};
use crate::emulator::wgmma;

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
