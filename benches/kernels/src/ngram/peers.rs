//! The slower rungs of the ladder, kept to be read and to be measured against. They take two launches each, one CTA a
//! sequence, and one pass over the texts for each pattern length.
//!
//! 1. *Plain*: [`ngram_windows_256_i64`] finds the windows with 256 threads a sequence. Then a single thread of
//!    [`ngram_serial_share_i64`] walks the batch, shares out the budget and copies the drafts.
//! 2. *Block scan*: [`ngram_windows_1024_i64`] finds the windows with 1,024 threads a sequence. Then one CTA of
//!    [`ngram_scan_share_i64`] shares out the budget by prefix sums, and copies with all its threads.
//!
//! The threads take the window starts of a pass in turn. A thread that finds a match lowers the leftmost start so far
//! by a 64-bit compare-and-swap, and threads to the right of that start stop. Results are those of [`NgramMatch`],
//! element for element.
//!
//! # Safety
//! An operator is a launch's parameter block, whose arrays are as it says; for grid and shared memory see
//! [`SEARCH_SHARED_BYTES`]. The second launch is of the same operator, and runs when the first is done. Until both are,
//! nobody else writes the arrays, or uses the workspace.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{device, kernel, shared, thread};

use gpu_kernels::ngram::search::{Keys, NOTHING, Texts, key, texts};
use gpu_kernels::ngram::share::{grant, share_out};
use gpu_kernels::ngram::{NgramMatch, Operator, THREADS, Token};

/// Threads of a CTA of the plain search.
pub const PLAIN_THREADS: u32 = 256;
/// Shared memory of the searching kernels. Those that share out take [`gpu_kernels::ngram::SHARED_BYTES`], or none for
/// the serial one. Grid of a search: batch; of a sharing kernel: 1.
pub const SEARCH_SHARED_BYTES: u32 = 8;

/// Whether the window of `n` tokens that ends at `end` equals the pattern.
///
/// # Safety
/// The texts are in memory, and nobody writes them meanwhile. `end` is one of the text's; `n` is at most `end + 1`, and
/// at most [`longest`](Texts::longest).
#[device]
unsafe fn equals<T: Token>(t: &Texts<T>, in_prompt: bool, end: u32, n: u32) -> bool {
    let text = if in_prompt { t.prompt } else { t.generated };
    let mut i = n;
    while i > 0 {
        i -= 1;
        // SAFETY: the caller's word. Before the newest token there are as many as the longest pattern has.
        if unsafe { text.load((end - i) as usize) != t.generated.load((t.newest - i) as usize) } {
            return false;
        }
    }
    true
}

/// Leaves the key of the best match for this CTA's sequence in the workspace.
///
/// # Safety
/// The whole grid calls it: a CTA of so many `threads` for each sequence, with [`SEARCH_SHARED_BYTES`].
#[device]
unsafe fn find_windows<T: Token, O: Operator<T>>(operator: &O, threads: u32) {
    // SAFETY: the caller's word. An end is below `ends`, and has `n - 1` tokens before it. The whole CTA goes from
    // barrier to barrier together, between which the word in shared memory is either written by one thread, or changed
    // by atomics, or read. The key is this CTA's own.
    unsafe {
        let b = thread::block_idx_x() as usize;
        let tid = thread::thread_idx_x();
        let leftmost = shared::dynamic::<u64>(0);
        if operator.claim::<false>(b).want <= 0 {
            return;
        }
        let t = texts::<false, _, _>(operator, b);
        let mut n = t.longest;
        while n >= operator.shortest() {
            let mut pass = 0;
            while pass < 2 {
                let in_prompt = pass == 0;
                let ends = if in_prompt { t.prompt_ends } else { t.generated_ends };
                if tid == 0 {
                    leftmost.store(0, NOTHING);
                }
                thread::sync_threads();
                let mut end = n - 1 + tid;
                while end < ends {
                    let mut seen = atomic::load(leftmost, 0, Ordering::Relaxed, Scope::Block);
                    if seen <= end as u64 {
                        break;
                    }
                    if equals(&t, in_prompt, end, n) {
                        while (end as u64) < seen {
                            let old = atomic::compare_exchange(
                                leftmost,
                                0,
                                seen,
                                end as u64,
                                Ordering::Relaxed,
                                Scope::Block,
                            );
                            if old == seen {
                                break;
                            }
                            seen = old;
                        }
                        break;
                    }
                    end += threads;
                }
                thread::sync_threads();
                let found = leftmost.load(0);
                if found != NOTHING {
                    if tid == 0 {
                        let place = if in_prompt { 0 } else { t.prompt_ends } + found as u32;
                        operator.sequences().keys().store(b, key(t.longest - n, place));
                    }
                    return;
                }
                // All threads have read it before it is cleared.
                thread::sync_threads();
                pass += 1;
            }
            n -= 1;
        }
    }
}

/// One thread walks the batch, shares out the budget and copies the drafts.
///
/// # Safety
/// The one CTA of a launch calls it, when [`find_windows`] has left the keys of the same operator.
#[device]
unsafe fn share_in_order<T: Token, O: Operator<T>>(operator: &O) {
    if thread::thread_idx_x() != 0 {
        return;
    }
    // SAFETY: the caller's word; no other thread takes part. A key is of a window end, which `ends - end` tokens follow
    // in its text; a sequence that has one wants no more than its row has places for.
    unsafe {
        let s = operator.sequences();
        let mut room = s.threshold as i64;
        let mut b = 0;
        while b < s.batch as usize {
            room -= operator.claim::<false>(b).works as i64;
            b += 1;
        }
        b = 0;
        while b < s.batch as usize {
            let claim = operator.claim::<false>(b);
            room -= claim.fixed;
            let mut granted = 0;
            let best = s.keys().load(b);
            if best != NOTHING {
                s.keys().store(b, NOTHING);
                let t = texts::<false, _, _>(operator, b);
                let place = best as u32;
                let in_prompt = place < t.prompt_ends;
                let (text, end, ends) = if in_prompt {
                    (t.prompt, place, t.prompt_ends)
                } else {
                    (t.generated, place - t.prompt_ends, t.generated_ends)
                };
                granted = grant(claim.want.max(0).min((ends - end) as i64) as u32, room);
                let to = s.draft_tokens.at(b * s.draft_tokens_stride as usize + claim.base.max(0) as usize);
                let mut d = 0;
                while d < granted {
                    to.store(d as usize, text.load((end + 1 + d) as usize));
                    d += 1;
                }
            }
            if claim.written {
                s.seq_lens_this_time.store(b, claim.base + granted as i32);
            }
            room -= granted as i64;
            b += 1;
        }
    }
}

/// Plain design, first launch: the windows.
#[kernel(threads = PLAIN_THREADS, module = "bench")]
pub unsafe fn ngram_windows_256_i64(p: NgramMatch<i64>) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { find_windows(&p, PLAIN_THREADS) }
}

/// Plain design, second launch: budget and drafts.
#[kernel(threads = 32, module = "bench")]
pub unsafe fn ngram_serial_share_i64(p: NgramMatch<i64>) {
    // SAFETY: the launcher's word: memory is as the parameter block says, and keys are the first launch's.
    unsafe { share_in_order(&p) }
}

/// Block-scan design, first launch: the windows.
#[kernel(threads = THREADS, min_blocks = 1, module = "bench")]
pub unsafe fn ngram_windows_1024_i64(p: NgramMatch<i64>) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe { find_windows(&p, THREADS) }
}

/// Block-scan design, second launch: budget and drafts.
#[kernel(threads = THREADS, min_blocks = 1, module = "bench")]
pub unsafe fn ngram_scan_share_i64(p: NgramMatch<i64>) {
    // SAFETY: the launcher's word: memory is as the parameter block says, and keys are the first launch's.
    unsafe { share_out(&p, &Keys::left_behind(&p.sequences)) }
}
