//! Passes of models whose GEMMs are of e4m3. They multiply the codes of activations, and every GEMM is a launch of
//! [`gpu_kernels::gemm`], however few rows there are.

use gpu_kernels::batch::{self, PickRows};
use gpu_kernels::embedding;
use gpu_kernels::gemm::{SPAN, TILE_ROWS};
use gpu_kernels::linear::{Linear, N_TILE};
use gpu_kernels::norm::Residual;
use half::bf16;
use model::Config;
use model::plan::{self, Input, LayerPlan};

use super::{Forward, Pass};
use crate::Error;
use crate::device::{Buffer, Device, TensorMaps};
use crate::e4m3::Activations;
use crate::gemm;

/// The memory that only these passes need.
pub(super) struct Coded {
    activations: Activations,
    /// The tensor map of the activations that SwiGLU writes.
    out: TensorMaps,
    spans: Buffer<f32>,
    /// `[rows, hidden]`: the input of the output head on the unfused path.
    for_head: Buffer<bf16>,
}

impl Coded {
    /// Rows that GEMMs write in a pass over `rows` rows: whole tiles.
    pub const fn rows(rows: usize) -> usize {
        rows.next_multiple_of(TILE_ROWS as usize)
    }

    /// Bytes that a pass over `rows` rows takes in addition to those of a pass in bf16.
    pub fn bytes(config: &Config, rows: usize) -> u64 {
        let (whole, LayerPlan { hidden, attention, .. }) = (Self::rows(rows), config.plan);
        let of_gemms = attention.qkv_size() * 4 + config.plan.activation_size() * 2;
        let written = hidden * 6 + hidden / N_TILE as usize * 4 + of_gemms;
        let own = (whole - rows) * written + whole * hidden / SPAN as usize * 4 + rows * hidden * 2;
        own as u64 + Activations::bytes(config, rows)
    }

    /// Allocates the memory for passes over up to `rows` rows. `activation` is the buffer that SwiGLU writes.
    pub fn new(device: &Device, config: &Config, rows: usize, activation: &Buffer<bf16>) -> Result<Self, Error> {
        let hidden = config.plan.hidden;
        Ok(Self {
            activations: Activations::new(device, config, rows)?,
            out: device.tensor_maps(&[gemm::out(activation.ptr(), Self::rows(rows), config.plan.activation_size())])?,
            spans: device.zeroed(Self::rows(rows) * hidden / SPAN as usize)?,
            for_head: device.zeroed(rows * hidden)?,
        })
    }
}

impl Forward {
    /// The residual stream of these passes, with spans.
    fn coded_residual(&self, of: &Coded) -> Residual {
        Residual { spans: of.spans.ptr_mut(), ..self.residual() }
    }

    /// Enqueues the embedding of a pass's rows.
    ///
    /// # Safety
    /// As [`Device::launch`].
    pub(super) unsafe fn enqueue_coded_embedding(&self, of: &Coded, pass: &Pass) -> Result<(), Error> {
        let embed = self.weights.embedding(pass.rows, self.coded_residual(of));
        // SAFETY: the caller's word.
        unsafe { self.device.launch::<embedding::embed_spans>((1, pass.most_rows), 0, embed) }
    }

    /// Enqueues a GEMM of a layer over up to `m` rows. `attended_in_order` says whether attention's output is in plain
    /// order, and not in the order of slots.
    ///
    /// # Safety
    /// As [`Device::launch`].
    ///
    /// # Panics
    /// If the weights are not in e4m3: a bug of the caller.
    pub(super) unsafe fn enqueue_coded_gemm(
        &self,
        of: &Coded,
        m: u32,
        layer: usize,
        gemm: &plan::Gemm,
        attended_in_order: bool,
    ) -> Result<(), Error> {
        let (x, in_order) = match gemm.input {
            Input::Normed => (self.scaled.ptr(), false),
            Input::Attended => (self.attended.ptr(), attended_in_order),
            Input::Activation => (self.activation.ptr(), false),
        };
        let (epilogue, p) = self.launched_gemm(layer, gemm, m, self.coded_residual(of), of.out.ptr(0));
        let weights = self.weights.e4m3().expect("weights in e4m3");
        // SAFETY: the caller's word; buffers have room for whole tiles of rows.
        unsafe {
            of.activations.quantize(&self.device, (layer, gemm), x, [0, m], in_order)?;
            of.activations.enqueue(&self.device, epilogue, weights, (layer, gemm), p)
        }
    }

    /// Enqueues the output head over a pass's rows from `first_row` on, by the unfused path's kernel.
    ///
    /// # Safety
    /// As [`Device::launch`].
    pub(super) unsafe fn enqueue_coded_head(&self, of: &Coded, pass: &Pass, first_row: u32) -> Result<(), Error> {
        let (scaled, squares) = (self.scaled.ptr(), self.squares.ptr());
        // The same rows, with each element where linear layers look for it. The squares stay where they are.
        let to = Residual { scaled: of.for_head.ptr_mut(), ..self.residual() };
        let pick = PickRows { rows: Default::default(), first: 0, scaled, squares, to };
        let head = Linear { first_row, ..self.head(pass.rows, of.for_head.ptr(), self.norm()) };
        // SAFETY: the caller's word.
        unsafe {
            self.device.launch::<batch::pick_rows>((1, pass.most_rows), 0, pick)?;
            self.launch_linear(self.config.head().epilogue, pass.most_rows - first_row, head)
        }
    }
}
