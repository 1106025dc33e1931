//! A CTA for each sequence, for batches and texts so small that the time of a call is that of its waits.
//!
//! The CTAs of [`mod@super`]'s launch meet twice: to agree on each sequence's key, and to find out which CTA is last.
//! Then the last CTA loads again what it has to know, and tokens that other SMs have read. Each of these is a round
//! trip to L2. Here a sequence stays in its CTA, whose warps share its tiles, and CTAs tell each other one thing:
//!
//! ```text
//! CTA b     first tiles ─┐
//!           facts ───────┴► search ► cap[b], fixed[b] ─► its slot in device memory
//!                                                            │
//!           slots 0 … b − 1, as soon as they are written ◄───┘
//!             └► room of b (a sum, see the module's text) ► rows[b], drafts, from lines that this CTA has read
//! ```
//!
//! *What is not waited for.* The first tile of each warp is loaded before the sequence's lengths are known: where it
//! lies follows from the strides.
//!
//! *Slots.* A slot is two words, each of 63 bits and a tag. A launch flips the tag of every slot, also of those beyond
//! the batch. So between launches all slots have the same tag, each CTA learns it from its own slot, and nothing has to
//! be reset. A word is read and written as a whole and contains all that it tells, so no fence is needed.
//!
//! *Progress.* A CTA waits only for CTAs of lower index. CTAs start in that order, or all together in a cooperative
//! launch.
//!
//! # Safety
//! An operator is a launch's parameter block, whose arrays are as it says. The grid has a CTA for each sequence, at
//! most [`MOST_SEQUENCES`]; CTAs start in order, or all at once.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{GlobalMut, device, thread, warp};

use super::search::{Ahead, Keys, Units, search_part, texts};
use super::share::{Wish, grant};
use super::{MOST_SEQUENCES, Operator, Token};
use crate::waiting;

/// Threads of a CTA. The kernels take any power of two of warps.
pub const THREADS: u32 = 512;
/// Shared memory of a CTA, in bytes: the key.
pub const SHARED_BYTES: u32 = 8;

/// Slots that a lane reads.
const ROUNDS: u32 = MOST_SEQUENCES / 32;
/// The tag in a slot's word; the bits below it are the number.
const TAG: u64 = 1 << 63;

/// The number in a word, without the tag.
#[device]
fn number(word: u64) -> i64 {
    (word << 1) as i64 >> 1
}

/// The words of slot `i`: cap and fixed.
///
/// # Safety
/// `i` is below [`MOST_SEQUENCES`], and `slots` are a launch's.
#[device]
unsafe fn slot(slots: GlobalMut<u64>, i: u32) -> [u64; 2] {
    let at = 2 * i as usize;
    // SAFETY: the caller's word.
    unsafe {
        [
            atomic::load(slots, at, Ordering::Relaxed, Scope::Device),
            atomic::load(slots, at + 1, Ordering::Relaxed, Scope::Device),
        ]
    }
}

/// The whole operator: a CTA a sequence, of [`THREADS`].
///
/// # Safety
/// As the operator's parameter block says.
#[device]
pub unsafe fn draft<T: Token, O: Operator<T>>(operator: &O) {
    // SAFETY: the caller's word.
    unsafe {
        let warps = thread::block_dim_x() / 32;
        let s = operator.sequences();
        let ahead = Ahead::load(s, thread::block_idx_x() as usize, thread::warp_id());
        draft_after(operator, |first, in_prompt| ahead.get(first, in_prompt), warps, || thread::sync_threads());
    }
}

/// What the first warp has written: how many rows, and in lane `d` the token of draft `d`.
#[derive(Clone, Copy)]
pub(crate) struct Drafted<T> {
    pub(crate) rows: i32,
    pub(crate) token: T,
}

/// [`draft`] by the first `warps` warps of a CTA, a power of two, which synchronise in `sync`. `ahead` gives the tiles
/// that were loaded ahead. The first warp gets what it has written, as far as one draft for each lane; the others get
/// `None`.
///
/// # Safety
/// The first `warps` warps of each CTA call it, whole, and no other; `sync` is a barrier of these. The first 8 bytes of
/// dynamic shared memory are theirs. What `ahead` gives is the tile of the warp's part that it is asked for.
#[device]
pub(super) unsafe fn draft_after<T: Token, O: Operator<T>>(
    operator: &O,
    ahead: impl Fn(u32, bool) -> Option<Units>,
    warps: u32,
    sync: impl Fn(),
) -> Option<Drafted<T>> {
    // SAFETY: the caller's word.
    unsafe {
        let s = operator.sequences();
        let block = thread::block_idx_x();
        let b = block as usize;
        let (warp_id, lane) = (thread::warp_id(), thread::lane_id());
        let slots = s.slots();

        // Loads that depend on nothing are issued first.
        let claim = operator.claim::<true>(b);
        let t = texts::<true, _, _>(operator, b);
        let mut working = [false; ROUNDS as usize];
        let mut before = 0;
        if warp_id == 0 {
            before = atomic::load(slots, 2 * b, Ordering::Relaxed, Scope::Device);
            unroll!(k < ROUNDS; {
                let i = 32 * k as u32 + lane;
                if i < s.batch {
                    working[k] = operator.works(i as usize);
                }
            });
        }

        let keys = Keys::of_block(s, &sync);
        if claim.want > 0 && t.ends() > 0 {
            search_part(operator, &keys, 0, &t, warp_id, 31 - warps.leading_zeros(), ahead);
        }
        sync();
        if warp_id != 0 {
            return None;
        }

        let wish = Wish::new(s, b, claim, &t, keys.load(0));
        let tag = !before & TAG;
        let mut to = block + lane * s.batch;
        while to < MOST_SEQUENCES {
            let at = 2 * to as usize;
            let words = [wish.cap as u64, claim.fixed as u64 & !TAG];
            atomic::store(slots, at, tag | words[0], Ordering::Relaxed, Scope::Device);
            atomic::store(slots, at + 1, tag | words[1], Ordering::Relaxed, Scope::Device);
            to += 32 * s.batch;
        }

        let mut in_all = 0;
        unroll!(k < ROUNDS; { in_all += warp::ballot(working[k]).count_ones(); });
        // U of the module's text.
        let mut room = s.threshold as i64 - in_all as i64 - claim.fixed;
        let (mut taken, mut negative) = (0, false);
        waiting::until(|| {
            taken = 0;
            negative = claim.fixed < 0;
            let mut ready = true;
            unroll!(k < ROUNDS; {
                let i = 32 * k as u32 + lane;
                if i < block {
                    let [cap, fixed] = slot(slots, i);
                    ready &= cap & TAG == tag && fixed & TAG == tag;
                    taken += number(cap) + number(fixed);
                    negative |= number(fixed) < 0;
                }
            });
            warp::all(ready)
        });
        if warp::any(negative) {
            // Walks the sequences in order, as the last CTA of the other launch does.
            let mut i = 0;
            while i < block {
                let [cap, fixed] = slot(slots, i);
                // This sequence's own `fixed` is already subtracted from `room`.
                let left = room + claim.fixed - number(fixed);
                room -= number(fixed) + grant(number(cap) as u32, left) as i64;
                i += 1;
            }
        } else {
            let mut mask = 16;
            while mask > 0 {
                taken += warp::shuffle_xor(taken, mask);
                mask /= 2;
            }
            room -= taken;
        }

        let granted = grant(wish.cap, room);
        if claim.written && lane == 0 {
            s.seq_lens_this_time.store(b, claim.base + granted as i32);
        }
        let text = if wish.from & 1 == 1 { s.input_ids } else { s.pre_ids };
        let to = b * s.draft_tokens_stride as usize + claim.base.max(0) as usize;
        let mut token = T::NONE;
        let mut d = lane;
        while d < granted {
            let draft = text.load(((wish.from >> 1) + d as u64) as usize);
            s.draft_tokens.store(to + d as usize, draft);
            if d == lane {
                token = draft;
            }
            d += 32;
        }
        Some(Drafted { rows: claim.base + granted as i32, token })
    }
}
