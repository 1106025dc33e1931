//! What an EAGLE-3 head needs beside the kernels of other models: it takes hidden states of the model that it drafts
//! for, and makes its rows of them. `model::CpuEagle` shows what a head computes.
//!
//! ```text
//! the model's pass    take_states behind three of its layers ─► states, by position
//! the head's first    gather_states ─► fc ─► make_pairs ─► its layer and its output head
//! the head's others   make_pairs of the state that was kept ─► the same
//! ```
//!
//! From Hopper on, the head's layer and output head are [one launch](crate::decode), which keeps the state by itself.
//! On other cards they are separate launches as for any layer, followed by `keep_state`.
//!
//! # Safety
//! A function that is not a kernel is a part of one: `self` is of the kernel's parameter block, whose addresses are as
//! that says. One lane puts each element. Nobody reads it before the launch ends or, if it is a word of the exchange,
//! before that has its sequence flag.

use cuda_std::{Global, GlobalMut, bf16, device, kernel, math, shared, thread};

use crate::activations::element_at;
use crate::exchange::{Exchange, WordKind};
use crate::norm::warp_sum;
use crate::step::{Rows, wait_for_launches};

/// Hidden states that a head takes of each token.
pub const STATES: u32 = 3;
/// Threads of a CTA.
const THREADS: u32 = 256;

/// Hidden states of the last [`slots`](Self::slots) positions of some sequences.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct States {
    /// `[sequences, slots, 3, dim]`: the hidden states of a sequence's position `p` are at slot `p % slots`.
    pub states: GlobalMut<bf16>,
    /// Positions of a sequence that there is room for.
    pub slots: u32,
    /// Hidden size.
    pub dim: u32,
    /// Sequences that there is room for, the first ones.
    pub sequences: u32,
}

impl States {
    /// Where the hidden states of a sequence's position begin.
    ///
    /// # Safety
    /// There is memory for so many slots, and for this sequence.
    #[device]
    pub(crate) unsafe fn of(&self, sequence: u32, position: u32) -> GlobalMut<bf16> {
        // SAFETY: the caller's word.
        unsafe {
            cuda_std::assume(self.slots > 0);
            let slot = sequence * self.slots + position % self.slots;
            self.states.at(slot as usize * (STATES * self.dim) as usize)
        }
    }
}

/// Which hidden states a pass leaves, and where.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Taps {
    /// Where they go; null where none are wanted.
    pub to: States,
    /// For each of the three hidden states: after how many layers the residual stream is that state.
    pub after: [u32; STATES as usize],
}

impl Taps {
    /// Whether any are wanted.
    #[device]
    pub(crate) const fn are_wanted(&self) -> bool {
        !self.to.states.is_null()
    }

    /// Stores an element of the residual stream of a sequence's position after this many `layers`, if that is one of
    /// the three hidden states and there is room for the sequence.
    ///
    /// # Safety
    /// Hidden states are [wanted](Self::are_wanted), and `element` is below their hidden size. No other row of the pass
    /// has the position's slot.
    #[device]
    pub(crate) unsafe fn put(&self, (sequence, position): (u32, u32), layers: u32, element: u32, x: f32) {
        // SAFETY: the caller's word.
        unsafe {
            unroll!(I < 3; {
                if self.after[I] == layers && sequence < self.to.sequences {
                    let to = self.to.of(sequence, position).at(I * self.to.dim as usize);
                    to.store(element as usize, math::to_bf16(x));
                }
            });
        }
    }
}

/// Parameters of [`take_states`]. Grid: (1, rows).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct TakeStates {
    /// The rows of this pass: those of a sequence lie together, at consecutive positions.
    pub rows: Rows,
    /// `[rows, dim]` the residual stream.
    pub x: Global<f32>,
    /// Written, rounded to bf16.
    pub to: States,
    /// Which of the three hidden states it is.
    pub place: u32,
}

/// Copies the residual stream of each sequence's last rows to the slots of their positions. Sequences that there is no
/// room for are left out, and so are rows whose slot a later row of the pass takes.
#[kernel(threads = 256)]
pub unsafe fn take_states(p: TakeStates) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (row, dim, count) = (thread::block_idx_y(), p.to.dim, p.rows.count.load(0));
        if row >= count {
            return;
        }
        let sequence = p.rows.sequences.load(row as usize);
        // Whether a later row of this pass takes this row's slot.
        let later = row + p.to.slots;
        let is_old = later < count && p.rows.sequences.load(later as usize) == sequence;
        if is_old || sequence >= p.to.sequences {
            return;
        }
        let x = p.x.at(row as usize * dim as usize);
        let to = p.to.of(sequence, p.rows.positions.load(row as usize)).at((p.place * dim) as usize);
        let mut i = thread::thread_idx_x();
        while i < dim {
            to.store(i as usize, math::to_bf16(x.load(i as usize)));
            i += THREADS;
        }
    }
}

/// Parameters of [`gather_states`]. Grid: ([`blocks`](Self::blocks), rows).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct GatherStates {
    /// The head's rows.
    pub rows: Rows,
    /// The model's hidden states.
    pub from: States,
    /// `[rows, 3 · dim]`, written.
    pub to: GlobalMut<bf16>,
}

impl GatherStates {
    /// Elements of a thread.
    const EACH: u32 = 8;

    /// CTAs of a row, for a hidden size that is a multiple of 8.
    pub const fn blocks(dim: u32) -> u32 {
        (STATES * dim).div_ceil(THREADS * Self::EACH)
    }
}

/// Gathers the three hidden states of each row's position side by side, for a GEMM.
#[kernel(threads = 256)]
pub unsafe fn gather_states(p: GatherStates) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (row, len) = (thread::block_idx_y(), STATES * p.from.dim);
        if row >= p.rows.count.load(0) {
            return;
        }
        let from = p.from.of(p.rows.sequences.load(row as usize), p.rows.positions.load(row as usize));
        let to = p.to.at(row as usize * len as usize);
        let i = (thread::block_idx_x() * THREADS + thread::thread_idx_x()) * GatherStates::EACH;
        if i < len {
            to.store16(i as usize, from.load16(i as usize));
        }
    }
}

/// What a pass of a head in [one launch](crate::decode) begins with, and what it leaves.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct EagleStep {
    /// As [`MakePairs::pairs`]; null in a model's steps. With one row they are among the
    /// [exchange](MakePairs::exchange)'s words instead.
    pub pairs: Global<bf16>,
    /// As [`KeepState::to`].
    pub own: GlobalMut<f32>,
}

impl EagleStep {
    /// Whether this is a pass of a head.
    #[device]
    pub(crate) const fn is_wanted(&self) -> bool {
        !self.own.is_null()
    }
}

/// Parameters of [`make_pairs`]. Grid: (1, rows). Shared memory: [`MakePairs::SHARED_BYTES`]. It may be launched early
/// ([`dependent_launch`](cuda_std::dependent_launch)).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct MakePairs {
    /// The head's rows.
    pub rows: Rows,
    /// `[rows, dim]` what `fc` made of the model's hidden states; or `[sequences, dim]` the head's own hidden states.
    pub hidden: Global<f32>,
    /// `[vocab, dim]` the embedding.
    pub embed: Global<bf16>,
    /// `[dim]` the weight of the embedding's norm.
    pub input_norm: Global<bf16>,
    /// `[dim]` the weight of the hidden state's norm.
    pub hidden_norm: Global<bf16>,
    /// `[rows, 2 · dim]`, written: the embedding, then the hidden state, both normed. For a pass in one launch they are
    /// in the order in which [it reads](crate::activations) them, with room for all rows that such a pass may have.
    pub pairs: GlobalMut<bf16>,
    /// `[rows, dim]`, written: the residual stream.
    pub x: GlobalMut<f32>,
    /// Where a single row goes instead, for a pass in one launch; null for a pass of several launches.
    pub exchange: Exchange,
    /// Rows of the embedding; a token beyond it (a bug) reads its last row rather than other memory.
    pub vocab: u32,
    /// Hidden size, a multiple of 4.
    pub dim: u32,
    /// Added to means of squares.
    pub eps: f32,
    /// 1 if the residual stream begins with the normed hidden state, 0 if with the hidden state.
    pub norm_before_residual: u32,
    /// 1 if [`hidden`](Self::hidden) has the head's own states, else 0.
    pub own: u32,
    /// 1 for a pass in one launch.
    pub for_decode: u32,
}

impl MakePairs {
    const THREADS: u32 = 512;
    const WARPS: u32 = Self::THREADS / 32;
    /// Elements that the CTA takes at a time.
    const STRIDE: u32 = 4 * Self::THREADS;
    /// Turns of the CTA whose elements threads keep in registers: all of them for hidden sizes up to 4,096.
    const KEPT: usize = 2;
    /// Dynamic shared memory: two sums of each warp.
    pub const SHARED_BYTES: u32 = 2 * Self::WARPS * 4;

    /// Puts four elements of a row's pairs, from the `i`-th on; and if there is an `x`, the four elements of the
    /// residual stream that are made beside them.
    ///
    /// # Safety
    /// There is such a row, `i` is a multiple of 4 below twice the hidden size, and `x` is there only if `i` is at
    /// least the hidden size. With `one_row` there is an exchange.
    #[device]
    unsafe fn put(&self, one_row: bool, row: u32, i: u32, pairs: [u32; 2], x: Option<[f32; 4]>) {
        // SAFETY: the caller's word.
        unsafe {
            if one_row {
                let to = self.exchange.words(WordKind::Pairs, self.exchange.first_flag());
                to.put(i / 2, pairs[0]);
                to.put(i / 2 + 1, pairs[1]);
                if let Some(x) = x {
                    let to = self.exchange.words(WordKind::Residual, self.exchange.first_flag());
                    unroll!(K < 4; {
                        to.put(i - self.dim + K as u32, x[K].to_bits());
                    });
                }
                return;
            }
            let tiled = self.for_decode != 0;
            let at = if tiled { element_at(row, i) } else { (row * 2 * self.dim + i) as usize };
            self.pairs.at(at).cast::<[u32; 2]>().store(0, pairs);
            let (row, i, dim) = (row as usize, i as usize, self.dim as usize);
            if let Some(x) = x {
                self.x.store16(row * dim + i - dim, x.map(f32::to_bits));
            }
        }
    }
}

/// Makes what the projections of the head's layer read, from every row's token and hidden state.
#[kernel(threads = 512)]
pub unsafe fn make_pairs(p: MakePairs) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (row, dim) = (thread::block_idx_y(), p.dim);
        let first = thread::thread_idx_x() * 4;
        // No launch writes the norms' weights, so they are loaded while the launches ahead end.
        let words = |from: Global<bf16>, i: u32| from.at(i as usize).cast::<[u32; 2]>().load(0);
        let norms = |i: u32| [words(p.input_norm, i), words(p.hidden_norm, i)];
        let mut kept_norms = [[[0; 2]; 2]; MakePairs::KEPT];
        unroll!(C < (MakePairs::KEPT) of 2; {
            let i = first + C as u32 * MakePairs::STRIDE;
            if i < dim {
                kept_norms[C] = norms(i);
            }
        });
        wait_for_launches();
        let count = p.rows.count.load(0);
        if row >= count {
            return;
        }
        let one_row = count == 1 && p.exchange.is_there();
        let token = p.rows.tokens.load(row as usize).min(p.vocab - 1);
        let embed = p.embed.at(token as usize * dim as usize);
        let hidden = if p.own != 0 { p.rows.sequences.load(row as usize) } else { row };
        let hidden = p.hidden.at(hidden as usize * dim as usize);
        let four = |words: [u32; 2]| {
            let [low, high] = words.map(math::unpack_bf16);
            [low[0], low[1], high[0], high[1]]
        };
        let both = |i: u32| [four(words(embed, i)), hidden.load16(i as usize).map(f32::from_bits)];
        let mut squares = [0f32; 2];
        let mut square = |numbers: [[f32; 4]; 2]| {
            unroll!(W < 2; {
                unroll!(K < 4; {
                    squares[W] += numbers[W][K] * numbers[W][K];
                });
            });
        };
        let mut kept = [[[0f32; 4]; 2]; MakePairs::KEPT];
        unroll!(C < (MakePairs::KEPT) of 2; {
            let i = first + C as u32 * MakePairs::STRIDE;
            if i < dim {
                kept[C] = both(i);
            }
        });
        unroll!(C < (MakePairs::KEPT) of 2; {
            square(kept[C]);
        });
        let mut i = first + MakePairs::KEPT as u32 * MakePairs::STRIDE;
        while i < dim {
            square(both(i));
            i += MakePairs::STRIDE;
        }
        let sums = shared::dynamic::<f32>(0);
        let own = [warp_sum(squares[0]), warp_sum(squares[1])];
        if thread::lane_id() == 0 {
            sums.store(thread::warp_id() as usize, own[0]);
            sums.store((MakePairs::WARPS + thread::warp_id()) as usize, own[1]);
        }
        thread::sync_threads();
        let mut totals = [0f32; 2];
        let mut warp = 0;
        while warp < MakePairs::WARPS {
            totals[0] += sums.load(warp as usize);
            totals[1] += sums.load((MakePairs::WARPS + warp) as usize);
            warp += 1;
        }
        let factors = totals.map(|total| 1.0 / math::sqrt(total / dim as f32 + p.eps));
        let put = |i: u32, [e, h]: [[f32; 4]; 2], [of_embed, of_hidden]: [[u32; 2]; 2]| {
            let normed =
                |x: [f32; 4], factor: f32, weights: [f32; 4]| [0, 1, 2, 3].map(|k: usize| x[k] * factor * weights[k]);
            let (e, normed) = (normed(e, factors[0], four(of_embed)), normed(h, factors[1], four(of_hidden)));
            let packed = |x: [f32; 4]| [math::pack_bf16(x[0], x[1]), math::pack_bf16(x[2], x[3])];
            p.put(one_row, row, i, packed(e), None);
            p.put(one_row, row, dim + i, packed(normed), Some(if p.norm_before_residual != 0 { normed } else { h }));
        };
        unroll!(C < (MakePairs::KEPT) of 2; {
            let i = first + C as u32 * MakePairs::STRIDE;
            if i < dim {
                put(i, kept[C], kept_norms[C]);
            }
        });
        let mut i = first + MakePairs::KEPT as u32 * MakePairs::STRIDE;
        while i < dim {
            put(i, both(i), norms(i));
            i += MakePairs::STRIDE;
        }
    }
}

/// Parameters of [`keep_state`]. Grid: (1, rows).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct KeepState {
    /// The rows of the head's pass that has run.
    pub rows: Rows,
    /// `[rows, dim]` its residual stream.
    pub x: Global<f32>,
    /// `[sequences, dim]`, written for those that had rows.
    pub to: GlobalMut<f32>,
    /// Hidden size.
    pub dim: u32,
}

/// Keeps the head's own hidden state of the last row of each sequence, from which the row after it starts.
#[kernel(threads = 256)]
pub unsafe fn keep_state(p: KeepState) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (row, rows) = (thread::block_idx_y(), p.rows.count.load(0));
        if row >= rows {
            return;
        }
        let sequence = p.rows.sequences.load(row as usize);
        if row + 1 < rows && p.rows.sequences.load(row as usize + 1) == sequence {
            return;
        }
        let (x, to) = (p.x.at(row as usize * p.dim as usize), p.to.at(sequence as usize * p.dim as usize));
        let mut i = thread::thread_idx_x();
        while i < p.dim {
            to.store(i as usize, x.load(i as usize));
            i += THREADS;
        }
    }
}
