//! How activations go from CTA to CTA in a step of one row: as words that carry a sequence flag.
//!
//! A word has 8 bytes, which are written and read at once: four bytes of data, and a sequence flag. A warp that needs a
//! word polls it until it has the flag that the warp waits for. So no warp counts arrivals, waits for stores to be
//! done, or reads data again after a counter. And none waits for data that it does not need: attention of one head does
//! not wait for other heads. (NCCL's protocol "LL" sends messages between cards like this.)
//!
//! # Why no word is overwritten too early
//! Flags grow from matrix to matrix and from step to step, and a reader takes a word with one flag alone. If a word
//! were overwritten before a reader saw it, the reader would wait until the bounded wait ends the launch. That does not
//! happen. Each kind of word has one place, written once or twice a layer:
//!
//! - An output N-tile needs all that attention puts out, and attention needs all that QKV puts out. So once any CTA has
//!   finished an output N-tile, every CTA has read what it needed of QKV's input, every unit of attention has read its
//!   heads, and the warps that add a head's splits have read their parts. Only then are the scaled residual and its
//!   squares written anew. The heads and the parts are written anew in the next layer.
//! - In the same way, gate and up need every output N-tile, and down needs every activation. Once any CTA has finished
//!   an N-tile of down, nobody reads the output projection's input or results any more. Once any CTA has finished an
//!   N-tile of the next QKV, nobody reads activations any more.
//! - An element of the residual is read, and then overwritten, by the same lane.
//!
//! Between two steps the launch ends.
//!
//! # Safety
//! Words are in live memory, as many as their `len` says. They were zero before the first step, and only what is here
//! has written them since. One lane puts or asks for a word; a whole warp settles. With one flag a word is put once, by
//! one lane: in a launch before, or by a CTA that runs beside those that wait for it.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{GlobalMut, device, thread, warp};

use crate::kv::HEAD_DIM;
use crate::linear::N_TILE;
use crate::waiting;

/// Nanoseconds between two polls of many words. A poll moves as many bytes as memory brings of weights in about this
/// time.
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
    /// `[q_heads · 64]`: pairs of attention's results, as bf16.
    Attended,
    /// `[intermediate / 2]`: pairs of activations, as bf16.
    Activation,
    /// `[hidden]`: pairs of what the projections of an [EAGLE-3 head](crate::eagle) read, as bf16; a model has none.
    Pairs,
    /// `[q_heads, splits · (128 + 2)]`: for each head, its splits' sums of values, `[split][dimension]`, then their
    /// maxima and normalisers, `[split][2]`: see [`Attend::sums`](crate::attention::Attend::sums).
    Parts,
}

/// The sizes of the model that an [`Exchange`] is for.
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
    /// One word with how many sequence flags are used up, then the words of each kind.
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
    /// An exchange for a model of these sizes, with its words from `all` on; and how many words that takes. The caller
    /// zeroes them before the first step, and then leaves them alone.
    pub fn new(all: GlobalMut<u64>, sizes: ExchangeSizes) -> (Self, usize) {
        let ExchangeSizes { hidden, intermediate, q_heads, kv_heads, pairs, splits } = sizes;
        let heads = (q_heads + 2 * kv_heads) * HEAD_DIM;
        let parts = q_heads * splits * (HEAD_DIM + 2);
        // In the order of `WordKind`.
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

    /// Whether there is an exchange.
    #[device]
    pub(crate) const fn is_there(&self) -> bool {
        !self.all.is_null()
    }

    /// The words of a kind with this sequence flag.
    #[device]
    pub(crate) const fn words(&self, kind: WordKind, flag: u32) -> Words {
        let Place { first, len } = self.kinds[kind as usize];
        Words::at(first, len, flag)
    }

    /// The first sequence flag of the step that begins: that of what its first matrix takes in.
    ///
    /// # Safety
    /// [There is](Self::is_there) an exchange. The CTA has not yet told that it is done with the step: after that, what
    /// this reads is [written](Self::use_up).
    #[device]
    pub(crate) unsafe fn first_flag(&self) -> u32 {
        // SAFETY: the caller's word.
        1 + unsafe { self.all.load(0) as u32 }
    }

    /// Uses up the `flags` sequence flags of a step, of which `first` was the first: the next step has others. No CTA
    /// has a part in the step any more.
    ///
    /// # Safety
    /// One lane of the grid calls it, once all CTAs are done with the step; `first` is what
    /// [`first_flag`](Self::first_flag) gave.
    #[device]
    pub(crate) unsafe fn use_up(&self, first: u32, flags: u32) {
        // SAFETY: the caller's word.
        unsafe {
            let mut used = first - 1 + flags;
            if used > u32::MAX - flags {
                // Flags begin anew, once in ten million steps or more.
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

/// A word as it was read. It may not have the flag that is waited for yet.
#[derive(Clone, Copy, Default)]
pub(crate) struct Word(u64);

impl Word {
    const fn new(flag: u32, bits: u32) -> Self {
        Self((flag as u64) << 32 | bits as u64)
    }

    /// The data of a word that has the flag.
    #[device]
    pub(crate) const fn bits(self) -> u32 {
        self.0 as u32
    }

    #[device]
    const fn flag(self) -> u32 {
        (self.0 >> 32) as u32
    }

    #[device]
    const fn has(self, flag: u32) -> bool {
        self.flag() == flag
    }
}

impl Words {
    /// `len` words from `first` on, with this sequence flag.
    #[device]
    pub(crate) const fn at(first: GlobalMut<u64>, len: u32, flag: u32) -> Self {
        Self { first, len, flag }
    }

    /// Where the first word is.
    #[device]
    pub(crate) const fn first(&self) -> GlobalMut<u64> {
        self.first
    }

    /// `len` words from word `i` on.
    ///
    /// # Safety
    /// There are so many words.
    #[device]
    pub(crate) unsafe fn slice(&self, i: u32, len: u32) -> Self {
        // SAFETY: the caller's word.
        Self { first: unsafe { self.first.at(i as usize) }, len, ..*self }
    }

    /// The words from word `i` on.
    #[device]
    pub(crate) unsafe fn from(&self, i: u32) -> Self {
        // SAFETY: the caller's word; beyond the end none is asked for.
        Self { first: unsafe { self.first.at(i as usize) }, len: self.len.saturating_sub(i), ..*self }
    }

    /// Writes word `i`, with the flag.
    ///
    /// # Safety
    /// There is a word `i`, which no other lane puts, and those who waited for what was there have read it.
    #[device]
    pub(crate) unsafe fn put(&self, i: u32, bits: u32) {
        let word = Word::new(self.flag, bits);
        // SAFETY: the caller's word.
        unsafe { atomic::store(self.first, i as usize, word.0, Ordering::Relaxed, Scope::Device) }
    }

    /// Reads word `i`, whatever its flag.
    ///
    /// # Safety
    /// There is a word `i`.
    #[device]
    pub(crate) unsafe fn ask(&self, i: u32) -> Word {
        // SAFETY: the caller's word.
        Word(unsafe { atomic::load(self.first, i as usize, Ordering::Relaxed, Scope::Device) })
    }

    /// Reads `N` words, the `k`-th at `place(k)`. For places beyond the last word it gives [words that nobody waits
    /// for](Self::nothing).
    ///
    /// # Safety
    /// There are as many words as `len` says.
    #[device]
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

    /// A word that nobody waits for: it has the flag, and data of zero.
    #[device]
    pub(crate) const fn nothing(&self) -> Word {
        Word::new(self.flag, 0)
    }

    /// Waits until the first word has the flag, or a later flag: others do not wait for this CTA, which does not use
    /// the words, so the word may have been overwritten.
    ///
    /// # Safety
    /// There is a first word.
    #[device]
    pub(crate) unsafe fn expect(&self) {
        // SAFETY: the caller's word.
        unsafe { waiting::until(|| self.ask(0).flag() >= self.flag) }
    }

    /// Waits, with the whole warp, until all `words` have the flag. `place(k)` is the place of the `k`-th.
    ///
    /// # Safety
    /// All lanes of the warp call it. The `k`-th word was read at `place(k)`, where there is a word, or it is [one that
    /// nobody waits for](Self::nothing).
    #[device]
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
