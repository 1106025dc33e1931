//! Token embedding: `out[row, :] = table[token[row], :]`, widened to f32.

use cuda_std::{Global, GlobalMut, bf16, kernel, math, thread};

use crate::step::Rows;

/// Parameters of [`embed`]. Grid: (1, rows).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    /// The rows of this step.
    pub rows: Rows,
    /// `[vocab, dim]`.
    pub table: Global<bf16>,
    /// `[rows, dim]`, the residual stream.
    pub out: GlobalMut<f32>,
    /// Hidden size, a multiple of 8.
    pub dim: u32,
    /// Rows of the table; a token id beyond it (a bug) reads its last row rather than other memory.
    pub vocab: u32,
}

/// Gathers the embedding of each row's token.
#[kernel(threads = 256)]
pub unsafe fn embed(p: Embed) {
    unsafe {
        let row = thread::block_idx_y();
        if row >= p.rows.count.load(0) {
            return;
        }
        let token = p.rows.tokens.load(row as usize).min(p.vocab - 1);
        let source = p.table.at(token as usize * p.dim as usize);
        let out = p.out.at(row as usize * p.dim as usize);
        let mut i = thread::thread_idx_x();
        while i < p.dim / 8 {
            let words = source.load16_nc(i as usize * 8);
            let mut j = 0;
            while j < 4 {
                let [low, high] = math::unpack_bf16(words[j]);
                out.store(i as usize * 8 + j * 2, low);
                out.store(i as usize * 8 + j * 2 + 1, high);
                j += 1;
            }
            i += 256;
        }
    }
}
