//! Passes with many rows: their GEMMs are launches of [`gpu_kernels::gemm`], attention is a launch for each layer, and
//! the head is one for each [`MAX_BATCHED_ROWS`] of the rows.

use cuda_std::Global;
use cuda_std::tensor::{Matrix, TensorMap};
use gpu_kernels::batched::{self, BatchedStep, MAX_BATCHED_ROWS, Phase};
use gpu_kernels::embedding;
use gpu_kernels::gemm::Gemm;
use gpu_kernels::linear::N_TILE;
use gpu_kernels::norm::{Residual, SPAN};
use model::plan::{self, Epilogue, Operator};

use super::{
    Batched, LAYER_PHASES, MOST_PASS_ROWS, PackedPages, TILE_ROWS, TILE_ROWS_OF_GEMM, for_each_program, height_of,
    input_map,
};
use crate::Error;
use crate::device::{Buffer, TensorMaps};
use crate::forward::{Forward, Pass, RowOutput, Tiles};
use crate::gemm;

/// What only these passes need.
pub struct Many {
    /// Passes with this many rows or more are such passes.
    pub(super) from: u32,
    /// The tensor map of the activations that SwiGLU writes.
    out: TensorMaps,
    spans: Buffer<f32>,
    /// CTAs of a launch of attention.
    attend_grid: u32,
    /// The share of each of these CTAs' warps in attention, or of each CTA of the batched kernel.
    assignments: Buffer<u32>,
    /// As [`BatchedStep::arrivals`], for the launches of attention.
    arrivals: Buffer<u32>,
    beside: gemm::Beside,
    /// The head over the rows from [`MAX_BATCHED_ROWS`] on, so many at a time.
    heads: Vec<HeadPart>,
}

/// The head over some of a pass's rows.
struct HeadPart {
    /// The tensor maps of these rows' input, in the order of [`TILE_ROWS`]. The programs have their addresses.
    _maps: TensorMaps,
    /// The head's phase of each of [`PROGRAMS`]: with logits as the result, and with best tokens instead.
    programs: Vec<[Buffer<u64>; 2]>,
}

impl Forward {
    /// Allocates what these passes need beside the [rest](Batched).
    pub(super) fn prepare_many(&self, grid: u32, maps: &TensorMaps, packed: &PackedPages) -> Result<Many, Error> {
        let (d, plan, rows) = (&self.device, &self.config.plan, self.room.rows);
        let attend_grid = d.sms();
        let sharers = grid.max(BatchedStep::ATTEND_WARPS * attend_grid);
        let parts = rows.min(MOST_PASS_ROWS as usize) / MAX_BATCHED_ROWS as usize;
        Ok(Many {
            from: d.capabilities().tuning().gemm_rows,
            out: d.tensor_maps(&[gemm::out(self.activation.ptr(), rows, plan.activation_size())])?,
            spans: d.zeroed(rows * plan.hidden / SPAN as usize)?,
            attend_grid,
            assignments: d.zeroed(4 * sharers as usize)?,
            arrivals: d.zeroed(self.arrivals_len(attend_grid))?,
            beside: gemm::Beside::new(d)?,
            heads: (1..parts).map(|part| self.head_part(grid, maps, packed, part)).collect::<Result<_, _>>()?,
        })
    }

    /// The head over the rows of part number `part`, each of [`MAX_BATCHED_ROWS`] rows.
    fn head_part(&self, grid: u32, all: &TensorMaps, packed: &PackedPages, part: usize) -> Result<HeadPart, Error> {
        let (hidden, first) = (self.config.plan.hidden, part * MAX_BATCHED_ROWS as usize);
        // SAFETY: both have room for whole parts of rows.
        let (x, y) =
            unsafe { (self.scaled.ptr().at(first * hidden), self.logits.ptr_mut().at(first * self.config.vocab_size)) };
        let rows = (self.room.rows - first) as u64;
        let matrices = TILE_ROWS.map(|tile_rows| Matrix::dense(x.addr(), rows, hidden as u64, tile_rows));
        let maps = self.device.tensor_maps(&matrices)?;
        let upload = |program: (u32, u32), kind| {
            let x = maps.ptr(height_of(program.0));
            let head = self.phases(grid, all, packed, program, kind).pop().expect("the head is last");
            self.device.upload(Phase::words(&[Phase { x, y, ..head }]))
        };
        Ok(HeadPart { programs: for_each_program(upload)?, _maps: maps })
    }

    /// The parameters of a layer's GEMM of up to `m` rows as a launch of its own, without its input `x`. `residual` is
    /// the residual stream, with spans. `activation` is the map of the activations that SwiGLU writes.
    pub(in crate::forward) fn launched_gemm(
        &self,
        layer: usize,
        gemm: &plan::Gemm,
        m: u32,
        residual: Residual,
        activation: Global<TensorMap>,
    ) -> (gemm::Epilogue, Gemm) {
        let (c, w) = (&self.config, &self.weights);
        let (epilogue, out) = match gemm.epilogue {
            Epilogue::Write { .. } => (gemm::Epilogue::Write, Global::default()),
            Epilogue::Add => (gemm::Epilogue::Add, Global::default()),
            Epilogue::SwiGlu => (gemm::Epilogue::SwiGlu, activation),
        };
        let p = gemm::of_layer(w, layer, gemm, m, residual, c.rms_norm_eps);
        (epilogue, Gemm { out, y: self.qkv.ptr_mut(), ..p })
    }

    /// Enqueues a pass in which GEMMs are launches of their own, and attention and the end are phases. The bits are the
    /// same.
    pub(super) fn enqueue_many(&self, of: &Batched, pass: &Pass, tiles: Tiles) -> Result<Option<Global<u64>>, Error> {
        let (c, w, d) = (&self.config, &self.weights, &self.device);
        let residual = Residual { spans: of.many.spans.ptr_mut(), ..self.residual() };
        // Then the head has several launches, so the last GEMM is none of theirs.
        let in_parts = pass.most_rows > MAX_BATCHED_ROWS;
        if in_parts && pass.output == RowOutput::Best {
            of.best.enqueue_clear()?;
        }
        let height = height_of(TILE_ROWS_OF_GEMM);
        // SAFETY: every address is a buffer of self or of the model, of the size that the parameter block states, with
        // room for whole tiles of rows.
        unsafe {
            match &self.coded {
                Some(coded) => self.enqueue_coded_embedding(coded, pass)?,
                None => d.launch::<embedding::embed_spans>((1, pass.most_rows), 0, w.embedding(pass.rows, residual))?,
            }
        }
        let last = w.layers.len() - 1;
        for i in 0..=last {
            w.make_layer(d, i)?;
            for operator in c.plan.operators() {
                match operator {
                    Operator::Gemm(gemm) if let Some(coded) = &self.coded => {
                        // SAFETY: as for the embedding above.
                        unsafe { self.enqueue_coded_gemm(coded, pass.most_rows, i, &gemm, false)? };
                    }
                    // Enqueued below, in one launch with the head.
                    Operator::Gemm(gemm) if i == last && gemm.matrix == plan::Matrix::Down && !in_parts => {}
                    Operator::Gemm(gemm) => {
                        let (epilogue, p) = self.launched_gemm(i, &gemm, pass.most_rows, residual, of.many.out.ptr(0));
                        let p = Gemm { x: of.maps.ptr(input_map(gemm.input, height)), ..p };
                        // SAFETY: as for the embedding above.
                        unsafe { gemm::enqueue(d, &of.many.beside, epilogue, p)? };
                    }
                    // The attention phase splits the heads.
                    Operator::Heads(_) => {}
                    Operator::Attention(_) => self.enqueue_attention(of, pass, tiles, i)?,
                }
            }
        }
        // The last GEMM, unless it was a launch of its own, and the head.
        let head = LAYER_PHASES * (last + 1) + 1;
        let first = if self.coded.is_some() || in_parts { head } else { head - 1 };
        let count = (head - first) as u32 + u32::from(pass.output != RowOutput::None);
        if count > 0 {
            let end = self.batched_step(of, pass, tiles, (first, count));
            self.launch_batched(of, pass.most_rows, end)?;
            for part in 1..pass.most_rows.div_ceil(MAX_BATCHED_ROWS) {
                self.enqueue_head_part(of, pass, part, end)?;
            }
        }
        Ok((pass.output == RowOutput::Best).then(|| of.best.ptr()))
    }

    /// Enqueues the head over part number `part` of a pass's rows, not the first. `end` is the launch for the first.
    fn enqueue_head_part(&self, of: &Batched, pass: &Pass, part: u32, end: BatchedStep) -> Result<(), Error> {
        let first = part * MAX_BATCHED_ROWS;
        let rows = pass.most_rows - first;
        let programs = &of.many.heads[part as usize - 1].programs[self.program(rows)];
        let phases = programs[usize::from(pass.output == RowOutput::Best)].ptr().cast();
        let mut step = BatchedStep { phases, phase_count: 1, ..end };
        // A part may have fewer rows than the pass. All are computed that there is room for, which is for whole parts.
        // SAFETY: within the buffers.
        unsafe {
            let squares = &mut step.work.residual.squares;
            *squares = squares.at(first as usize * self.config.plan.hidden / N_TILE as usize);
            if !step.best.is_null() {
                step.best = step.best.at(first as usize);
            }
        }
        self.launch_batched(of, rows, step)
    }

    /// Enqueues a layer's attention in a launch of its own. All layers of a pass use the same kernel.
    fn enqueue_attention(&self, of: &Batched, pass: &Pass, tiles: Tiles, layer: usize) -> Result<(), Error> {
        let (c, many) = (&self.config, &of.many);
        let step = self.batched_step(of, pass, tiles, (LAYER_PHASES * layer + 2, 1));
        let (assignments, is_scheduled) = (many.assignments.ptr_mut(), u32::from(layer > 0));
        // If the head has a launch of its own, the ranks of the best tokens are zeroed here.
        let zeroes = self.coded.is_some() && layer + 1 == self.config.num_hidden_layers;
        let best = if zeroes { step.best } else { Default::default() };
        let step = BatchedStep { assignments, is_scheduled, best, ..step };
        let group = c.plan.attention.group() as u32;
        if tiles.count < pass.most_rows || group > BatchedStep::ATTEND_PAIRS {
            // Several rows of a sequence, or more query heads than `attend_batch` takes.
            return self.launch_batched(of, pass.most_rows, step);
        }
        let step = BatchedStep { arrivals: many.arrivals.ptr_mut(), ..step };
        // SAFETY: every address is a buffer of self, of the size that the parameter block states.
        unsafe {
            self.device.launch_early::<batched::attend_batch>(many.attend_grid, BatchedStep::ATTEND_SHARED_BYTES, step)
        }
    }

    /// Sets from how many rows on the GEMMs of a pass with tiles are launches of their own. The default is what is
    /// quickest; this is for tests and measurements.
    pub fn use_gemm_from(&mut self, rows: u32) {
        if let Some(batched) = &mut self.batched {
            batched.many.from = rows;
        }
    }
}
