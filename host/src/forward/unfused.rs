//! The unfused path: a step with one launch for each operator. For devices without the other kernels, and for
//! comparison.

use cuda_std::Global;
use gpu_kernels::attention::{self, Attend, AttendTiles};
use gpu_kernels::embedding::{self, Embed};
use gpu_kernels::kv::Cache;
use gpu_kernels::linear::{self, Linear};
use gpu_kernels::norm::Norm;
use gpu_kernels::qkv::{self, SplitHeads};
use gpu_kernels::step::{MAX_ROWS, Rows};
use half::bf16;
use model::plan::{Epilogue, Gemm, Input, Matrix, Operator};

use super::{Forward, Pass};
use crate::Error;

impl Forward {
    /// Enqueues a pass with one launch for each operator of the plan, in order.
    pub(super) fn enqueue_unfused(&self, pass: &Pass) -> Result<(), Error> {
        let Pass { rows, most_rows, .. } = *pass;
        // SAFETY: every address is a buffer of self, of the size that its kernel's parameter block states; self
        // outlives the work because freeing device memory waits for it.
        unsafe {
            match &self.coded {
                Some(coded) => self.enqueue_coded_embedding(coded, pass)?,
                None => self.device.launch::<embedding::embed>((1, most_rows), 0, self.embed(rows))?,
            }
            self.take_states(pass, 0)?;
            self.enqueue_layers(pass)
        }
    }

    /// Enqueues the copy of the residual stream after `layers` layers, if it is one of the wanted hidden states.
    ///
    /// # Safety
    /// As [`Device::launch`].
    unsafe fn take_states(&self, pass: &Pass, layers: usize) -> Result<(), Error> {
        let Some(states) = self.wanted_states() else { return Ok(()) };
        // SAFETY: the caller's word.
        unsafe { states.take(&self.device, pass.rows, pass.most_rows, layers, self.residual.ptr()) }
    }

    /// Enqueues all layers, with one launch for each operator, and the wanted logits.
    ///
    /// # Safety
    /// As [`Device::launch`]. The residual stream holds the rows' embeddings.
    pub(super) unsafe fn enqueue_layers(&self, pass: &Pass) -> Result<(), Error> {
        let Pass { rows, most_rows, output, .. } = *pass;
        let (d, plan) = (&self.device, self.config.plan);
        // SAFETY: the caller's word.
        unsafe {
            for i in 0..self.config.num_hidden_layers {
                self.weights.make_layer(d, i)?;
                for operator in plan.operators() {
                    match operator {
                        Operator::Gemm(gemm) => match &self.coded {
                            // On this path, attention writes its output in plain order.
                            Some(coded) => self.enqueue_coded_gemm(coded, most_rows, i, &gemm, true)?,
                            None => self.launch_gemm(rows, most_rows, i, &gemm)?,
                        },
                        Operator::Heads(_) => {
                            let split = self.split_heads(rows, i);
                            let blocks = split.heads().div_ceil(qkv::HEADS_PER_BLOCK);
                            d.launch::<qkv::split_heads>((blocks, most_rows), 0, split)?;
                        }
                        Operator::Attention(_) => self.launch_attention(pass, i)?,
                    }
                }
                self.take_states(pass, i + 1)?;
            }
            if let (Some(first_row), Some(coded)) = (output.first(), &self.coded) {
                self.enqueue_coded_head(coded, pass, first_row)?;
            } else if let Some(first_row) = output.first() {
                let head = Linear { first_row, ..self.head(rows, self.scaled.ptr(), self.norm()) };
                self.launch_linear(self.config.head().epilogue, most_rows - first_row, head)?;
            }
        }
        Ok(())
    }

    /// Enqueues a GEMM of a layer.
    ///
    /// # Safety
    /// As [`Device::launch`].
    unsafe fn launch_gemm(&self, rows: Rows, most_rows: u32, layer: usize, gemm: &Gemm) -> Result<(), Error> {
        let w = &self.weights;
        let (x, norm) = match (gemm.input, &self.pairs) {
            // The rows of a head are normed already.
            (Input::Normed, Some(pairs)) if gemm.matrix == Matrix::Qkv => (pairs.rows(), Norm::default()),
            (Input::Normed, _) => (self.scaled.ptr(), self.norm()),
            (Input::Attended, _) => (self.attended.ptr(), Norm::default()),
            (Input::Activation, _) => (self.activation.ptr(), Norm::default()),
        };
        let linear = Linear {
            rows,
            x,
            weights: w.stream.matrix(layer, gemm.matrix),
            norm,
            y: self.qkv.ptr_mut(),
            activation: self.activation.ptr_mut(),
            residual: self.residual(),
            next_norm: w.norm_after(layer, gemm).ptr(),
            bias: w.bias(layer, gemm),
            n: gemm.n as u32,
            first_row: 0,
        };
        // SAFETY: the caller's word.
        unsafe { self.launch_linear(gemm.epilogue, most_rows, linear) }
    }

    /// Enqueues attention of a layer.
    ///
    /// # Safety
    /// As [`Device::launch`].
    unsafe fn launch_attention(&self, pass: &Pass, layer: usize) -> Result<(), Error> {
        let Pass { rows, most_rows, end, tiles, .. } = *pass;
        let (d, attend, splits) = (&self.device, self.attend(rows, layer), end.div_ceil(attention::SPLIT));
        let (q_heads, kv_heads) = (attend.q_heads, attend.cache.kv_heads);
        // SAFETY: the caller's word.
        unsafe {
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
        }
        Ok(())
    }

    /// Enqueues a linear layer. Picks the kernel's width by the number of rows, and uses several launches if one has
    /// too few rows. All widths give the same bits.
    ///
    /// # Safety
    /// As [`Device::launch`].
    pub(super) unsafe fn launch_linear(&self, epilogue: Epilogue, most_rows: u32, p: Linear) -> Result<(), Error> {
        let (d, n_tiles) = (&self.device, p.weights.n_tiles);
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
                match (epilogue, width) {
                    (Epilogue::Write { .. }, 8) => d.launch::<linear::linear_8>(n_tiles, shared, p)?,
                    (Epilogue::Write { .. }, 16) => d.launch::<linear::linear_16>(n_tiles, shared, p)?,
                    (Epilogue::Write { .. }, _) => d.launch::<linear::linear_64>(n_tiles, shared, p)?,
                    (Epilogue::Add, 8) => d.launch::<linear::linear_add_8>(n_tiles, shared, p)?,
                    (Epilogue::Add, 16) => d.launch::<linear::linear_add_16>(n_tiles, shared, p)?,
                    (Epilogue::Add, _) => d.launch::<linear::linear_add_64>(n_tiles, shared, p)?,
                    (Epilogue::SwiGlu, 8) => d.launch::<linear::swiglu_8>(n_tiles, shared, p)?,
                    (Epilogue::SwiGlu, 16) => d.launch::<linear::swiglu_16>(n_tiles, shared, p)?,
                    (Epilogue::SwiGlu, _) => d.launch::<linear::swiglu_64>(n_tiles, shared, p)?,
                }
            }
        }
        Ok(())
    }

    /// The parameters of the output head over `x`, from row 0 on.
    pub(super) fn head(&self, rows: Rows, x: Global<bf16>, norm: Norm) -> Linear {
        Linear {
            rows,
            x,
            weights: self.weights.stream.matrix(self.config.num_hidden_layers, Matrix::Head),
            norm,
            y: self.logits.ptr_mut(),
            activation: self.activation.ptr_mut(),
            residual: self.residual(),
            next_norm: Global::default(),
            bias: Global::default(),
            n: self.config.vocab_size as u32,
            first_row: 0,
        }
    }

    /// The parameters of the embedding of these rows.
    fn embed(&self, rows: Rows) -> Embed {
        self.weights.embedding(rows, self.residual())
    }

    /// A layer's cache, with the page tables of all sequences.
    fn layer_cache(&self, layer: usize) -> Cache {
        self.cache.params(layer, self.page_table.ptr(), self.table_stride())
    }

    /// The parameters of the kernel that splits these rows' heads in a layer.
    fn split_heads(&self, rows: Rows, layer: usize) -> SplitHeads {
        let norms = &self.weights.layers[layer];
        let all = self.workspace(rows).split_heads(norms.k_norm.ptr(), self.layer_cache(layer));
        SplitHeads { q_norm: norms.q_norm.ptr(), q: self.q.ptr_mut(), ..all }
    }

    /// The parameters of attention of these rows in a layer.
    fn attend(&self, rows: Rows, layer: usize) -> Attend {
        Attend { q: self.q.ptr(), cache: self.layer_cache(layer), ..self.workspace(rows).attend() }
    }
}
