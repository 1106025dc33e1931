//! The consumers: they run a step's GEMMs and attention in order, with grid barriers between them. There are GEMMs of
//! [one row](one), of [several rows](some), and of either in [e4m3]. In the first two, a warp's part is its [duty].
//!
//! # Safety
//! `p` is a launch's parameter block. All lanes of the eight consumer warps call what is unsafe here, in the same
//! order, since they synchronise. The CTA has put into shared memory what all roles find there, and has synchronised
//! since. Scratch memory is the consumers' alone. They read what other CTAs write only once they have waited for it:
//! for all of it at a grid barrier, or word by word in the exchange. What they write for others, they write before they
//! arrive at the next grid barrier.

mod duty;
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
mod e4m3;
mod one;
mod outputs;
mod pairs;
mod some;

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{device, shared, thread};

use super::problem::Problem;
use super::producer::Units;
use super::{ARRIVALS, BEST, DecodeStep, Mark, Matrix, N_TILES, WARPS, WGMMA, barrier};
use crate::activations::element_at;
use crate::attention::Divisor;
use crate::embedding::embed_each;
use crate::linear::{K_PARTIALS, N_TILE};
use crate::ring::Ring;
use crate::step::MAX_DECODE_ROWS;
use crate::waiting;
use crate::weights::{FragmentFormat, Lossless, Plain, WeightFormat};
#[cfg(any(not(target_arch = "nvptx64"), cuda_arch = "sm_90a"))]
pub use e4m3::OfCodes;
pub use one::{ONE_BYTES, factors};
use outputs::{Addend, Output};

/// Bytes of the partial sums of a wave, `[n_tile][k_partial][row][feature]`.
pub const PARTIAL_BYTES: u32 = N_TILES * K_PARTIALS * MAX_DECODE_ROWS * N_TILE * 4;

/// The consumers' state. `ROWS` says [how the rows relate](super::CHAIN); `SHORT` selects the [short](super::short)
/// ring. It is made once the CTA has put into shared memory what all roles find there, and has synchronised.
pub struct Consumer<'a, const ROWS: u8, const SHORT: bool> {
    pub p: &'a DecodeStep,
    /// The step's rows.
    pub count: u32,
    /// The first sequence flag of the step's [words](crate::exchange).
    pub flag: u32,
    pub ring: Ring,
    rows: Divisor,
    grid: u32,
    /// The CTA's place in the next wave's rotation.
    pub place: u32,
}

/// The 8 consumer warps of a CTA synchronise, at [barrier](super#named-barriers) 1.
#[device]
pub fn sync() {
    thread::sync_named(barrier::CONSUMERS, WARPS * 32);
}

impl<'a, const ROWS: u8, const SHORT: bool> Consumer<'a, ROWS, SHORT> {
    /// The consumers of a CTA, in a step of `count` rows whose first sequence flag is `flag`.
    ///
    /// # Safety
    /// The roles have parted: the CTA has put into shared memory what all of them find there, and has synchronised.
    #[device]
    pub unsafe fn new<F: WeightFormat>(p: &'a DecodeStep, count: u32, flag: u32) -> Self {
        let ring = Ring::consumer(super::ring::<F>(SHORT));
        let (grid, place) = (thread::grid_dim_x(), thread::block_idx_x());
        Self { p, count, flag, ring, rows: Divisor::new(count), grid, place }
    }

    /// The position of the first row. The positions of the other rows follow it, or in a tree their slots do.
    #[device]
    pub fn first_position(&self) -> u32 {
        // SAFETY: left there before the roles parted, and there is no consumer before that.
        unsafe { Units::last() + 1 - self.count }
    }

    /// Runs all layers and the head. If `ONE`, CTAs exchange the row's activations as [words with a sequence
    /// flag](crate::exchange); otherwise through memory, with grid barriers.
    ///
    /// # Safety
    /// The step has `count` rows: one if `ONE`, else at most `TILES` times 8. It is called once, by the consumers of
    /// every CTA; a warp [produces](super::producer::produce), and if `ONE` another finds [`factors`].
    #[device]
    pub unsafe fn run<
        F: WeightFormat,
        const TILES: usize,
        const ONE: bool,
        const PACKED_HEAD: bool,
        const ATTENTION: u8,
    >(
        &mut self,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            self.mark(Mark::Begin);
            self.embed::<ONE>();
            self.mark(Mark::Embedded);
            if !ONE {
                self.arrive();
            }
            let mut index = 0;
            let mut part = self.part(index, 0);
            let mut old = if ONE { Default::default() } else { self.first_addends(&part) };
            loop {
                let (matrix, layer) = (self.p.matrix(index), index / 4);
                let has_other_format = (F::PLAIN_HEAD || PACKED_HEAD) && matrix == Matrix::Head;
                let is_packed = has_other_format && self.p.packs_head::<F, ROWS, PACKED_HEAD, SHORT>(ONE);
                macro_rules! gemm {
                    ($format:ty) => {{
                        type Of<F> = <F as WeightFormat>::Products;
                        if ONE {
                            <Of<$format> as Products<$format>>::of_one(self, part)
                        } else {
                            <Of<$format> as Products<$format>>::of_some::<ROWS, SHORT, TILES>(self, part, old)
                        }
                    }};
                }
                match (has_other_format, is_packed) {
                    (false, _) => gemm!(F),
                    (true, true) => gemm!(Lossless),
                    (true, false) => gemm!(Plain),
                }
                self.mark(match self.p.matrix(thread::opaque(index)) {
                    Matrix::Qkv => Mark::Qkv,
                    Matrix::Output => Mark::Output,
                    Matrix::GateUp => Mark::GateUp,
                    Matrix::Down => Mark::Down,
                    Matrix::Head => Mark::Head,
                });
                index += 1;
                if index == self.p.matrices() {
                    break;
                }
                if ONE {
                    if matrix == Matrix::Qkv {
                        // Waits until scratch memory is free.
                        sync();
                        self.attention::<1, true, ATTENTION>(layer, Units::load::<ROWS>(self.place));
                    }
                    part = self.part(index, 0);
                    continue;
                }
                // What follows, up to the wait, reads nothing that other CTAs have just written.
                self.arrive();
                if matrix == Matrix::Qkv {
                    let units = self.before_attention(layer);
                    self.wait();
                    // How many vectors a warp makes at a time. With more, a layer's code would not fit into the SM's
                    // instruction cache.
                    if ATTENTION == WGMMA {
                        self.attention::<2, false, ATTENTION>(layer, units);
                    } else {
                        self.attention::<4, false, ATTENTION>(layer, units);
                    }
                    self.arrive();
                } else if matrix == Matrix::Output {
                    self.append(layer);
                }
                // Loaded ahead, since a norm's weights come from device memory. What the first outputs will be added
                // to is complete by now.
                part = self.part(index, 0);
                old = self.first_addends(&part);
            }
            if ONE {
                sync();
            }
            let row = thread::thread_idx_x();
            if row < self.count {
                let best = self.p.counters.at(DecodeStep::BEST).cast::<u64>();
                let here = shared::dynamic::<u64>(BEST).load(row as usize);
                atomic::fetch_max(best, row as usize, here, Ordering::Relaxed, Scope::Device);
            }
            if ONE {
                self.use_up_flags();
            }
        }
    }

    /// Records the time of a point in the trace, if there is one.
    ///
    /// # Safety
    /// The CTA's trace, if there is one, has room for all points that it passes. One thread writes it, the first
    /// consumer.
    #[device]
    pub unsafe fn mark(&self, mark: Mark) {
        // SAFETY: the caller's word.
        unsafe {
            if self.p.trace.is_null() {
                return;
            }
            if thread::opaque(thread::thread_idx_x()) == 0 {
                let len = DecodeStep::trace_len(self.p.layer_count);
                let trace = self.p.trace.at((thread::block_idx_x() * len) as usize);
                let marks = trace.load(0) + 1;
                trace.store(marks as usize, thread::global_timer() & !0 >> 8 | (mark as u64) << 56);
                trace.store(0, marks);
            }
        }
    }

    /// Waits until the consumers of every CTA have arrived, and shows each what the others wrote.
    #[device]
    pub unsafe fn grid_barrier(&self) {
        // SAFETY: the caller's word.
        unsafe {
            self.arrive();
            self.wait();
        }
    }

    /// Arrives at the grid barrier, and shows the other CTAs all that this one wrote. The CTA's consumers have
    /// synchronised when it returns.
    ///
    /// # Safety
    /// What the CTA has to show is written. [`wait`](Self::wait) or [`wait_for_all`](Self::wait_for_all) follows, once.
    #[device]
    unsafe fn arrive(&self) {
        // SAFETY: the caller's word.
        unsafe {
            sync();
            // Read again, here and wherever else one thread acts for the CTA: kept over the whole step, the thread's
            // number would take a register from the GEMMs.
            if thread::opaque(thread::thread_idx_x()) == 0 {
                atomic::fetch_add(self.p.counters, 0, 1, Ordering::Release, Scope::Device);
            }
        }
    }

    /// [`wait_for_all`](Self::wait_for_all), and a mark in the trace.
    #[device]
    pub(super) unsafe fn wait(&self) {
        // SAFETY: the caller's word.
        unsafe {
            self.wait_for_all();
            self.mark(Mark::GridBarrier);
        }
    }

    /// Waits until every CTA has arrived.
    ///
    /// # Safety
    /// The CTA has [arrived](Self::arrive) once since it last waited, and so will every other CTA.
    #[device]
    unsafe fn wait_for_all(&self) {
        // SAFETY: the caller's word.
        unsafe {
            if thread::opaque(thread::thread_idx_x()) == 0 {
                let arrivals = shared::dynamic::<u32>(ARRIVALS);
                let all = arrivals.load(0) + thread::grid_dim_x();
                arrivals.store(0, all);
                waiting::long_for_count(self.p.counters, 0, all);
            }
            sync();
        }
    }

    /// The embedding of every row, spread over the grid.
    #[device]
    unsafe fn embed<const ONE: bool>(&self) {
        // SAFETY: the caller's word.
        unsafe {
            let p = self.p;
            if p.eagle.is_wanted() {
                return;
            }
            let norm = p.input_norm(0);
            let embed = p.work.embed(norm);
            let grid = self.grid;
            cuda_std::assume(grid > 0);
            let stride = grid * WARPS * 32;
            let mut row = 0;
            while row < self.count {
                // Each row begins at another CTA, so that rows spread over the grid.
                let block = (thread::block_idx_x() + row * (p.work.residual.dim / (WARPS * 32))) % grid;
                let first = block * (WARPS * 32);
                // A CTA that makes none of a row's elements does not wait for its token.
                if first < p.work.residual.dim {
                    let first = first + thread::thread_idx_x();
                    if ONE {
                        embed_each(&embed, row, first, stride, |weight, i, x| self.put_words(0, i, weight, x, true));
                    } else {
                        embed_each(&embed, row, first, stride, |weight, i, x| {
                            embed.residual.put_at(weight, row, i, element_at(row, i), x, true);
                        });
                    }
                    if p.taps.are_wanted() {
                        let at = (self.sequence(row), self.slot(row));
                        embed_each(&embed, row, first, stride, |_, i, x| p.taps.put(at, 0, i, x));
                    }
                }
                row += 1;
            }
        }
    }

    /// This CTA's part of the next wave, over the matrix at `index` from `first_n_tile` on.
    #[device]
    fn part(&mut self, index: u32, first_n_tile: u32) -> Part {
        let matrix = self.p.matrix(index);
        // SAFETY: stored before the roles parted, and there is no consumer before that.
        let problem = unsafe { Problem::load(matrix) };
        let (place, most) = (self.place, N_TILES * self.grid);
        let Problem { n_tiles, each, more, .. } = problem;
        let (mine, end) = if n_tiles - first_n_tile > most {
            (N_TILES, first_n_tile + most)
        } else {
            self.place = if place >= more { place - more } else { place + self.grid - more };
            (each + u32::from(place < more), n_tiles)
        };
        Part { matrix, index, problem, first_n_tile, end, place, mine }
    }
}

/// How consumers multiply weights of a format.
pub trait Products<F: WeightFormat> {
    /// Runs the GEMM of one row and its epilogue, over all waves of a matrix. `part` is the CTA's part of the first
    /// wave.
    ///
    /// # Safety
    /// All consumers call it. The step has one row. `part` is the CTA's part of a matrix's first wave, and the ring is
    /// where the part's chunks begin, in weights of the format `F`.
    unsafe fn of_one<const ROWS: u8, const SHORT: bool>(consumer: &mut Consumer<'_, ROWS, SHORT>, part: Part);

    /// As [`of_one`](Self::of_one), for up to `TILES` times 8 rows. It waits until all CTAs have arrived with the
    /// input. `old` is what the first outputs are added to.
    ///
    /// # Safety
    /// As for [`of_one`](Self::of_one), of at most `TILES` times 8 rows. The CTA has [arrived](Consumer::arrive). `old`
    /// is what the part's [first outputs](Consumer::first_addends) are added to.
    unsafe fn of_some<const ROWS: u8, const SHORT: bool, const TILES: usize>(
        consumer: &mut Consumer<'_, ROWS, SHORT>,
        part: Part,
        old: [Addend; 2],
    );
}

/// Products of fragments in registers.
pub struct OfFragments;

impl<F: FragmentFormat> Products<F> for OfFragments {
    #[device]
    unsafe fn of_one<const ROWS: u8, const SHORT: bool>(consumer: &mut Consumer<'_, ROWS, SHORT>, part: Part) {
        // SAFETY: the caller's word.
        unsafe { consumer.gemm_of_one::<F>(part) }
    }

    #[device]
    unsafe fn of_some<const ROWS: u8, const SHORT: bool, const TILES: usize>(
        consumer: &mut Consumer<'_, ROWS, SHORT>,
        part: Part,
        old: [Addend; 2],
    ) {
        // SAFETY: the caller's word.
        unsafe { consumer.gemm::<F, TILES>(part, old) }
    }
}

/// A CTA's part of a wave.
#[derive(Clone, Copy)]
pub struct Part {
    matrix: Matrix,
    /// The matrix's place in the stream.
    index: u32,
    problem: Problem,
    /// The wave's first N-tile, and one beyond its last.
    first_n_tile: u32,
    end: u32,
    /// The CTA's place in the rotation.
    place: u32,
    /// The CTA's N-tiles in the wave.
    mine: u32,
}

impl Part {
    /// Whether this is the matrix's last wave.
    #[device]
    const fn is_last(&self) -> bool {
        self.end == self.problem.n_tiles
    }
}
