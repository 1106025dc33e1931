//! The epilogue of the projections of queries, keys and values. It normalises and rotates heads, and puts them where
//! attention reads them.
//!
//! # Safety
//! As for [all epilogues](super). Rows below [`m`](Gemm::m), which is not 0, have positions within the tables of
//! cosines and sines, and pages in the cache that nobody else writes there. Whole warps call these functions, each with
//! 16 rows of a head in its own part of the half's staging memory.

use cuda_std::shared::Shared;
use cuda_std::{Global, GlobalMut, bf16, device, math, thread, warp, wgmma};

use super::{Epilogue, Half, Next, Squares, bias, load_squares, place_in_group, scales};
use crate::gemm::{GROUP, Gemm};
use crate::kv::{HEAD_DIM, PAGE_TOKENS, place};
use crate::quad;

/// Queries, keys and values, as attention reads them.
pub struct Qkv;

/// Bytes of one row of a head.
const ROW_BYTES: u32 = HEAD_DIM * 2;

/// What [`Qkv`] loads ahead: the factors and positions of the lane's two rows.
#[derive(Clone, Copy)]
pub struct HeadsAhead {
    scales: [f32; 2],
    positions: [u32; 2],
}

/// The cosines and then the sines at `position` of the lane's dimensions: `8 j + 2 pair` and the next, below 64.
///
/// # Safety
/// The tables have this position.
#[device]
unsafe fn angles(p: &Gemm, position: u32) -> [[f32; 2]; 16] {
    // SAFETY: the caller's word.
    unsafe {
        let first = position as usize * (HEAD_DIM / 2) as usize + 2 * (thread::lane_id() % 4) as usize;
        let (cos, sin) = (p.heads.cos.at(first).cast::<[f32; 2]>(), p.heads.sin.at(first).cast::<[f32; 2]>());
        let mut angles = [[0.0; 2]; 16];
        unroll!(J < 8; {
            angles[J] = cos.load(4 * J);
            angles[J + 8] = sin.load(4 * J);
        });
        angles
    }
}

/// The norm's weights of a head of queries or keys, from the lane's first dimension on.
#[device]
unsafe fn head_norm(p: &Gemm, head: u32) -> Global<u32> {
    let norm = if head < p.heads.q_heads { p.heads.q_norm } else { p.heads.k_norm };
    // SAFETY: the caller's word.
    unsafe { norm.at((2 * (thread::opaque(thread::lane_id()) % 4)) as usize).cast() }
}

/// The factor that normalises the head whose sums begin at accumulator `$first`, in row `$r` of the lane. Where heads
/// have no norm, it is the row's own factor.
macro_rules! head_factor {
    ($first:expr, $r:expr, $p:ident, $scale:expr) => {{
        // Four independent sums: a single chain of FMAs would be mostly latency.
        let mut squares = [0f32; 4];
        unroll!(J < 16; {
            let x = [wgmma::get::<{ $first + 4 * J + 2 * $r }>(), wgmma::get::<{ $first + 4 * J + 2 * $r + 1 }>()];
            squares[J % 4] = math::fma(x[0], x[0], math::fma(x[1], x[1], squares[J % 4]));
        });
        let sum = quad::sum((squares[0] + squares[1]) + (squares[2] + squares[3])) * ($scale * $scale);
        let normed = $scale * math::rsqrt(sum / HEAD_DIM as f32 + $p.heads.eps);
        if $p.heads.head_norm == 0 { $scale } else { normed }
    }};
}

/// A lane's part of a head, in pairs of bf16.
type HeadWords = [u32; 32];

/// Normalises and rotates row `$r` of the lane, in the head of queries or keys whose sums begin at accumulator
/// `$first`. Writes it to the row's half of `$words`: eight times a pair of dimensions, then the pair that is 64
/// further.
macro_rules! rotate {
    ($words:expr, $first:expr, $r:expr, $factor:expr, $norm:expr, $angles:expr) => {{
        macro_rules! scaled {
            ($j:expr) => {{
                let x = [
                    wgmma::get::<{ $first + 4 * ($j) + 2 * $r }>(),
                    wgmma::get::<{ $first + 4 * ($j) + 2 * $r + 1 }>(),
                ];
                let w = math::unpack_bf16($norm.load(4 * ($j)));
                [x[0] * $factor * w[0], x[1] * $factor * w[1]]
            }};
        }
        unroll!(J < 8; {
            // Pairs of dimensions that are rotated together: 8 j + 2 pair + c, and 64 more.
            let (a, b) = (scaled!(J), scaled!(J + 8));
            let (cos, sin) = ($angles[J], $angles[J + 8]);
            $words[$r * 16 + 2 * J] = math::pack_bf16(a[0] * cos[0] - b[0] * sin[0], a[1] * cos[1] - b[1] * sin[1]);
            $words[$r * 16 + 2 * J + 1] = math::pack_bf16(b[0] * cos[0] + a[0] * sin[0], b[1] * cos[1] + a[1] * sin[1]);
        });
    }};
}

/// Scales the head of values whose sums begin at accumulator `$first`. Words are in the order of [`rotate`].
macro_rules! scale_values {
    ($words:expr, $first:expr, $scales:expr) => {
        unroll!(J < 8; {
            unroll!(H < 2; {
                let s = sums!($first + 4 * J + 32 * H);
                unroll!(R < 2; {
                    $words[R * 16 + 2 * J + H] = math::pack_bf16(s[R][0] * $scales[R], s[R][1] * $scales[R]);
                });
            });
        })
    };
}

/// Puts a head into the warp's part of shared memory at `to`: 16 rows of 256 bytes. The 16-byte chunks of a row are
/// permuted by the row's number.
///
/// # Safety
/// From byte `to` on is the warp's part of shared memory, [`ROW_BYTES`] times 16, which none of its lanes reads any
/// more.
#[device]
unsafe fn put_rows(to: u32, words: HeadWords) {
    let (lane, _) = place_in_group();
    let (row, pair) = (lane / 4, lane % 4);
    let place = to + row * ROW_BYTES + row * 16 + pair * 4;
    unroll!(R < 2; {
        unroll!(J < 8; {
            let to: Shared<u32> = Shared::from_raw((place ^ (J as u32 * 16)) + R as u32 * 8 * ROW_BYTES);
            // SAFETY: the caller's word.
            unsafe {
                to.store(0, words[R * 16 + 2 * J]);
                to.store(32, words[R * 16 + 2 * J + 1]);
            }
        });
    });
}

/// Stores eight rows of a head, of the warp's 16: those from row `first` on. [`put_rows`] left them in shared memory at
/// `from`. Lanes `4 i` to `4 i + 3` have row `i`'s place in the cache, as `page` and `position`.
///
/// # Safety
/// The warp's lanes have put their rows at `from`, and synchronised. `head` is one of the GEMM's, and `page` and
/// `position` are of a row that is there.
#[device]
unsafe fn store_rows(p: &Gemm, from: u32, first: u32, head: u32, position: u32, page: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let (lane, _) = place_in_group();
        let (piece, second) = (lane % 16, lane / 16);
        macro_rules! store {
            ($line:ident, $to:expr) => {
                unroll!(I < 4; {
                    let $line = I as u32 * 2 + second;
                    let values = Shared::<u8>::from_raw(from + $line * ROW_BYTES + ((piece ^ $line) * 16)).load16(0);
                    let (to, d): (GlobalMut<bf16>, u32) = $to;
                    if first + $line < p.m {
                        to.store16(d as usize, values);
                    }
                })
            };
        }
        if head < p.heads.q_heads {
            let row = p.heads.q.at((first as usize * p.heads.q_heads as usize + head as usize) * HEAD_DIM as usize);
            store!(line, (row.at((line * p.heads.q_heads * HEAD_DIM) as usize), piece * 8));
        } else {
            let (cache, head) = (&p.heads.cache, head - p.heads.q_heads);
            store!(line, {
                let [position, page] = [position, page].map(|v| warp::shuffle_idx(v, line * 4));
                let is_key = head < cache.kv_heads;
                let block = page + if is_key { head } else { head - cache.kv_heads };
                let to = if is_key { cache.key_in(block, position) } else { cache.value_in(block, position) };
                (to, place(position, piece * 8))
            });
        }
    }
}

impl Epilogue for Qkv {
    const GATED: bool = false;
    /// For the lane's two rows: the first sums of squares, and the positions.
    type Early = (Squares, [u32; 2]);
    type Ahead = HeadsAhead;

    #[device]
    unsafe fn early(p: &Gemm, half: &Half) -> (Squares, [u32; 2]) {
        let row = half.lane_row();
        // Rows beyond m are computed as the last row, and not stored.
        // SAFETY: the caller's word.
        let position = |row: u32| unsafe { p.heads.rows.positions.load(row.min(p.m - 1) as usize) };
        // SAFETY: the caller's word.
        (unsafe { load_squares(p, row, 0) }, [position(row), position(row + 8)])
    }

    #[device]
    unsafe fn ahead<const N: u32>(
        p: &Gemm,
        half: &Half,
        _inside: bool,
        (squares, positions): Self::Early,
    ) -> HeadsAhead {
        // SAFETY: the caller's word.
        HeadsAhead { scales: unsafe { scales(p, half.lane_row(), squares) }, positions }
    }

    #[device]
    unsafe fn finish<const N: u32>(p: &Gemm, half: &mut Half, ahead: HeadsAhead, next: &mut impl Next) {
        // SAFETY: the caller's word.
        unsafe {
            let HeadsAhead { scales, positions } = ahead;
            let scales = bias::add::<N, _>(p, half, scales, next);
            let (q_heads, heads) = (p.heads.q_heads, p.n / HEAD_DIM);
            let rotated = (q_heads + p.heads.cache.kv_heads).min(heads);
            let first = half.column / HEAD_DIM;
            let mut words: [HeadWords; 2] = [[0; 32]; 2];
            let mut pages = [0; 2];
            if first + 1 >= q_heads {
                let row = half.lane_row();
                unroll!(R < 2; {
                    let sequence = p.heads.rows.sequences.load((row + 8 * R as u32).min(p.m - 1) as usize);
                    pages[R] = p.heads.cache.block_index(sequence, positions[R] / PAGE_TOKENS, 0);
                });
            }
            if first < rotated {
                let of_first = angles(p, positions[0]);
                let mut factors = [[0f32; 2]; 2];
                unroll!(R < 2; {
                    factors[0][R] = head_factor!(0, R, p, scales[R]);
                    if N > 128 {
                        factors[1][R] = head_factor!(64, R, p, scales[R]);
                    }
                });
                // One row of one head after another, each with its own loads of the norm's weights: there are not
                // enough registers for all at once.
                rotate!(words[0], 0, 0, factors[0][0], head_norm(p, first), of_first);
                warp::sync_warp();
                let of_second = angles(p, positions[1]);
                if N > 128 {
                    // If the second head is one of values, these words are overwritten below.
                    rotate!(words[1], 64, 0, factors[1][0], head_norm(p, first + 1), of_first);
                    warp::sync_warp();
                }
                rotate!(words[0], 0, 1, factors[0][1], head_norm(p, first), of_second);
                if N > 128 {
                    warp::sync_warp();
                    rotate!(words[1], 64, 1, factors[1][1], head_norm(p, first + 1), of_second);
                }
            } else {
                scale_values!(words[0], 0, scales);
            }
            if N > 128 && first + 1 >= rotated {
                scale_values!(words[1], 64, scales);
            }
            next.begin();
            // Other lanes may still be storing the tile before.
            thread::sync_named(half.barrier, GROUP);
            unroll!(H < 2; {
                let head = first + H as u32;
                if H == 0 || N > 128 {
                    if head < heads {
                        let (_, warp) = place_in_group();
                        let staging = half.staging.addr() + warp * 16 * ROW_BYTES;
                        put_rows(staging, words[H]);
                        warp::sync_warp();
                        unroll!(R < 2; {
                            let eight = warp * 2 + R as u32;
                            let (from, first) = (half.staging.addr() + eight * 8 * ROW_BYTES, half.row + eight * 8);
                            store_rows(p, from, first, head, positions[R], pages[R]);
                        });
                        warp::sync_warp();
                    }
                    next.step();
                }
            });
        }
    }
}
