//! What is copied where while a checkpoint is loaded to a device. Matrices wait in two staging buffers until they are
//! laid out.

use std::ops::Range;

use gpu_kernels::kv::HEAD_DIM;
use gpu_kernels::linear::N_TILE;
use half::bf16;
use model::Weight;

use crate::Error;
use crate::device::{Buffer, Device, Group, Region};
use crate::stream::Source;

/// A matrix may be cut after a multiple of this many rows: N-tiles stay whole, and so do rows that a format reads
/// together.
pub(super) fn rows_together(weight: &Weight<'_>) -> usize {
    let (of_n_tile, of_format) = (N_TILE as usize, weight.unit().div_ceil(weight.shape()[1]));
    if of_format.is_multiple_of(of_n_tile) { of_format } else { of_format * of_n_tile }
}

/// Which weights are copied where, and what is laid out behind the copies.
pub(super) struct Plan<'a> {
    pub(super) device: &'a Device,
    /// The weights, each with its first element that goes to its region.
    pub(super) weights: Vec<(&'a Weight<'a>, usize)>,
    /// The regions of `weights`, in the same order, in groups. The group in the making is `regions`.
    pub(super) groups: Vec<Group>,
    regions: Vec<Region>,
    /// For each group, the number of the matrix that is laid out behind it, with its source; none for groups without
    /// one.
    pub(super) behind: Vec<Option<(usize, Source)>>,
}

impl<'a> Plan<'a> {
    pub(super) fn new(device: &'a Device) -> Self {
        Self { device, weights: Vec::new(), groups: Vec::new(), regions: Vec::new(), behind: Vec::new() }
    }

    /// A buffer for the norm of the query or key heads. Ones if there is none.
    pub(super) fn head_norm(&mut self, norm: Option<&'a Weight<'a>>) -> Result<Buffer<bf16>, Error> {
        match norm {
            Some(norm) => self.buffer(&[norm]),
            None => self.device.upload(&[bf16::ONE; HEAD_DIM as usize]),
        }
    }

    /// One buffer for `weights`, one after another.
    pub(super) fn buffer(&mut self, weights: &[&'a Weight<'a>]) -> Result<Buffer<bf16>, Error> {
        let buffer = self.device.zeroed(weights.iter().map(|weight| weight.elements()).sum())?;
        self.place(weights, &buffer);
        Ok(buffer)
    }

    /// Plans the copy of `weights`, one after another, to the start of `buffer`.
    fn place(&mut self, weights: &[&'a Weight<'a>], buffer: &Buffer<bf16>) {
        let mut at = 0;
        for weight in weights {
            self.place_part(weight, 0..weight.elements(), buffer, at);
            at += weight.elements();
        }
    }

    /// Plans the copy of these elements of `weight` to `buffer`, from element `at` on.
    pub(super) fn place_part(&mut self, weight: &'a Weight<'a>, part: Range<usize>, buffer: &Buffer<bf16>, at: usize) {
        self.weights.push((weight, part.start));
        // Rows that a format reads together are not cut apart.
        self.regions.push(buffer.region(at, part.len()).in_units(weight.unit()));
    }

    /// Ends a group of regions, with what is laid out `behind` it. If its memory is that of group `after`, it is filled
    /// only when that one has been laid out.
    pub(super) fn end_group(&mut self, after: Option<usize>, behind: Option<(usize, Source)>) {
        self.groups.push(Group { regions: std::mem::take(&mut self.regions), after });
        self.behind.push(behind);
    }
}

/// Two staging buffers for matrices: one is laid out while the next one is copied.
pub(super) struct Staging {
    slots: [Buffer<bf16>; 2],
    /// The slot that the next matrix takes.
    next: usize,
    /// The group that each slot was last used by.
    users: [Option<usize>; 2],
}

impl Staging {
    /// For matrices, or parts of them, of up to so many elements.
    pub(super) fn new(device: &Device, largest: usize) -> Result<Self, Error> {
        let slots = [device.zeroed(largest)?, device.zeroed(largest)?];
        Ok(Self { slots, next: 0, users: [None; 2] })
    }

    /// Plans that matrix `number` of the stream is made of `weights`, which lie one after another; of gate and up if
    /// `is_gated`.
    pub(super) fn stage<'a>(&mut self, plan: &mut Plan<'a>, number: usize, weights: &[&'a Weight<'a>], is_gated: bool) {
        let elements: usize = weights.iter().map(|weight| weight.elements()).sum();
        let rows: usize = weights.iter().map(|weight| weight.shape()[0]).sum();
        let buffer = &self.slots[self.next];
        plan.place(weights, buffer);
        let (n, up) = if is_gated { (rows / 2, Some(elements / 2)) } else { (rows, None) };
        let source = Source::new(buffer, n, up);
        self.end(plan, number, source);
    }

    /// Plans that matrix `number` of the stream is made of `weight`, a part at a time. A part has as many rows as there
    /// is room for, but not all of them: one part is laid out while the next is copied.
    pub(super) fn stage_in_parts<'a>(&mut self, plan: &mut Plan<'a>, number: usize, weight: &'a Weight<'a>) {
        let (rows, k) = (weight.shape()[0], weight.shape()[1]);
        let unit = rows_together(weight);
        let most = (self.slots[0].len() / (unit * k) * unit).min(rows.div_ceil(2).next_multiple_of(unit));
        for first in (0..rows).step_by(most) {
            let end = rows.min(first + most);
            let buffer = &self.slots[self.next];
            plan.place_part(weight, first * k..end * k, buffer, 0);
            let source = Source { first_n_tile: first as u32 / N_TILE, ..Source::new(buffer, end - first, None) };
            self.end(plan, number, source);
        }
    }

    /// Ends the group that fills the next slot, with the layout of its source behind it.
    fn end(&mut self, plan: &mut Plan<'_>, number: usize, source: Source) {
        let after = self.users[self.next].replace(plan.groups.len());
        plan.end_group(after, Some((number, source)));
        self.next = (self.next + 1) % self.slots.len();
    }
}
