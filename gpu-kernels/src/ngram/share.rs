//! The last CTA's work: who gets how much of the budget, and the copy of the drafts.
//!
//! # Safety
//! An operator, or `s`, is of a launch's parameter block, whose arrays are as it says. Whole CTAs of [`THREADS`] call
//! these functions, with the operators' shared memory; `keys` are those of the launch, or those that another one left.
//! Sequences' outputs are written when nobody reads them as inputs any more.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{device, shared, thread, warp};

use super::search::{Keys, NOTHING, Texts, texts};
use super::{Claim, Operator, Sequences, THREADS, Token, WARPS, shared_layout};

/// Lanes that copy one sequence's drafts.
const COPIERS: u32 = 16;
/// Sequences for which a group of that many lanes copies at a time.
const COPIES: u32 = 4;

/// Whether this CTA is the last of the launch to come here. Then all that the others wrote before is visible.
///
/// # Safety
/// All CTAs of the launch call it, once, each when it has searched.
#[device]
pub(super) unsafe fn is_last_block<T: Token, O: Operator<T>>(operator: &O, keys: &Keys) -> bool {
    // SAFETY: the caller's word.
    unsafe {
        let last = shared::dynamic::<u32>(shared_layout::LAST);
        thread::sync_threads();
        if keys.alone {
            return true;
        }
        if thread::thread_idx_x() == 0 {
            let blocks = thread::grid_dim_x() * thread::grid_dim_y();
            let finished = operator.sequences().finished_blocks();
            // Releases what the CTA did before the barrier, acquires what the others released. The count begins at -1,
            // with which the workspace is filled.
            let before = atomic::fetch_add(finished, 0, 1u32, Ordering::AcqRel, Scope::Device);
            let is_last = before.wrapping_add(2) == blocks;
            if is_last {
                finished.store(0, u32::MAX);
            }
            last.store(0, is_last as u32);
        }
        thread::sync_threads();
        last.load(0) != 0
    }
}

/// What the budget needs to know of a sequence.
#[derive(Clone, Copy)]
pub(super) struct Wish {
    claim: Claim,
    /// Drafts that it could use.
    pub(super) cap: u32,
    /// Where the drafts begin: the index of the element in its matrix, doubled, plus 1 if that is the prompts'.
    pub(super) from: u64,
    /// A key was left that the next launch must not find.
    found: bool,
}

impl Wish {
    /// The wish of sequence `b`, whose key is `best`.
    #[device]
    pub(super) fn new<T: Token>(s: &Sequences<T>, b: usize, claim: Claim, t: &Texts<T>, best: u64) -> Self {
        if best == NOTHING {
            return Self { claim, cap: 0, from: 0, found: false };
        }
        let place = best as u32;
        let in_prompt = place < t.prompt_ends;
        // Tokens follow an end as far as the last token, which is no end itself.
        let follow = if in_prompt { t.prompt_ends - place } else { t.ends() - place };
        let start = if in_prompt { place } else { place - t.prompt_ends } as u64 + 1;
        let stride = if in_prompt { s.input_ids_stride } else { s.pre_ids_stride };
        Self {
            claim,
            cap: claim.want.max(0).min(follow as i64) as u32,
            from: (b as u64 * stride as u64 + start) << 1 | in_prompt as u64,
            found: true,
        }
    }
}

/// The wish of sequence `b`; if there is no such sequence, a wish for nothing.
///
/// # Safety
/// All keys are final: every CTA has searched.
#[device]
unsafe fn wish_of<T: Token, O: Operator<T>>(operator: &O, keys: &Keys, b: u32) -> Wish {
    // SAFETY: the caller's word.
    unsafe {
        let s = operator.sequences();
        if b >= s.batch {
            let claim = Claim { works: false, written: false, base: 0, want: 0, fixed: 0 };
            return Wish { claim, cap: 0, from: 0, found: false };
        }
        let b = b as usize;
        let best = keys.load(b);
        let claim = operator.claim::<true>(b);
        Wish::new(s, b, claim, &texts::<true, _, _>(operator, b), best)
    }
}

/// How many drafts a sequence gets that could use `cap` and finds `room`.
#[device]
pub fn grant(cap: u32, room: i64) -> u32 {
    if room >= 2 { (cap as i64).min(room) as u32 } else { 0 }
}

/// Shares out the budget and copies the drafts: one CTA. The keys are put back.
///
/// # Safety
/// As the operator's parameter block says; the CTA has [`THREADS`], and the operator's shared memory.
#[device]
pub unsafe fn share_out<T: Token, O: Operator<T>>(operator: &O, keys: &Keys) {
    // SAFETY: the caller's word.
    unsafe {
        let s = operator.sequences();
        let tid = thread::thread_idx_x();
        let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
        let active = shared::dynamic::<u32>(shared_layout::ACTIVE);
        let negative = shared::dynamic::<u32>(shared_layout::NEGATIVE);
        let room = shared::dynamic::<i64>(shared_layout::ROOM);
        let totals = shared::dynamic::<i64>(shared_layout::TOTALS);
        let fixed = shared::dynamic::<i64>(shared_layout::FIXED);
        let from = shared::dynamic::<u64>(shared_layout::FROM);
        let count = shared::dynamic::<u32>(shared_layout::COUNT);
        let row = shared::dynamic::<i32>(shared_layout::ROW);

        // This is on its way while the other sequences are counted.
        let mut wish = wish_of(operator, keys, tid);

        // How many sequences have work, and whether any has a negative `fixed`.
        let (mut own_active, mut own_negative) = (wish.claim.works as u32, (wish.claim.fixed < 0) as u32);
        let mut b = tid + THREADS;
        while b < s.batch {
            let claim = operator.claim::<true>(b as usize);
            own_active += claim.works as u32;
            own_negative += (claim.fixed < 0) as u32;
            b += THREADS;
        }
        let in_order;
        let in_all;
        if s.batch <= 32 {
            // All sequences are in the first warp, whose votes need no barrier. The other warps have nothing to share
            // out.
            in_all = warp::ballot(own_active != 0).count_ones();
            in_order = warp::any(own_negative != 0);
        } else {
            if tid == 0 {
                active.store(0, 0);
                negative.store(0, 0);
            }
            thread::sync_threads();
            if own_active > 0 {
                atomic::fetch_add(active, 0, own_active, Ordering::Relaxed, Scope::Block);
            }
            if own_negative > 0 {
                atomic::fetch_add(negative, 0, own_negative, Ordering::Relaxed, Scope::Block);
            }
            thread::sync_threads();
            in_all = active.load(0);
            in_order = negative.load(0) != 0;
        }
        // U of the module's text, at the start of the chunk.
        let mut chunk_room = s.threshold as i64 - in_all as i64;
        if tid == 0 {
            room.store(0, chunk_room);
        }

        // Synchronises the warps that share out.
        let barrier = || if s.batch <= 32 { warp::sync_warp() } else { thread::sync_threads() };
        let mut chunk = 0;
        while chunk < s.batch {
            let Wish { claim, cap, .. } = wish;
            let here = (s.batch - chunk).min(THREADS);
            let mut chunk_sum = 0;
            from.store(tid as usize, wish.from);
            let drafts = if in_order {
                fixed.store(tid as usize, claim.fixed);
                count.store(tid as usize, cap);
                barrier();
                if tid == 0 {
                    let mut room_left = room.load(0);
                    let mut i = 0;
                    while i < here as usize {
                        room_left -= fixed.load(i);
                        let granted = grant(count.load(i), room_left);
                        count.store(i, granted);
                        room_left -= granted as i64;
                        i += 1;
                    }
                    room.store(0, room_left);
                }
                barrier();
                count.load(tid as usize)
            } else {
                // Warps without a sequence add nothing, and do not hold up those that have one.
                let own = claim.fixed + cap as i64;
                let mut before = 0;
                let of_warp = warp_id * 32 < here;
                if of_warp {
                    before = warp::inclusive_sum(own);
                }
                if here <= 32 {
                    before -= own;
                } else {
                    if lane == 31 {
                        totals.store(warp_id as usize, before);
                    }
                    thread::sync_threads();
                    // Every warp sums the 32 totals for itself.
                    let total = totals.load(lane as usize);
                    let upto = warp::inclusive_sum(total);
                    before += warp::shuffle_idx(upto - total, warp_id) - own;
                    chunk_sum = warp::shuffle_idx(upto, 31);
                }
                let granted = grant(cap, chunk_room - before - claim.fixed);
                count.store(tid as usize, granted);
                granted
            };
            row.store(tid as usize, claim.base);
            if claim.written {
                s.seq_lens_this_time.store((chunk + tid) as usize, claim.base + drafts as i32);
            }
            if wish.found {
                keys.put_back((chunk + tid) as usize);
            }
            thread::sync_threads();
            copy(operator, chunk);
            // The next chunk writes what this one still reads.
            thread::sync_threads();
            // The sum is there if another chunk follows, because this one is full then.
            chunk_room -= chunk_sum;
            chunk += THREADS;
            wish = wish_of(operator, keys, chunk + tid);
        }
    }
}

/// Copies the drafts of a chunk of sequences, as its threads have left them in shared memory. A group of lanes copies
/// for several sequences at a time, so that their loads do not wait for each other.
///
/// # Safety
/// The CTA's threads have left the chunk's drafts in shared memory, and synchronised.
#[device]
unsafe fn copy<T: Token, O: Operator<T>>(operator: &O, chunk: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let s = operator.sequences();
        let from = shared::dynamic::<u64>(shared_layout::FROM);
        let count = shared::dynamic::<u32>(shared_layout::COUNT);
        let row = shared::dynamic::<i32>(shared_layout::ROW);
        let groups = WARPS * (32 / COPIERS);
        let group = thread::thread_idx_x() / COPIERS;
        let copier = thread::thread_idx_x() % COPIERS;
        let here = (s.batch - chunk).min(THREADS);
        let mut first = group;
        while first < here {
            let mut most = 0;
            let mut done = 0;
            while done == 0 || done < most {
                let d = done + copier;
                let mut tokens = [T::NONE; COPIES as usize];
                unroll!(k < COPIES; {
                    let i = first + k as u32 * groups;
                    let granted = if i < here { count.load(i as usize) } else { 0 };
                    most = most.max(granted);
                    if d < granted {
                        let source = from.load(i as usize);
                        let text = if source & 1 == 1 { s.input_ids } else { s.pre_ids };
                        tokens[k] = text.load(((source >> 1) + d as u64) as usize);
                    }
                });
                unroll!(k < COPIES; {
                    let i = first + k as u32 * groups;
                    if i < here && d < count.load(i as usize) {
                        let at = (chunk + i) as usize * s.draft_tokens_stride as usize + row.load(i as usize) as usize;
                        s.draft_tokens.store(at + d as usize, tokens[k]);
                    }
                });
                done += COPIERS;
            }
            first += groups * COPIES;
        }
    }
}
