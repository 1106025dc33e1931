//! How activations go from block to block in a step of one row: as words that carry a sequence flag.
//!
//! A word has 8 bytes, which are written and read at once: four of data, and a sequence flag. A warp that needs a word
//! reads it until it has the flag that the warp waits for. So no warp counts arrivals, waits for stores to be done, or
//! reads data again after a counter; and none waits for data that it does not need, such as a head for the other heads.
//! (NCCL's protocol "LL" sends messages between cards like this.)
//!
//! # Why no word is overwritten too early
//! Flags grow from matrix to matrix and from step to step, and a word is read with one flag alone. A reader that missed
//! it would wait, and the bounded wait would end the launch. No reader misses one. Each kind has one place, written
//! once or twice a layer:
//!
//! - Attention puts out what the output projection's blocks need, all of it, and needs all that QKV put out. So once
//!   any block has an output N-tile done, every block has read what it needed of QKV's input, every unit of attention
//!   its heads, and who adds a head's splits their parts. The scaled residual and its squares are written anew only
//!   then, the heads and the parts in the next layer.
//! - Likewise gate and up need every output N-tile, and down needs every activation: once any block has an N-tile of
//!   down done, nobody reads the output projection's input or results any more; once any has QKV's next, nobody reads
//!   activations.
//! - An element of the residual is read, and then overwritten, by the same lane.
//!
//! Between steps, launches end.
//!
//! # Safety
//! Words are in live memory, as many as their `len` says; they were zero before the first step, and only what is here
//! has written them since. One lane puts or asks for a word; a whole warp settles. A word is put once with a flag, by
//! one lane, in a launch before or by a block that runs beside those that wait for it.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{GlobalMut, thread, warp};

use crate::kv::HEAD_DIM;
use crate::linear::N_TILE;
use crate::waiting;

/// Nanoseconds until many words are asked for again: they are as much as memory brings of weights meanwhile.
const PAUSE: u32 = 100;

/// What is exchanged.
#[derive(Clone, Copy)]
pub(crate) enum WordKind {
    /// `[hidden]`: elements of the residual stream.
    Residual,
    /// `[hidden / 2]`: pairs of the residual's elements, each times its weight in the norm that comes next, as bf16.
    Scaled,
    /// `[hidden / N_TILE]`: sums of squares of an N-tile of the residual.
    Squares,
    /// `[(q_heads + 2 · kv_heads) · 128]`: queries, keys and values as the projection leaves them.
    Heads,
    /// `[q_heads · 64]`: pairs of what attention found, as bf16.
    Attended,
    /// `[intermediate / 2]`: pairs of activations, as bf16.
    Activation,
    /// `[hidden]`: pairs of what the projections of an [EAGLE-3 head](crate::eagle) read, as bf16; a model has none.
    Pairs,
    /// `[q_heads, splits · (128 + 2)]`: of each head, its splits' sums of values, `[split][dimension]`, then their
    /// maxima and normalisers, `[split][2]`: see [`Attend::sums`](crate::attention::Attend::sums).
    Parts,
}

/// What an [`Exchange`] is for.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeSizes {
    /// Elements of a row of the residual stream.
    pub hidden: u32,
    /// Activations of a row.
    pub intermediate: u32,
    /// Query heads.
    pub q_heads: u32,
    /// Key-value heads.
    pub kv_heads: u32,
    /// Pairs of elements that the projections of an [EAGLE-3 head](crate::eagle) read; 0 for a model.
    pub pairs: u32,
    /// Splits of the longest context, as [`Attend::splits`](crate::attention::Attend::splits).
    pub splits: u32,
}

/// Where the words are. Plain data; a part of [`DecodeStep`](crate::decode::DecodeStep).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
pub struct Exchange {
    /// How many sequence flags were used up, then the words of each kind.
    all: GlobalMut<u64>,
    kinds: [Place; 8],
    count: u32,
}

/// The words of one kind.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, cuda_std::Layout)]
struct Place {
    first: GlobalMut<u64>,
    len: u32,
}

impl Exchange {
    /// Words in memory from `all` on, zero before the first step and then left alone, for a model of these sizes; and
    /// how many they are.
    pub fn new(all: GlobalMut<u64>, sizes: ExchangeSizes) -> (Self, usize) {
        let ExchangeSizes { hidden, intermediate, q_heads, kv_heads, pairs, splits } = sizes;
        let heads = (q_heads + 2 * kv_heads) * HEAD_DIM;
        let parts = q_heads * splits * (HEAD_DIM + 2);
        // As `WordKind` has them.
        let words =
            [hidden, hidden / 2, hidden / N_TILE, heads, q_heads * HEAD_DIM / 2, intermediate / 2, pairs, parts];
        let mut count = 1;
        let kinds = words.map(|len| {
            // SAFETY: addresses alone. Before anything is read there, the caller knows how much memory they take.
            let first = unsafe { all.at(count as usize) };
            count += len;
            Place { first, len }
        });
        (Self { all, kinds, count }, count as usize)
    }

    /// Whether there is one.
    #[inline(always)]
    pub(crate) const fn is_there(&self) -> bool {
        !self.all.is_null()
    }

    /// The words of a kind with this sequence flag.
    #[inline(always)]
    pub(crate) const fn words(&self, kind: WordKind, flag: u32) -> Words {
        let Place { first, len } = self.kinds[kind as usize];
        Words::at(first, len, flag)
    }

    /// The first sequence flag of the next step: of what its first matrix takes in.
    ///
    /// # Safety
    /// [There is](Self::is_there) an exchange. The block has not told yet that it is done with the step: behind that,
    /// what this reads is [written](Self::use_up).
    #[inline(always)]
    pub(crate) unsafe fn first_flag(&self) -> u32 {
        // SAFETY: the caller's word.
        1 + unsafe { self.all.load(0) as u32 }
    }

    /// A step of so many `flags`, of which this was the first, is done: the next one has others. No block has a part in
    /// it any more.
    ///
    /// # Safety
    /// One lane of the grid calls it, once all blocks are done with the step; `first` is what
    /// [`first_flag`](Self::first_flag) gave.
    #[inline(always)]
    pub(crate) unsafe fn use_up(&self, first: u32, flags: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let mut used = first - 1 + flags;
            if used > u32::MAX - flags {
                // Once in ten million steps or more they begin anew.
                let mut i = 1;
                while i < self.count {
                    atomic::store(self.all, i as usize, 0, Ordering::Relaxed, Scope::Device);
                    i += 1;
                }
                used = 0;
            }
            self.all.store(0, u64::from(used));
        }
    }
}

/// The words of one kind, with one sequence flag.
#[derive(Clone, Copy)]
pub(crate) struct Words {
    first: GlobalMut<u64>,
    /// How many there are.
    pub len: u32,
    flag: u32,
}

/// A word, as it was found: not there yet, perhaps.
#[derive(Clone, Copy, Default)]
pub(crate) struct Word(u64);

impl Word {
    const fn new(flag: u32, bits: u32) -> Self {
        Self((flag as u64) << 32 | bits as u64)
    }

    /// The data of a word that is there.
    #[inline(always)]
    pub(crate) const fn bits(self) -> u32 {
        self.0 as u32
    }

    #[inline(always)]
    const fn flag(self) -> u32 {
        (self.0 >> 32) as u32
    }

    #[inline(always)]
    const fn has(self, flag: u32) -> bool {
        self.flag() == flag
    }
}

impl Words {
    /// `len` words from `first` on, with this sequence flag.
    #[inline(always)]
    pub(crate) const fn at(first: GlobalMut<u64>, len: u32, flag: u32) -> Self {
        Self { first, len, flag }
    }

    /// Where the first is.
    #[inline(always)]
    pub(crate) const fn first(&self) -> GlobalMut<u64> {
        self.first
    }

    /// `len` words from word `i` on.
    ///
    /// # Safety
    /// There are so many.
    #[inline(always)]
    pub(crate) unsafe fn slice(&self, i: u32, len: u32) -> Self {
        // SAFETY: the caller's word.
        Self { first: unsafe { self.first.at(i as usize) }, len, ..*self }
    }

    /// Those from word `i` on.
    #[inline(always)]
    pub(crate) unsafe fn from(&self, i: u32) -> Self {
        // SAFETY: the caller's word; beyond the end none is asked for.
        Self { first: unsafe { self.first.at(i as usize) }, len: self.len.saturating_sub(i), ..*self }
    }

    /// Puts word `i` there.
    ///
    /// # Safety
    /// There is a word `i`, which no other lane puts, and those who waited for what was there have read it.
    #[inline(always)]
    pub(crate) unsafe fn put(&self, i: u32, bits: u32) {
        let word = Word::new(self.flag, bits);
        // SAFETY: the caller's word.
        unsafe { atomic::store(self.first, i as usize, word.0, Ordering::Relaxed, Scope::Device) }
    }

    /// Asks for word `i`.
    ///
    /// # Safety
    /// There is a word `i`.
    #[inline(always)]
    pub(crate) unsafe fn ask(&self, i: u32) -> Word {
        // SAFETY: the caller's word.
        Word(unsafe { atomic::load(self.first, i as usize, Ordering::Relaxed, Scope::Device) })
    }

    /// Asks for `N` words, the `k`-th at `place(k)`; beyond the last there are some that nobody waits for.
    ///
    /// # Safety
    /// There are as many words as `len` says.
    #[inline(always)]
    pub(crate) unsafe fn ask_for<const N: usize>(&self, place: impl Fn(usize) -> u32) -> [Word; N] {
        let mut words = [self.nothing(); N];
        unroll!(K < N of 8; {
            if place(K) < self.len {
                // SAFETY: the caller's word.
                words[K] = unsafe { self.ask(place(K)) };
            }
        });
        words
    }

    /// A word that nobody waits for.
    #[inline(always)]
    pub(crate) const fn nothing(&self) -> Word {
        Word::new(self.flag, 0)
    }

    /// Waits until the first word is there, or one that came after it: nobody waits for a block without a part in what
    /// it goes on with.
    ///
    /// # Safety
    /// There is a first word.
    #[inline(always)]
    pub(crate) unsafe fn expect(&self) {
        // SAFETY: the caller's word.
        unsafe { waiting::until(|| self.ask(0).flag() >= self.flag) }
    }

    /// Waits, with the whole warp, until all words are there that were asked for; `place(k)` is the place of the
    /// `k`-th.
    ///
    /// # Safety
    /// All lanes of the warp call it. Of the `k`-th, either there is a word at `place(k)`, for which it was asked, or
    /// it is [one that nobody waits for](Self::nothing).
    #[inline(always)]
    pub(crate) unsafe fn settle<const N: usize>(&self, words: &mut [Word; N], place: impl Fn(usize) -> u32) {
        // SAFETY: the caller's word.
        unsafe {
            waiting::until(|| {
                let mut there = true;
                unroll!(K < N of 8; {
                    there &= words[K].has(self.flag);
                });
                if warp::all(there) {
                    return true;
                }
                if N > 4 {
                    thread::nanosleep(PAUSE);
                }
                unroll!(K < N of 8; {
                    if !words[K].has(self.flag) {
                        words[K] = self.ask(place(K));
                    }
                });
                false
            });
        }
    }
}
