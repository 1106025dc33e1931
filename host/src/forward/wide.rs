//! Passes over the rows of many sequences on Hopper: the kernels of `gpu_kernels::wide`, with the weights that the [stream](crate::stream) laid out.
//! They give the bits of the launches.

use gpu_kernels::attention::SPLIT;
use gpu_kernels::kv::HEAD_DIM;
use gpu_kernels::linear::STRIP;
use gpu_kernels::norm::Norm;
use gpu_kernels::qkv;
use gpu_kernels::wide::{self, Share, WideAttend};

use super::{Forward, LogitRows, Pass, Tiles};
use crate::Error;
use crate::device::{Buffer, TensorMaps};
use crate::stream::Stream;
use cuda_std::tensor::Matrix;

/// What these passes need beside the memory of all passes.
pub struct Wide {
    /// Of each [`Input`], in tiles of 64 rows and of 128.
    maps: TensorMaps,
    partials: Buffer<f32>,
    arrivals: Buffer<u32>,
    finished: Buffer<u32>,
}

/// What a product reads.
#[derive(Clone, Copy)]
enum Input {
    Scaled,
    Attended,
    Activation,
}

/// What a product does with its sums.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Add,
    SwiGlu,
}

impl Forward {
    /// Makes ready for passes over up to 256 rows of many sequences at the speed of memory, if the weights were
    /// [laid out](Self::lay_out_stream); says whether.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn lay_out_wide(&mut self) -> Result<bool, Error> {
        let Some(stream) = &self.stream else { return Ok(false) };
        let (_, grid) = stream.weights();
        let c = &self.config;
        let inputs =
            [(&self.scaled, c.hidden_size), (&self.attended, c.query_size()), (&self.activation, c.intermediate_size)];
        let matrix = |(buffer, columns): (&Buffer<half::bf16>, usize), tile_rows| Matrix {
            address: buffer.ptr().addr(),
            rows: self.room.rows as u64,
            columns: columns as u64,
            tile_rows,
        };
        let matrices: Vec<Matrix> =
            inputs.iter().flat_map(|&input| [64, 128].map(|rows| matrix(input, rows))).collect();
        let partials = [64, 128].map(|rows| wide::Wide::partial_len(rows, grid));
        self.wide = Some(Wide {
            maps: self.device.tensor_maps(&matrices)?,
            partials: self.device.zeroed(partials[0].max(partials[1]))?,
            arrivals: self.device.zeroed(wide::Wide::arrivals_len(grid))?,
            finished: self.device.zeroed(self.room.rows * c.num_key_value_heads)?,
        });
        Ok(true)
    }

    /// Enqueues a pass; see [`enqueue_rows`](Self::enqueue_rows).
    pub(super) fn enqueue_wide(&self, of: &Wide, stream: &Stream, pass: &Pass, tiles: Tiles) -> Result<(), Error> {
        let Pass { rows, most_rows, end, logits, .. } = *pass;
        let (c, w, d) = (&self.config, &self.weights, &self.device);
        let (hidden, inner) = (c.hidden_size as u32, c.intermediate_size as u32);
        let (q_heads, kv_heads) = (c.num_attention_heads as u32, c.num_key_value_heads as u32);
        let heads = q_heads + 2 * kv_heads;
        let (weights, grid) = stream.weights();
        let residual = self.residual();
        let product = |matrix: usize, input: Input, n: u32, k: u32| wide::Wide {
            rows,
            x: of.maps.ptr(2 * input as usize + usize::from(most_rows > 64)),
            stream: weights,
            base: stream.base(matrix),
            blocks: grid,
            strips: n.div_ceil(STRIP),
            row_tiles: 1,
            share: Share::new(1, grid),
            n,
            k,
            norm: Norm::default(),
            y: self.logits.ptr_mut(),
            activation: self.activation.ptr_mut(),
            residual,
            next_norm: w.norm.ptr(),
            partials: of.partials.ptr_mut(),
            arrivals: of.arrivals.ptr_mut(),
        };
        // SAFETY: every address is a buffer of self, of the size that its kernel's parameter block states; weights are not written by any launch, and all else
        // kernels touch after the launch before is done.
        unsafe {
            d.launch::<wide::wide_embed>((1, most_rows), 0, self.embed(rows))?;
            for (i, (layer, next_norm)) in w.layers.iter().zip(w.next_norms()).enumerate() {
                let project = product(4 * i, Input::Scaled, heads * HEAD_DIM, hidden);
                let project = wide::Wide { norm: self.norm(), y: self.qkv.ptr_mut(), ..project };
                self.launch_wide(Kind::Write, grid, most_rows, project)?;
                let split = self.split_heads(rows, i);
                d.launch_early::<wide::wide_heads>((heads.div_ceil(qkv::HEADS_PER_BLOCK), most_rows), 0, split)?;
                let attend = WideAttend {
                    attend: self.attend(rows, i),
                    tiles: tiles.list,
                    tile_count: tiles.count,
                    arrivals: of.finished.ptr_mut(),
                    splits: end.div_ceil(SPLIT),
                };
                d.launch_early::<wide::wide_attend>(grid, WideAttend::SHARED_BYTES, attend)?;
                let output = product(4 * i + 1, Input::Attended, hidden, q_heads * HEAD_DIM);
                let output = wide::Wide { next_norm: layer.post_attention_norm.ptr(), ..output };
                self.launch_wide(Kind::Add, grid, most_rows, output)?;
                let gate_up = product(4 * i + 2, Input::Scaled, inner, hidden);
                let gate_up = wide::Wide { strips: inner.div_ceil(STRIP / 2), norm: self.norm(), ..gate_up };
                self.launch_wide(Kind::SwiGlu, grid, most_rows, gate_up)?;
                let down = product(4 * i + 3, Input::Activation, hidden, inner);
                self.launch_wide(Kind::Add, grid, most_rows, wide::Wide { next_norm: next_norm.ptr(), ..down })?;
            }
            if logits != LogitRows::None {
                let head = product(4 * w.layers.len(), Input::Scaled, c.vocab_size as u32, hidden);
                self.launch_wide(Kind::Write, grid, most_rows, wide::Wide { norm: self.norm(), ..head })?;
            }
        }
        Ok(())
    }

    /// Picks the height of a product's tiles; both give the same bits.
    ///
    /// # Safety
    /// As `Device::launch_early`.
    unsafe fn launch_wide(&self, kind: Kind, grid: u32, most_rows: u32, p: wide::Wide) -> Result<(), Error> {
        let tile_rows = if most_rows <= 64 { 64 } else { 128 };
        let row_tiles = most_rows.div_ceil(tile_rows);
        let share = Share::new(wide::Wide::tiles(p.strips, row_tiles), grid);
        let (p, shared) = (wide::Wide { row_tiles, share, ..p }, wide::Wide::shared_bytes(tile_rows));
        let d = &self.device;
        // SAFETY: the caller's word.
        unsafe {
            match (kind, tile_rows) {
                (Kind::Write, 64) => d.launch_early::<wide::wide_linear_64>(grid, shared, p),
                (Kind::Write, _) => d.launch_early::<wide::wide_linear_128>(grid, shared, p),
                (Kind::Add, 64) => d.launch_early::<wide::wide_add_64>(grid, shared, p),
                (Kind::Add, _) => d.launch_early::<wide::wide_add_128>(grid, shared, p),
                (Kind::SwiGlu, 64) => d.launch_early::<wide::wide_swiglu_64>(grid, shared, p),
                (Kind::SwiGlu, _) => d.launch_early::<wide::wide_swiglu_128>(grid, shared, p),
            }
        }
    }
}
