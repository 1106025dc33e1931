//! A step in many launches: for devices that cannot run it in one, for few rows of several sequences, and to compare with.

use cuda_std::{Global, Kernel};
use gpu_kernels::attention::{self, Attend, AttendTiles};
use gpu_kernels::embedding::{self, Embed};
use gpu_kernels::gate::SiluMul;
use gpu_kernels::kv::{Cache, HEAD_DIM};
use gpu_kernels::linear::{self, Linear};
use gpu_kernels::norm::{Norm, RmsNorm};
use gpu_kernels::qkv::{self, SplitHeads};
use gpu_kernels::step::{MAX_ROWS, Rows};
use half::bf16;

use super::{Forward, Pass};
use crate::Error;
use crate::device::{Buffer, Device};

/// What the step in many launches does in launches of its own instead of in its neighbours', for measuring what that gained.
#[derive(Default)]
pub(super) struct Apart {
    norms: Option<Launch<RmsNorm>>,
    /// With the outputs of gate and up.
    silu: Option<(Launch<SiluMul>, [Buffer<f32>; 2])>,
}

/// [`Device::launch`] of a kernel.
type Launch<P> = unsafe fn(&Device, (u32, u32), u32, P) -> Result<(), Error>;

impl Forward {
    /// From now on, [`enqueue`](Self::enqueue) runs `norms`, or `silu` and its product, in launches of their own, by kernels that the caller brings: for
    /// measuring what it gains that it does not. The results differ in their last bits.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn take_apart<N, S>(&mut self, norms: bool, silu: bool) -> Result<(), Error>
    where
        N: Kernel<Params = RmsNorm>,
        S: Kernel<Params = SiluMul>,
    {
        let gate = || self.device.zeroed(self.activation.len());
        self.apart = Apart {
            norms: norms.then_some(Device::launch::<N>),
            silu: if silu { Some((Device::launch::<S>, [gate()?, gate()?])) } else { None },
        };
        Ok(())
    }

    /// Enqueues the norm with this `weight`, if norms have launches of their own.
    ///
    /// # Safety
    /// As [`Device::launch`].
    unsafe fn launch_norm(&self, most_rows: u32, weight: &Buffer<bf16>) -> Result<(), Error> {
        let Some(launch) = self.apart.norms else { return Ok(()) };
        let (dim, eps) = (self.config.hidden_size as u32, self.config.rms_norm_eps);
        let (rows, x, y) = (self.rows(), self.residual.ptr(), self.scaled.ptr_mut());
        let norm = RmsNorm { rows, x, weight: weight.ptr(), y, dim, eps };
        // SAFETY: the caller's word.
        unsafe { launch(&self.device, (1, most_rows), RmsNorm::SHARED_BYTES, norm) }
    }

    /// Enqueues a pass launch by launch.
    pub(super) fn enqueue_launches(&self, pass: &Pass) -> Result<(), Error> {
        let Pass { rows, most_rows, end, tiles, output } = *pass;
        let (c, w) = (&self.config, &self.weights);
        let hidden = c.hidden_size as u32;
        let inner = c.intermediate_size as u32;
        let q_heads = c.num_attention_heads as u32;
        let kv_heads = c.num_key_value_heads as u32;
        let heads = q_heads + 2 * kv_heads;
        let q_size = q_heads * HEAD_DIM;

        let (residual, norm) = (self.residual(), self.norm());
        let norm = if self.apart.norms.is_some() { Norm::default() } else { norm };
        let linear = |weight: &Buffer<bf16>, x: &Buffer<bf16>, n: u32, k: u32| Linear {
            rows,
            x: x.ptr(),
            weight: weight.ptr(),
            up: weight.ptr(),
            norm: Norm::default(),
            y: self.logits.ptr_mut(),
            activation: self.activation.ptr_mut(),
            residual,
            next_norm: w.norm.ptr(),
            n,
            k,
            first_row: 0,
        };

        // SAFETY: every address is a buffer of self, of the size that its kernel's parameter block states; self outlives the work because
        // freeing device memory waits for it.
        unsafe {
            let d = &self.device;
            d.launch::<embedding::embed>((1, most_rows), 0, self.embed(rows))?;
            for (i, (layer, next_norm)) in w.layers.iter().zip(w.next_norms()).enumerate() {
                self.launch_norm(most_rows, &layer.input_norm)?;
                let project = linear(&layer.qkv, &self.scaled, heads * HEAD_DIM, hidden);
                let project = Linear { norm, y: self.qkv.ptr_mut(), ..project };
                self.launch_linear(Kind::Write, most_rows, project)?;
                let split = self.split_heads(rows, i);
                d.launch::<qkv::split_heads>((heads.div_ceil(qkv::HEADS_PER_BLOCK), most_rows), 0, split)?;
                let attend = self.attend(rows, i);
                let splits = end.div_ceil(attention::SPLIT);
                if let Some(tiles) = tiles {
                    let grid = (kv_heads, splits, tiles.count);
                    let attend = AttendTiles { attend, tiles: tiles.list };
                    d.launch::<attention::attend_tiles>(grid, Attend::SHARED_BYTES, attend)?;
                } else {
                    let grid = (kv_heads, splits, Attend::tiles(most_rows, q_heads / kv_heads));
                    d.launch::<attention::attend>(grid, Attend::SHARED_BYTES, attend)?;
                }
                if splits > 1 {
                    d.launch::<attention::combine>((q_heads, most_rows), Attend::COMBINE_SHARED_BYTES, attend)?;
                }
                let output = linear(&layer.output, &self.attended, hidden, q_size);
                let output = Linear { next_norm: layer.post_attention_norm.ptr(), ..output };
                self.launch_linear(Kind::Add, most_rows, output)?;
                self.launch_norm(most_rows, &layer.post_attention_norm)?;
                let gate_up = linear(&layer.gate, &self.scaled, inner, hidden);
                let gate_up = Linear { norm, up: layer.up.ptr(), ..gate_up };
                match &self.apart.silu {
                    None => self.launch_linear(Kind::SwiGlu, most_rows, gate_up)?,
                    Some((launch, [gate, up])) => {
                        let up_only = Linear { weight: layer.up.ptr(), y: up.ptr_mut(), ..gate_up };
                        self.launch_linear(Kind::Write, most_rows, Linear { y: gate.ptr_mut(), ..gate_up })?;
                        self.launch_linear(Kind::Write, most_rows, up_only)?;
                        let y = self.activation.ptr_mut();
                        let silu = SiluMul { rows, gate: gate.ptr(), up: up.ptr(), y, n: inner };
                        launch(d, (inner.div_ceil(256), most_rows), 0, silu)?;
                    }
                }
                let down = linear(&layer.down, &self.activation, hidden, inner);
                self.launch_linear(Kind::Add, most_rows, Linear { next_norm: next_norm.ptr(), ..down })?;
            }
            if let Some(first_row) = output.first() {
                self.launch_norm(most_rows, &w.norm)?;
                let head = Linear { first_row, ..self.head(rows, self.scaled.ptr(), norm) };
                self.launch_linear(Kind::Write, most_rows - first_row, head)?;
            }
        }
        Ok(())
    }

    /// Picks the width of a linear kernel, and takes as many launches as the rows need; all widths give the same bits.
    ///
    /// # Safety
    /// As [`Device::launch`].
    pub(super) unsafe fn launch_linear(&self, kind: Kind, most_rows: u32, p: Linear) -> Result<(), Error> {
        let strips = if kind == Kind::SwiGlu { Linear::swiglu_strips(p.n) } else { Linear::strips(p.n) };
        let d = &self.device;
        for first in (0..most_rows).step_by(MAX_ROWS as usize) {
            let width = match most_rows - first {
                0..=8 => 8,
                9..=16 => 16,
                _ => 64,
            };
            let shared = Linear::shared_bytes(width);
            let p = Linear { first_row: p.first_row + first, ..p };
            // SAFETY: the caller's word.
            unsafe {
                match (kind, width) {
                    (Kind::Write, 8) => d.launch::<linear::linear_8>(strips, shared, p)?,
                    (Kind::Write, 16) => d.launch::<linear::linear_16>(strips, shared, p)?,
                    (Kind::Write, _) => d.launch::<linear::linear_64>(strips, shared, p)?,
                    (Kind::Add, 8) => d.launch::<linear::linear_add_8>(strips, shared, p)?,
                    (Kind::Add, 16) => d.launch::<linear::linear_add_16>(strips, shared, p)?,
                    (Kind::Add, _) => d.launch::<linear::linear_add_64>(strips, shared, p)?,
                    (Kind::SwiGlu, 8) => d.launch::<linear::swiglu_8>(strips, shared, p)?,
                    (Kind::SwiGlu, 16) => d.launch::<linear::swiglu_16>(strips, shared, p)?,
                    (Kind::SwiGlu, _) => d.launch::<linear::swiglu_64>(strips, shared, p)?,
                }
            }
        }
        Ok(())
    }

    /// The head over the rows of `x`, from the first on.
    pub(super) fn head(&self, rows: Rows, x: Global<bf16>, norm: Norm) -> Linear {
        let weight = self.weights.head.as_ref().unwrap_or(&self.weights.embed);
        Linear {
            rows,
            x,
            weight: weight.ptr(),
            up: weight.ptr(),
            norm,
            y: self.logits.ptr_mut(),
            activation: self.activation.ptr_mut(),
            residual: self.residual(),
            next_norm: self.weights.norm.ptr(),
            n: self.config.vocab_size as u32,
            k: self.config.hidden_size as u32,
            first_row: 0,
        }
    }

    /// The embedding of these rows, for the first layer.
    fn embed(&self, rows: Rows) -> Embed {
        self.weights.embedding(rows, self.residual())
    }

    /// A layer's cache, with all page tables.
    fn layer_cache(&self, layer: usize) -> Cache {
        self.cache.params(layer, self.page_table.ptr(), self.table_stride())
    }

    /// The heads of these rows in a layer.
    fn split_heads(&self, rows: Rows, layer: usize) -> SplitHeads {
        let norms = &self.weights.layers[layer];
        let all = self.workspace(rows).split_heads(norms.k_norm.ptr(), self.layer_cache(layer));
        SplitHeads { q_norm: norms.q_norm.ptr(), q: self.q.ptr_mut(), ..all }
    }

    /// Attention of these rows in a layer.
    fn attend(&self, rows: Rows, layer: usize) -> Attend {
        Attend { q: self.q.ptr(), cache: self.layer_cache(layer), ..self.workspace(rows).attend() }
    }
}

/// What a linear layer does with its sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Write,
    Add,
    SwiGlu,
}
