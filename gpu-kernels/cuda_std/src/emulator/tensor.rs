//! TMA's copies of tiles and boxes, done from the plain description in a map: in chunks of 16 bytes, each to its place
//! in the swizzle.

use std::sync::OnceLock;

use super::access::Address;
use super::copies::{launch_flights, members, start, start_grouped};
use super::memory::Buffer;
use super::race::Mode;
use super::world::{SHARED_BASE, Site, misuse, world};
use crate::tensor::{Array, Matrix, ROW, TensorMap, swizzled};

const CHUNK: u32 = 16;

/// The source of what lies beyond an edge.
fn zeros() -> Address {
    static ZEROS: OnceLock<Buffer<u8>> = OnceLock::new();
    Address::Global(
        ZEROS.get_or_init(|| Buffer::from_slice(&[0; CHUNK as usize]).named("zeros beyond a matrix")).ptr().addr(),
    )
}

fn described<D>(map: u64, description: impl Fn(&TensorMap) -> Option<D>, site: Site) -> D {
    let pointer = world().access(Address::Global(map), size_of::<TensorMap>(), 64, Mode::Read, true, site);
    // SAFETY: checked just now.
    let map = unsafe { pointer.cast::<TensorMap>().read() };
    let strange = || misuse(site, "the address is not that of a tensor map for the emulator".to_string());
    description(&map).unwrap_or_else(strange)
}

fn matrix(map: u64, site: Site) -> Matrix {
    described(map, TensorMap::matrix, site)
}

/// The pieces of the box at `at`, in order: each one's address, if it is within the array, and its bytes. The part of a
/// row that is within the array is one piece; the rest of the row is in chunks.
fn pieces_of_box(array: &Array, at: [u32; 4], shared: u32, site: Site) -> Vec<(Option<u64>, u32)> {
    if !(shared - SHARED_BASE).is_multiple_of(128) {
        misuse(site, format!("a box at shared offset {}: not a multiple of 128", shared - SHARED_BASE));
    }
    let [x, y, z, w] = array.extent;
    let mut pieces = Vec::new();
    for i in 0..y * z * w {
        let outer = [at[1] + i % y, at[2] + i / y % z, at[3] + i / y / z].map(u64::from);
        let is_there = outer.iter().zip(&array.sizes[1..]).all(|(place, size)| place < size);
        let words = if is_there { array.sizes[0].saturating_sub(at[0].into()).min(x.into()) as u32 } else { 0 };
        let offset: u64 = outer.iter().zip(array.strides).map(|(place, stride)| place * stride).sum();
        if words > 0 {
            pieces.push((Some(array.address + u64::from(at[0]) * 8 + offset), words * 8));
        }
        pieces.extend((words * 8 / CHUNK..x * 8 / CHUNK).map(|_| (None, CHUNK)));
    }
    pieces
}

pub fn load_box(destination: u32, map: u64, at: [u32; 4], barrier: u32, site: Site) {
    let pieces = pieces_of_box(&described(map, TensorMap::array, site), at, destination, site);
    launch_flights(&[world().slot()], barrier, site, |slot| {
        let mut to = destination;
        let copy = |&(source, bytes): &(Option<u64>, u32)| {
            let source = source.map_or_else(zeros, Address::Global);
            let copy = start(Address::SharedOf(slot, to), source, bytes, site);
            to += bytes;
            copy
        };
        pieces.iter().map(copy).collect()
    });
}

/// The chunks of the tile at `x`, `y`: each one's offset in the tile, and its address in the matrix if it is within the
/// matrix.
fn chunks(matrix: &Matrix, [x, y]: [u32; 2], shared: u32, site: Site) -> Vec<(u32, Option<u64>)> {
    let (offset, unit) = (shared - SHARED_BASE, if matrix.swizzled { 1024 } else { 128 });
    if !offset.is_multiple_of(unit) {
        misuse(site, format!("a tile at shared offset {offset}: not a multiple of {unit}"));
    }
    let chunk = |i: u32| {
        let row = u64::from(y) + u64::from(i * CHUNK / (ROW * 2));
        // A chunk is within the matrix or beyond it: rows are whole chunks.
        let column = u64::from(x) + u64::from(i * CHUNK % (ROW * 2) / 2);
        let within = row < matrix.rows && column < matrix.columns;
        let place = if matrix.swizzled { swizzled(i * CHUNK) } else { i * CHUNK };
        (place, within.then(|| matrix.address + (row * matrix.columns + column) * 2))
    };
    (0..matrix.tile_rows * ROW * 2 / CHUNK).map(chunk).collect()
}

pub fn load(destination: u32, map: u64, at: [u32; 2], barrier: u32, site: Site) {
    load_into(&[world().slot()], destination, map, at, barrier, site);
}

fn load_into(slots: &[usize], destination: u32, map: u64, at: [u32; 2], barrier: u32, site: Site) {
    let chunks = chunks(&matrix(map, site), at, destination, site);
    launch_flights(slots, barrier, site, |slot| {
        let copy = |&(offset, source): &(u32, Option<u64>)| {
            let source = source.map_or_else(zeros, Address::Global);
            start(Address::SharedOf(slot, destination + offset), source, CHUNK, site)
        };
        chunks.iter().map(copy).collect()
    });
}

pub fn load_multicast(destination: u32, map: u64, at: [u32; 2], barrier: u32, blocks: u16, site: Site) {
    load_into(&members(blocks, site), destination, map, at, barrier, site);
}

pub fn store(map: u64, at: [u32; 2], source: u32, site: Site) {
    for (offset, destination) in chunks(&matrix(map, site), at, source, site) {
        if let Some(destination) = destination {
            let (destination, source) = (Address::Global(destination), Address::Shared(source + offset));
            start_grouped(|lane| &mut lane.bulk_stores, destination, source, CHUNK, site);
        }
    }
}
