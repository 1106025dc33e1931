//! Quantises activations to e4m3, for GEMMs of many rows.

use cuda_std::{Global, bf16, dependent_launch, kernel, math, thread, warp};

use super::{CodedRows, GROUP, codes, largest, scale_of};

/// Elements of a lane.
const OF_LANE: u32 = 16;
/// Lanes of a group.
const LANES: u32 = GROUP / OF_LANE;
const THREADS: u32 = 256;

/// Parameters of [`quantize_rows`]. Grid: (the number of groups, rounded up as [`groups`](super::groups) does; the
/// number of rows from the first on, divided by [`Self::ROWS`] and rounded up).
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct QuantizeRows {
    /// `[rows, k]`, 16-byte aligned, each row in the order of [`slot`](crate::linear::slot) unless
    /// [`in_order`](Self::in_order).
    pub x: Global<bf16>,
    /// Where the codes and scales go.
    pub to: CodedRows,
    /// The first row to quantise.
    pub first_row: u32,
    /// One beyond the last row to quantise.
    pub m: u32,
    /// Elements of a row, a multiple of [`GROUP`].
    pub k: u32,
    /// 1 if the elements of `x` lie in natural order, else 0.
    pub in_order: u32,
}

impl QuantizeRows {
    /// Rows of a CTA.
    pub const ROWS: u32 = THREADS / LANES;
}

/// Quantises rows of activations, with a scale for each group of a row. It may be launched early
/// ([`dependent_launch`]).
#[kernel(threads = THREADS)]
pub unsafe fn quantize_rows(p: QuantizeRows) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        dependent_launch::allow_next();
        // A CTA takes the same group of all of its rows: then neighbouring lanes write neighbouring scales.
        let (group, lane) = (thread::block_idx_x(), thread::thread_idx_x() % LANES);
        let row = p.first_row + thread::block_idx_y() * QuantizeRows::ROWS + thread::thread_idx_x() / LANES;
        let is_there = row < p.m && group * GROUP < p.k;
        let first = row as usize * p.k as usize + (group * GROUP + lane * OF_LANE) as usize;
        dependent_launch::wait();
        let mut pairs = [0; 8];
        if is_there {
            if p.in_order == 0 {
                let x = p.x.at(first);
                let (low, high) = (x.load16(0), x.load16(8));
                unroll!(I < 4; {
                    pairs[I] = low[I];
                    pairs[I + 4] = high[I];
                });
            } else {
                // An MMA's slots have four elements of every eight: two of these go to the lower slots, two to the
                // upper ones.
                let x = p.x.at(first - (lane % 2 * (OF_LANE - 4)) as usize).cast::<[u32; 2]>();
                unroll!(I < 4; {
                    [pairs[I], pairs[I + 4]] = x.load(2 * I);
                });
            }
        }
        let mut most = largest(&pairs);
        unroll!(I < 3; {
            most = math::max(most, warp::shuffle_xor(most, 1 << I));
        });
        let [scale, inverse] = scale_of(most);
        if is_there {
            p.to.codes.at(first).cast::<u32>().store16(0, codes(&pairs, inverse));
        }
        if lane == 0 && row < p.m {
            p.to.scales.store((group * p.to.x_rows + row) as usize, scale);
        }
    }
}
