//! Copies by tensor maps.

use std::panic::Location;

use crate::emulator::tensor;

/// Does nothing: a map of the emulator is visible once it is in memory.
pub unsafe fn tensor_acquire(_map: u64) {}

#[track_caller]
pub unsafe fn tensor_load(destination: u32, map: u64, x: u32, y: u32, barrier: u32) {
    tensor::load(destination, map, [x, y], barrier, Location::caller());
}

#[track_caller]
pub unsafe fn tensor_load_box(destination: u32, map: u64, at: [u32; 4], barrier: u32) {
    tensor::load_box(destination, map, at, barrier, Location::caller());
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
