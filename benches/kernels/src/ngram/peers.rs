//! The slower rungs of the ladder, kept to be measured against and read: two launches each, a block a sequence, a pass
//! over the texts for each pattern length.
//!
//! 1. *Plain*: [`ngram_windows_256_i64`] finds the windows with 256 threads a sequence; then
//!    [`ngram_serial_share_i64`], a single thread, walks the batch, shares out the budget and copies the drafts.
//! 2. *Block scan*: [`ngram_windows_1024_i64`] finds them with 1,024 threads a sequence; then [`ngram_scan_share_i64`],
//!    one block, shares out the budget by prefix sums and copies with all its threads.
//!
//! The window starts of a pass are scheduled to the threads in turn; who finds one lowers the leftmost start so far by
//! a 64-bit compare-and-swap, and threads to the right of it stop. Results are those of [`NgramMatch`], element for
//! element.

use cuda_std::atomic::{self, Ordering, Scope};
use cuda_std::{kernel, shared, thread};

use gpu_kernels::ngram::search::{Keys, NOTHING, Texts, key, texts};
use gpu_kernels::ngram::share::{grant, share_out};
use gpu_kernels::ngram::{NgramMatch, Operator, THREADS, Token};

/// Threads of a block of the plain search.
pub const PLAIN_THREADS: u32 = 256;
/// Shared memory of the searching kernels. Those that share out take [`gpu_kernels::ngram::SHARED_BYTES`], or none for
/// the serial one. Grid of a search: batch; of a sharing kernel: 1.
pub const SEARCH_SHARED_BYTES: u32 = 8;

/// Whether the window of `n` tokens that ends at `end` equals the pattern.
#[inline(always)]
unsafe fn equals<T: Token>(t: &Texts<T>, in_prompt: bool, end: u32, n: u32) -> bool {
    unsafe {
        let text = if in_prompt { t.prompt } else { t.generated };
        let mut i = n;
        while i > 0 {
            i -= 1;
            if text.load((end - i) as usize) != t.generated.load((t.newest - i) as usize) {
                return false;
            }
        }
        true
    }
}

/// Leaves the key of this block's sequence in the workspace.
#[inline(always)]
unsafe fn find_windows<T: Token, O: Operator<T>>(operator: &O, threads: u32) {
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
                // All have read it before it is cleared.
                thread::sync_threads();
                pass += 1;
            }
            n -= 1;
        }
    }
}

/// One thread walks the batch.
#[inline(always)]
unsafe fn share_in_order<T: Token, O: Operator<T>>(operator: &O) {
    unsafe {
        if thread::thread_idx_x() != 0 {
            return;
        }
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
    unsafe { find_windows(&p, PLAIN_THREADS) }
}

/// Plain design, second launch: budget and drafts.
#[kernel(threads = 32, module = "bench")]
pub unsafe fn ngram_serial_share_i64(p: NgramMatch<i64>) {
    unsafe { share_in_order(&p) }
}

/// Block-scan design, first launch: the windows.
#[kernel(threads = THREADS, min_blocks = 1, module = "bench")]
pub unsafe fn ngram_windows_1024_i64(p: NgramMatch<i64>) {
    unsafe { find_windows(&p, THREADS) }
}

/// Block-scan design, second launch: budget and drafts.
#[kernel(threads = THREADS, min_blocks = 1, module = "bench")]
pub unsafe fn ngram_scan_share_i64(p: NgramMatch<i64>) {
    unsafe { share_out(&p, &Keys::left_behind(&p.sequences)) }
}
