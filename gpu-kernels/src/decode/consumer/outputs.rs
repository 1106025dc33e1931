//! The epilogues of the decode kernel's GEMMs.
//!
//! An epilogue begins when a part's split-K partials are in scratch memory. (The GEMMs of e4m3 leave one sum for each
//! output.) A lane adds those of one output, multiplies the sum by the format's
//! [scale](crate::weights::FragmentFormat::scale), and calls [`put`](Consumer::put). `f` is the row's norm factor, 1 if
//! the input has no norm; `w` is the weight of the norm that comes next:
//!
//! | matrix | result | one row: as words of this kind | several rows: memory |
//! |---|---|---|---|
//! | QKV | `sum · f + bias`, f32 | [`Heads`](WordKind::Heads) | [`qkv`](crate::workspace::Workspace::qkv) |
//! | output, down | `x += sum`, f32 | [`Residual`](WordKind::Residual) | [`x`](crate::norm::Residual::x) |
//! | | `x · w`, bf16 | [`Scaled`](WordKind::Scaled) | [`scaled`](crate::norm::Residual::scaled) |
//! | | `Σ x²` of an N-tile | [`Squares`](WordKind::Squares) | [`squares`](crate::norm::Residual::squares) |
//! | gate-up | `swiglu(gate · f, up · f)`, bf16 | [`Activation`](WordKind::Activation) | [`activation`] |
//! | head | `sum · f`, f32 | none: as with several rows | [`logits`](super::super::DecodeStep::logits) |
//! | | largest [`rank`] of an N-tile | none: as with several rows | shared memory, [`BEST`] |
//!
//! Down also keeps `x` in [taps](crate::eagle::Taps), and for a drafting head's next pass, where they are wanted. What
//! a GEMM of several rows reads (`scaled`, `activation`) is in the layout of [`activations`](crate::activations).
//!
//! The outputs of a part count from 0 on, features fastest, then rows, then N-tiles. Thread `i` of the consumers has
//! outputs `i`, `i + 256` and so on. An N-tile has 16 outputs a row, of gate-up 8: feature `e` is the gate of the
//! N-tile's row `e` of weights, and its up is row `e + 8`. So the 16 lanes of half a warp hold an N-tile of the
//! residual, and add its squares by shuffles.
//!
//! [`activation`]: crate::workspace::Workspace::activation
//!
//! # Safety
//! `p` is a launch's parameter block. All lanes of a consumer warp call what is unsafe here, neighbouring lanes with
//! neighbouring outputs of the same part, since the lanes of an N-tile exchange values. Each output is one lane's in
//! the whole grid. Others have written and shown before what an output is added to, and nobody but that lane writes it
//! in this matrix.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{bf16, device, math, shared, thread, warp};

use super::super::{BEST, FACTORS, Matrix, WARPS};
use super::{Consumer, Part, one};
use crate::activations::element_at;
use crate::attention::Divisor;
use crate::exchange::{Word, WordKind};
use crate::gate::swiglu;
use crate::kv::HEAD_DIM;
use crate::linear::N_TILE;
use crate::norm::n_tile_squares;
use crate::sample::rank;

/// The outputs of a part, by N-tile, row and feature.
pub struct Outputs {
    /// Output features of an N-tile, a power of two.
    pub width_log2: u32,
    rows: Divisor,
    pub total: u32,
    /// The first N-tile's place in its matrix. The others follow, `grid` apart.
    place: u32,
    grid: u32,
}

impl Outputs {
    /// The `e`-th output.
    #[device]
    pub fn at(&self, e: u32) -> Output {
        let valid = e < self.total;
        let rest = if valid { e >> self.width_log2 } else { 0 };
        let feature = e & !(!0 << self.width_log2);
        let (n_tile, row) = self.rows.divide(rest);
        Output { row, n_tile, feature: ((self.place + n_tile * self.grid) << self.width_log2) + feature, valid }
    }
}

/// What a sum is added to: an element of the residual with its weight in the next norm, or a bias.
#[derive(Clone, Copy, Default)]
pub struct Addend {
    x: f32,
    /// In a step of one row: the residual's element as a word, instead of `x`.
    pub word: Word,
    pub weight: bf16,
}

/// One output of a part.
#[derive(Clone, Copy, Default)]
pub struct Output {
    pub row: u32,
    /// Which N-tile of the part it is in.
    pub n_tile: u32,
    pub feature: u32,
    /// Whether there is such an output.
    pub valid: bool,
}

/// This lane's value and the next lane's in one word. Only even lanes have a use for it.
#[device]
fn pair_with_next(x: bf16) -> u32 {
    let x = u32::from(x.to_bits());
    x | warp::shuffle_xor(x, 1) << 16
}

impl<const ROWS: u8, const SHORT: bool> Consumer<'_, ROWS, SHORT> {
    /// The outputs of a part.
    #[device]
    pub(super) fn outputs(&self, part: &Part) -> Outputs {
        // By arithmetic: a choice of two numbers the compiler would look up in memory.
        let width_log2 = N_TILE.ilog2() - u32::from(part.matrix == Matrix::GateUp);
        let total = (part.mine * self.count) << width_log2;
        let place = part.first_n_tile + part.place;
        Outputs { width_log2, rows: self.rows, total, place, grid: self.grid }
    }

    /// What this lane's first two outputs of a part are added to.
    #[device]
    pub(super) unsafe fn first_addends(&self, part: &Part) -> [Addend; 2] {
        let (outputs, thread) = (self.outputs(part), thread::opaque(thread::thread_idx_x()));
        let [first, second] = [0, WARPS * 32].map(|i| outputs.at(thread + i));
        // SAFETY: the caller's word.
        unsafe { [self.addend::<false>(part, &first), self.addend::<false>(part, &second)] }
    }

    /// What an output is added to: an element of the residual, or a bias. Other outputs are added to nothing.
    #[device]
    pub(super) unsafe fn addend<const ONE: bool>(&self, part: &Part, output: &Output) -> Addend {
        // SAFETY: the caller's word.
        unsafe {
            let p = self.p;
            if !output.valid {
                return Addend::default();
            }
            let norm = match part.matrix {
                Matrix::Output => p.post_attention_norm(part.index / 4),
                Matrix::Down => p.input_norm(part.index / 4 + 1),
                Matrix::Qkv => {
                    // Adding -0 changes no bit.
                    let mut x = -0.0;
                    if !p.biases.is_null() {
                        let heads = (p.work.q_heads + 2 * p.work.kv_heads) * HEAD_DIM;
                        let bias = p.biases.load_nc((part.index / 4 * heads + output.feature) as usize);
                        x = math::from_bf16(bias);
                    }
                    return Addend { x, ..Addend::default() };
                }
                _ => return Addend::default(),
            };
            let weight = norm.load_nc(output.feature as usize);
            if ONE {
                Addend { word: self.added_to(part.index).ask(output.feature), weight, ..Addend::default() }
            } else {
                let x = p.work.residual.x.load((output.row * p.work.residual.dim + output.feature) as usize);
                Addend { x, weight, ..Addend::default() }
            }
        }
    }

    /// Writes an element of the residual as words, as [`Residual::put`](crate::norm::Residual::put) does in memory.
    /// `stage` is the index of the matrix that reads the words.
    ///
    /// # Safety
    /// `element` is the lane's number modulo 16, plus a multiple of 16, even if it is not `valid`. If it is valid, it
    /// is below the hidden size, and no other lane puts it for this `stage`.
    #[device]
    pub(super) unsafe fn put_words(&self, stage: u32, element: u32, weight: bf16, x: f32, valid: bool) {
        // SAFETY: the caller's word.
        unsafe {
            // Lanes exchange values before any condition: behind one, the assembler would have them do it apart. The
            // weight is used only from here on: earlier the warp would wait for it.
            let weight = bf16::from_bits(thread::opaque(weight.to_bits().into()) as u16);
            let scaled = pair_with_next(math::to_bf16(x * math::from_bf16(weight)));
            let squares = n_tile_squares(x);
            if valid {
                if element.is_multiple_of(2) {
                    self.taken_in(WordKind::Scaled, stage).put(element / 2, scaled);
                }
                self.taken_in(WordKind::Residual, stage).put(element, x.to_bits());
                if element.is_multiple_of(N_TILE) {
                    self.taken_in(WordKind::Squares, stage).put(element / N_TILE, squares.to_bits());
                }
            }
        }
    }

    /// Puts one output where it belongs. `up` gives the sum of the up feature that goes with a gate.
    ///
    /// # Safety
    /// `sum` is complete, and `up` gives that of the output's partner. The factors of the part's rows are in shared
    /// memory, and the consumers have synchronised since. `old` is the output's [addend](Self::addend).
    #[device]
    pub(super) unsafe fn put<const ONE: bool>(
        &self,
        part: &Part,
        output: &Output,
        sum: f32,
        old: Addend,
        up: impl Fn() -> f32,
    ) {
        // SAFETY: the caller's word.
        unsafe {
            let place = if ONE { one::factor_place(part.matrix) } else { output.row as usize };
            let factor = || shared::dynamic::<f32>(FACTORS).load(place);
            if !ONE {
                return match part.matrix {
                    Matrix::Qkv => self.put_head::<ONE>(part, output, sum * factor() + old.x),
                    Matrix::Output | Matrix::Down => self.put_residual::<ONE>(part, output, sum, old),
                    Matrix::GateUp => self.put_activation::<ONE>(part, output, || [sum * factor(), up() * factor()]),
                    Matrix::Head => self.put_logit(output, sum * factor()),
                };
            }
            // Branches one after the other: a jump table would take a warp longer, and others wait for it.
            if part.matrix.is_added() {
                self.put_residual::<ONE>(part, output, sum, old);
            } else if part.matrix == Matrix::GateUp {
                self.put_activation::<ONE>(part, output, || [sum * factor(), up() * factor()]);
            } else if part.matrix == Matrix::Qkv {
                self.put_head::<ONE>(part, output, sum * factor() + old.x);
            } else {
                self.put_logit(output, sum * factor());
            }
        }
    }

    /// Puts out an element of the queries, keys and values.
    #[device]
    unsafe fn put_head<const ONE: bool>(&self, part: &Part, &Output { row, feature, valid, .. }: &Output, x: f32) {
        // SAFETY: the caller's word.
        unsafe {
            if ONE && valid {
                self.put_out(WordKind::Heads, part.index).put(feature, x.to_bits());
            } else if valid {
                let heads = (self.p.work.q_heads + 2 * self.p.work.kv_heads) * HEAD_DIM;
                self.p.work.qkv.store((row * heads + feature) as usize, x);
            }
        }
    }

    /// Adds a sum to an element of the residual, and puts out the result.
    #[device]
    unsafe fn put_residual<const ONE: bool>(&self, part: &Part, output: &Output, sum: f32, old: Addend) {
        // SAFETY: the caller's word.
        unsafe {
            let p = self.p;
            let &Output { row, feature, valid, .. } = output;
            let x = if ONE {
                let mut word = [if valid { old.word } else { self.added_to(part.index).nothing() }];
                self.added_to(part.index).settle(&mut word, |_| feature);
                let x = f32::from_bits(word[0].bits()) + sum;
                self.put_words(part.index + 1, feature, old.weight, x, valid);
                x
            } else {
                let x = old.x + sum;
                p.work.residual.put_at(old.weight, row, feature, element_at(row, feature), x, valid);
                x
            };
            if valid && part.matrix == Matrix::Down {
                if p.taps.are_wanted() {
                    p.taps.put((self.sequence(row), self.slot(row)), part.index / 4 + 1, feature, x);
                }
                if p.eagle.is_wanted() && self.is_last_of_sequence(row) {
                    let at = self.sequence(row) * p.work.residual.dim + feature;
                    p.eagle.own.store(at as usize, x);
                }
            }
        }
    }

    /// Puts out the activation of a gate and its up.
    #[device]
    unsafe fn put_activation<const ONE: bool>(&self, part: &Part, output: &Output, both: impl Fn() -> [f32; 2]) {
        let product = || {
            let [gate, up] = both();
            math::to_bf16(swiglu(gate, up))
        };
        // SAFETY: the caller's word.
        unsafe {
            let p = self.p;
            let &Output { row, feature, valid, .. } = output;
            let valid = valid && feature < p.intermediate;
            if ONE {
                // Lanes exchange values before any condition, as for the residual.
                let product = product();
                let word = pair_with_next(if valid { product } else { bf16::from_bits(0) });
                if valid && feature.is_multiple_of(2) {
                    self.put_out(WordKind::Activation, part.index).put(feature / 2, word);
                }
            } else if valid {
                p.work.activation.store(element_at(row, feature), product());
            }
        }
    }

    /// Puts out a logit.
    #[device]
    unsafe fn put_logit(&self, output: &Output, logit: f32) {
        // SAFETY: the caller's word.
        unsafe {
            let p = self.p;
            let &Output { row, feature, .. } = output;
            let valid = output.valid && feature < p.work.vocab;
            if valid {
                p.logits.store(row as usize * p.work.vocab as usize + feature as usize, logit);
            }
            let mut best = if valid { rank(logit, feature) } else { 0 };
            let mut mask = N_TILE / 2;
            while mask > 0 {
                best = best.max(warp::shuffle_xor(best, mask));
                mask /= 2;
            }
            if output.valid && feature.is_multiple_of(N_TILE) {
                let bests = shared::dynamic::<u64>(BEST);
                atomic::fetch_max(bests, row as usize, best, Ordering::Relaxed, Scope::Block);
            }
        }
    }
}
