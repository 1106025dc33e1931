//! Products of a warpgroup. Each lane computes its share when it waits for the product, as late as it may be, but with
//! what it knew of others when it started it. So mistakes show as races: a stage of shared memory that was released too
//! early is being overwritten by then, and a stage that was not waited for was written by a lane of which the product
//! knows nothing.

use super::MissingWait;
use super::access::Address;
use super::collective::{self, Collective};
use super::copies::Known;
use super::e4m3;
use super::race::Mode;
use super::world::{Site, World, misuse, world};
use crate::tensor::swizzled;
use crate::wgmma::{ACCUMULATORS, CORE_BYTES, CORE_ROWS_APART, FRAGMENTS};

/// Elements along K of one bf16 instruction.
const DEPTH: usize = 16;
/// Bytes of a row along K of one instruction.
const ROW: usize = 2 * DEPTH;

/// The element type of operands in shared memory.
#[derive(Clone, Copy)]
enum Element {
    Bf16,
    E4m3,
}

impl Element {
    /// The values in the bytes of a row, [`count`](Self::count) of them; the rest are zeros.
    fn values(self, row: [u8; ROW]) -> [f32; ROW] {
        match self {
            Self::Bf16 => {
                let mut values = [0.0; ROW];
                for (value, bytes) in values.iter_mut().zip(row.chunks_exact(2)) {
                    *value = f32::from_bits(u32::from_le_bytes([0, 0, bytes[0], bytes[1]]));
                }
                values
            }
            Self::E4m3 => row.map(e4m3::value),
        }
    }

    fn count(self) -> usize {
        match self {
            Self::Bf16 => DEPTH,
            Self::E4m3 => ROW,
        }
    }
}

/// A lane's share of the warpgroup's products.
#[derive(Default)]
pub struct Wgmmas {
    /// None in most kernels.
    accumulators: Option<Box<[f32; ACCUMULATORS]>>,
    fragments: [u32; FRAGMENTS],
    open: Vec<Wgmma>,
    committed: Vec<Vec<Wgmma>>,
    /// How many waits had groups to wait for.
    waits: u64,
    order: Order,
}

/// Notes for the check that `wgmma.fence` stands between uses of registers by ordinary code and products that use them.
#[derive(Default)]
struct Order {
    /// Whether there was a fence at all.
    fenced: bool,
    /// Accumulators that ordinary code has used since the last fence, one bit each; below, where it last used one.
    accumulators: [u64; ACCUMULATORS.div_ceil(64)],
    accumulator_at: Option<Site>,
    /// Fragments that ordinary code has set since the last fence, one bit each; below, where it last set one.
    fragments: u32,
    fragment_at: Option<Site>,
    /// The first accumulator and the columns of each product since the last fence.
    shapes: Vec<(usize, u32)>,
}

impl Order {
    fn used(&self, accumulators: std::ops::Range<usize>) -> Option<usize> {
        accumulators.into_iter().find(|i| self.accumulators[i / 64] >> (i % 64) & 1 != 0)
    }

    /// What is wrong with a product that starts now.
    fn wrong(&self, product: &Wgmma) -> Option<String> {
        if !self.fenced {
            return Some("no wgmma::fence stands before the first product".to_string());
        }
        let at = |site: Option<Site>| site.map_or_else(String::new, |site| format!(" at {site}"));
        if let Some(i) = self.used(product.accumulators()) {
            let at = at(self.accumulator_at);
            return Some(format!("no wgmma::fence stands between this product and the use of accumulator {i}{at}"));
        }
        if let OperandA::Registers(step, _) = product.a
            && self.fragments >> (4 * step) & 15 != 0
        {
            let at = at(self.fragment_at);
            return Some(format!("no wgmma::fence stands between this product and its fragments, set{at}"));
        }
        let other = self.shapes.iter().find(|&&shape| {
            let (first, columns) = shape;
            let theirs = first..first + columns as usize / 2;
            let ours = product.accumulators();
            shape != (product.first, product.columns) && theirs.start < ours.end && ours.start < theirs.end
        });
        other.map(|(_, columns)| {
            format!("no wgmma::fence stands between this product and one of {columns} columns in the same accumulators")
        })
    }
}

impl Wgmmas {
    /// The products that were not waited for.
    fn under_way(&self) -> impl Iterator<Item = &Wgmma> {
        self.open.iter().chain(self.committed.iter().flatten())
    }

    fn accumulator(&mut self, i: usize) -> &mut f32 {
        &mut self.accumulators.get_or_insert_with(|| Box::new([f32::NAN; ACCUMULATORS]))[i]
    }
}

/// One product that was not waited for.
struct Wgmma {
    a: OperandA,
    b: OperandB,
    /// The element type of both operands.
    element: Element,
    columns: u32,
    first: usize,
    keep: bool,
    site: Site,
    /// What the lane knew when it started the product.
    known: Known,
}

impl Wgmma {
    fn accumulators(&self) -> std::ops::Range<usize> {
        self.first..self.first + self.columns as usize / 2
    }
}

/// The two rows of A that a lane multiplies.
pub enum OperandA {
    /// In shared memory, swizzled, by its descriptor.
    Swizzled(u32),
    /// In shared memory as core matrices, by its descriptor.
    Cores(u32),
    /// In registers: the fragments of this step, as the warp's lanes had them.
    Registers(usize, [[u8; ROW]; 2]),
}

/// B, in shared memory, by its descriptor.
#[derive(Clone, Copy)]
pub enum OperandB {
    /// K-major like A: each column of B is a row, swizzled.
    OperandA(u32),
    /// K-major as core matrices.
    Cores(u32),
    /// MN-major: the rows of B as they are, swizzled.
    Columns(u32),
}

impl World {
    /// The bytes of row `row` of an operand.
    fn operand(&mut self, descriptor: u32, row: u32, from: Reader) -> [u8; ROW] {
        let start = (descriptor & 0x3fff) * 16 + row * 128;
        // The swizzle depends on bits of the address itself.
        self.halves([start, start + 16].map(swizzled), from)
    }

    /// The bytes of row `row` of an operand in core matrices.
    fn cores(&mut self, descriptor: u32, row: u32, from: Reader) -> [u8; ROW] {
        let start = (descriptor & 0x3fff) * 16 + row / 8 * CORE_ROWS_APART + row % 8 * (CORE_BYTES / 8);
        self.halves([start, start + (descriptor >> 16) * 16], from)
    }

    /// The bytes of columns `n` and `n + 1` of a bf16 operand.
    fn columns(&mut self, descriptor: u32, n: u32, from: Reader) -> [[u8; ROW]; 2] {
        let start = (descriptor & 0x3fff) * 16 + n / 64 * (descriptor >> 16) * 16 + n % 64 * 2;
        let mut columns = [[0; ROW]; 2];
        for k in 0..DEPTH {
            let pair: [u8; 4] = self.bytes(swizzled(start + k as u32 * 128), from);
            for (column, of_pair) in columns.iter_mut().zip(pair.chunks_exact(2)) {
                column[2 * k..][..2].copy_from_slice(of_pair);
            }
        }
        columns
    }

    /// A row whose two halves lie in different places.
    fn halves(&mut self, places: [u32; 2], from: Reader) -> [u8; ROW] {
        let mut out = [0; ROW];
        for (half, address) in out.chunks_exact_mut(ROW / 2).zip(places) {
            half.copy_from_slice(&self.bytes::<{ ROW / 2 }>(address, from));
        }
        out
    }

    fn bytes<const N: usize>(&mut self, address: u32, (known, site): Reader) -> [u8; N] {
        let address = Address::Shared(address);
        let pointer = self.access(address, N, N, Mode::Read, true, site);
        self.check_proxy(address, N, known, site);
        // SAFETY: checked just now.
        unsafe { pointer.cast::<[u8; N]>().read() }
    }

    /// Computes the lane's share of a product. The lane knows of others only what it knew when it started the product,
    /// so whatever has been written since then, or is in flight, was not there yet.
    fn multiply(&mut self, product: &Wgmma) {
        let Wgmma { ref a, b, element, columns, first, keep, site, ref known } = *product;
        let base = std::mem::replace(&mut self.lane().clock.base, known.clock.base.clone());
        let from = (known, site);
        let (lane, warp) = (self.thread() % 32, self.thread() / 32 % 4);
        let rows = match a {
            OperandA::Registers(_, rows) => *rows,
            OperandA::Swizzled(a) => [0, 8].map(|more| self.operand(*a, warp * 16 + lane / 4 + more, from)),
            OperandA::Cores(a) => [0, 8].map(|more| self.cores(*a, warp * 16 + lane / 4 + more, from)),
        }
        .map(|row| element.values(row));
        for eight in 0..columns / 8 {
            // A lane has two columns of every eight.
            let n = eight * 8 + lane % 4 * 2;
            let pair = match b {
                OperandB::OperandA(b) => [n, n + 1].map(|n| self.operand(b, n, from)),
                OperandB::Cores(b) => [n, n + 1].map(|n| self.cores(b, n, from)),
                OperandB::Columns(b) => self.columns(b, n, from),
            }
            .map(|row| element.values(row));
            // Four sums side by side, because each addition waits for the one before it in its own sum.
            let places = [0, 1, 2, 3].map(|i| first + eight as usize * 4 + i);
            let products = &mut self.lane().products;
            let mut sums = places.map(|i| if keep { *products.accumulator(i) } else { 0.0 });
            for k in 0..element.count() {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum += rows[i / 2][k] * pair[i % 2][k];
                }
            }
            for (i, sum) in places.into_iter().zip(sums) {
                *products.accumulator(i) = sum;
            }
        }
        self.lane().clock.base = base;
    }
}

/// The lane that reads an operand: what it knew, and where it started the product.
type Reader<'a> = (&'a Known, Site);

fn start(a: OperandA, b: OperandB, element: Element, columns: u32, first: usize, keep: bool, site: Site) {
    let world = world();
    let known = world.known();
    let lane = world.lane();
    // What the lane does from now on belongs to a new epoch, of which the product knows nothing.
    lane.clock.count += 1;
    let product = Wgmma { a, b, element, columns, first, keep, site, known };
    if let Some(what) = lane.products.order.wrong(&product) {
        misuse(site, what);
    }
    let shapes = &mut lane.products.order.shapes;
    if !shapes.contains(&(first, columns)) {
        shapes.push((first, columns));
    }
    lane.products.open.push(product);
}

/// Orders ordinary uses of registers before it and products after it.
pub fn fence() {
    world().lane().products.order = Order { fenced: true, ..Order::default() };
}

pub fn from_shared(a: OperandA, b: OperandB, columns: u32, first: usize, keep: bool, site: Site) {
    let (OperandB::OperandA(descriptor) | OperandB::Cores(descriptor) | OperandB::Columns(descriptor)) = b;
    collective::gather_warp(Collective::Wgmma, [descriptor], site);
    start(a, b, Element::Bf16, columns, first, keep, site);
}

/// As [`from_shared`] for e4m3, with B in core matrices.
pub fn of_e4m3(a: OperandA, b: u32, columns: u32, first: usize, keep: bool, site: Site) {
    collective::gather_warp(Collective::Wgmma, [b], site);
    start(a, OperandB::Cores(b), Element::E4m3, columns, first, keep, site);
}

/// The first of the upper accumulators.
const UPPER: usize = 64;

/// A product with A in registers, into the upper accumulators.
pub fn from_registers(step: usize, b: OperandB, columns: u32, keep: bool, site: Site) {
    let world = world();
    let lane = world.thread() as usize % 32;
    let fragments = &world.lane().products.fragments;
    let a = [0, 1, 2, 3].map(|word| fragments[step * 4 + word]);
    let table = collective::gather_warp(Collective::Wgmma, a, site);
    let mut rows = [[0; ROW]; 2];
    for (row, bytes) in rows.iter_mut().enumerate() {
        for (pair, bytes) in bytes.chunks_exact_mut(4).enumerate() {
            bytes.copy_from_slice(&table[lane / 4 * 4 + pair % 4][pair / 4 * 2 + row].to_le_bytes());
        }
    }
    start(OperandA::Registers(step, rows), b, Element::Bf16, columns, UPPER, keep, site);
}

pub fn commit() {
    let products = &mut world().lane().products;
    let group = std::mem::take(&mut products.open);
    products.committed.push(group);
}

pub fn wait(pending: usize, site: Site) {
    let world = world();
    let missing = world.launch.missing;
    let products = &mut world.lane().products;
    let committed = &mut products.committed;
    let mut done = committed.len().saturating_sub(pending);
    let mut is_missing = false;
    if done > 0 {
        is_missing = missing == Some(MissingWait::Mmas(products.waits));
        if is_missing {
            done = 0;
        }
        products.waits += 1;
    }
    let groups: Vec<Vec<Wgmma>> = committed.drain(..done).collect();
    world.report.left_out |= is_missing;
    groups.iter().flatten().for_each(|product| world.multiply(product));
    collective::warpgroup_barrier(site);
}

/// The accumulator. No product may be using it.
pub fn accumulator(i: usize, site: Site) -> &'static mut f32 {
    let products = &mut world().lane().products;
    if products.under_way().any(|p| p.accumulators().contains(&i)) {
        misuse(site, format!("accumulator {i} is used before the product that it is part of was waited for"));
    }
    products.order.accumulators[i / 64] |= 1 << (i % 64);
    products.order.accumulator_at = Some(site);
    products.accumulator(i)
}

pub fn set_fragment(i: usize, word: u32, site: Site) {
    let products = &mut world().lane().products;
    if products.under_way().any(|p| matches!(p.a, OperandA::Registers(step, _) if step == i / 4)) {
        misuse(site, format!("fragment {i} is written before the product that reads it was waited for"));
    }
    products.order.fragments |= 1 << i;
    products.order.fragment_at = Some(site);
    products.fragments[i] = word;
}

/// Registers of an SM.
const REGISTERS: u32 = 65536;

/// Notes the registers that the lane's warp asks for, and checks the sum once every warp of the block has asked. A
/// block shares out the registers that it was launched with. For each lane these are at most what an SM has, divided by
/// the block's lanes and rounded down to a multiple of eight, and at most 248. A request for more would wait for ever.
pub fn share_registers(count: u32, site: Site) {
    let world = world();
    let (warp, threads) = (world.thread() / 32, world.launch.threads);
    let registers = &mut world.block().registers;
    registers[warp as usize] = Some(count);
    let asked: Option<u32> = registers.iter().map(|&count| Some(count? * 32)).sum();
    let launched = (REGISTERS / threads / 8 * 8).min(248) * threads;
    if let Some(asked) = asked
        && asked > launched
    {
        misuse(
            site,
            format!("the block's warps ask for {asked} registers, and {launched} is all it can be launched with"),
        );
    }
}
