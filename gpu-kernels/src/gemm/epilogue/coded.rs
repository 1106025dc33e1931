//! Gated activations as codes, for a GEMM of e4m3.
//!
//! A [group](e4m3::GROUP) has the features of two tiles. A CTA takes both tiles, one after the other. A lane keeps its
//! part of the first tile's activations in shared memory until the second is done.
//!
//! # Safety
//! As for [all epilogues](super). A CTA takes the two tiles of a group one after the other, with nothing between them
//! that writes to the half's staging memory; there is room for codes and scales of whole tiles of rows. The four lanes
//! of a row call [`put`] together, with their parts of the group's two tiles, the second of which is the half's.

use cuda_std::shared::Shared;
use cuda_std::{device, thread, warp, wgmma};

use super::{BoxWords, Epilogue, Half, Next, Squares, SwiGlu, gate_pair};
use crate::e4m3;
use crate::gemm::{BOX, GROUP, Gemm};

/// Gated activations as [codes](Gemm::codes).
pub struct SwiGluCoded;

impl Epilogue for SwiGluCoded {
    const GATED: bool = true;
    const IN_PAIRS: bool = true;
    type Early = Squares;
    /// The factors of the lane's two rows.
    type Ahead = [f32; 2];

    #[device]
    unsafe fn early(p: &Gemm, half: &Half) -> Squares {
        // SAFETY: the caller's word.
        unsafe { SwiGlu::early(p, half) }
    }

    #[device]
    unsafe fn ahead<const N: u32>(p: &Gemm, half: &Half, inside: bool, squares: Squares) -> [f32; 2] {
        // SAFETY: the caller's word.
        unsafe { SwiGlu::ahead::<N>(p, half, inside, squares) }
    }

    #[device]
    unsafe fn finish<const N: u32>(p: &Gemm, half: &mut Half, scales: [f32; 2], next: &mut impl Next) {
        let words = gated!(0, scales);
        // SAFETY: the caller's word; the place is the lane's own.
        unsafe {
            next.begin();
            let kept: Shared<u8> = half.staging.at((thread::opaque(thread::thread_idx_x()) % GROUP * 16) as usize);
            if (half.column / BOX).is_multiple_of(2) {
                unroll!(I < 4; {
                    kept.at(I * GROUP as usize * 16).store16(0, words[I]);
                });
            } else {
                let mut first = [[0; 4]; 4];
                unroll!(I < 4; {
                    first[I] = kept.at(I * GROUP as usize * 16).load16(0);
                });
                put(p, half, [first, words]);
            }
        }
    }
}

/// Writes the lane's part of a group. `tiles` are its features of both tiles.
#[device]
unsafe fn put(p: &Gemm, half: &Half, tiles: [BoxWords; 2]) {
    let quad_lane = thread::opaque(thread::lane_id()) % 4;
    let (row, first) = (half.lane_row(), half.column - BOX);
    // SAFETY: the caller's word: there is room for whole tiles of rows.
    unsafe {
        unroll!(R < 2; {
            let mut most = 0;
            unroll!(T < 2; {
                unroll!(H < 2; {
                    let [a, b, c, d] = tiles[T][2 * H + R];
                    most = most.max(e4m3::largest_bits([a, b])).max(e4m3::largest_bits([c, d]));
                });
            });
            most = most.max(warp::shuffle_xor(most, 1));
            most = most.max(warp::shuffle_xor(most, 2));
            let [scale, inverse] = e4m3::scale_of(f32::from_bits(most));
            let row = row + 8 * R as u32;
            // A lane has eight slots of every 32.
            let to = p.codes.codes.at(row as usize * p.n as usize + (first + quad_lane * 8) as usize);
            unroll!(T < 2; {
                unroll!(H < 2; {
                    let [a, b, c, d] = tiles[T][2 * H + R];
                    let codes = [e4m3::codes_of_four([a, b], inverse), e4m3::codes_of_four([c, d], inverse)];
                    to.at(T * BOX as usize + H * 32).cast().store(0, codes);
                });
            });
            p.codes.put_scale_if(quad_lane == 0, row, first, scale);
        });
    }
}
