//! Copies of tiles, from plain descriptions of tensors: chunks of 16 bytes, each to its place in the swizzle.

use std::sync::OnceLock;

use super::access::Address;
use super::copies::{Copy, launch_flight, start, start_grouped};
use super::memory::Buffer;
use super::race::Mode;
use super::world::{SHARED_BASE, Site, misuse, world};
use crate::tensor::{ROW, Tensor, TensorMap, swizzled};

const CHUNK: u32 = 16;

/// What lies beyond an edge.
fn zeros() -> Address {
    static ZEROS: OnceLock<Buffer<u8>> = OnceLock::new();
    Address::Global(
        ZEROS.get_or_init(|| Buffer::from_slice(&[0; CHUNK as usize]).named("zeros beyond a tensor")).ptr().addr(),
    )
}

fn tensor(map: u64, rank: u32, site: Site) -> Tensor {
    let pointer = world().access(Address::Global(map), size_of::<TensorMap>(), 64, Mode::Read, true, site);
    // SAFETY: checked just now.
    let map = unsafe { pointer.cast::<TensorMap>().read() };
    match map.tensor() {
        Some(tensor) if tensor.rank == rank => tensor,
        Some(tensor) => misuse(site, format!("a copy of {rank} dimensions with a map of {}", tensor.rank)),
        None => misuse(site, "the address is not that of a tensor map for the emulator".to_string()),
    }
}

/// The chunks of the tile at `at`: offset in the tile, and address in the tensor if within it.
fn chunks(tensor: &Tensor, at: [u32; 4], shared: u32, site: Site) -> Vec<(u32, Option<u64>)> {
    if !(shared - SHARED_BASE).is_multiple_of(1024) {
        misuse(site, format!("a tile at shared offset {}: not a multiple of 1,024", shared - SHARED_BASE));
    }
    let [rows, slices, blocks] = tensor.tile;
    let mut found = Vec::new();
    for index in 0..rows * slices * blocks {
        let place = [index % rows, index / rows % slices, index / rows / slices];
        let mut address = tensor.address;
        let mut within = true;
        for d in 0..3 {
            let i = u64::from(at[d + 1]) + u64::from(place[d]);
            within &= i < tensor.sizes[d + 1];
            address += i * tensor.strides[d];
        }
        for chunk in 0..ROW * 2 / CHUNK {
            let column = u64::from(at[0]) + u64::from(chunk * CHUNK / 2);
            // Sizes are multiples of 8 elements, as strides are of 16 bytes.
            let here = (within && column < tensor.sizes[0]).then_some(address + column * 2);
            found.push((swizzled(index * ROW * 2 + chunk * CHUNK), here));
        }
    }
    found
}

pub fn load(destination: u32, map: u64, at: [u32; 4], rank: u32, barrier: u32, site: Site) {
    let tensor = tensor(map, rank, site);
    let copies: Vec<Copy> = chunks(&tensor, at, destination, site)
        .into_iter()
        .map(|(offset, source)| {
            let source = source.map_or_else(zeros, Address::Global);
            start(Address::Shared(destination + offset), source, CHUNK, site)
        })
        .collect();
    launch_flight(copies, barrier, site);
}

pub fn load_multicast(destination: u32, map: u64, at: [u32; 4], rank: u32, barrier: u32, blocks: u16, site: Site) {
    if blocks != 1 {
        misuse(
            site,
            format!("a copy into the blocks {blocks:#b} of a cluster: the emulator has clusters of one block"),
        );
    }
    load(destination, map, at, rank, barrier, site);
}

pub fn store(map: u64, at: [u32; 4], source: u32, site: Site) {
    let tensor = tensor(map, 2, site);
    for (offset, destination) in chunks(&tensor, at, source, site) {
        if let Some(destination) = destination {
            let (destination, source) = (Address::Global(destination), Address::Shared(source + offset));
            start_grouped(|lane| &mut lane.bulk_stores, destination, source, CHUNK, site);
        }
    }
}
