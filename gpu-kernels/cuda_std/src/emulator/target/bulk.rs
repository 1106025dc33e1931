//! Asynchronous copies, and the mbarriers that they complete on.

use std::panic::Location;

use crate::emulator::access::Address;
use crate::emulator::copies;

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

/// Does nothing: copies from global memory are checked for races alone.
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
