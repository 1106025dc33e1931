//! The forward pass over many rows of a prompt, on Hopper: GEMMs and attention of `gpu_kernels::gemm` and
//! `gpu_kernels::prefill_attention`, with activations of their own.
//!
//! Attention sums in another order here than in a decode step. The bits of the cache must depend neither on how a
//! prompt was cut, nor on what was cached before. So every position of a prompt goes through here, and every generated
//! position through the decode step.

use std::ops::RangeInclusive;

use cuda_std::Global;
use gpu_kernels::embedding;
use gpu_kernels::gemm::{Gemm, SPAN, TILE_ROWS};
use gpu_kernels::kv::HEAD_DIM;
use gpu_kernels::linear::N_TILE;
use gpu_kernels::norm::Residual;
use gpu_kernels::prefill_attention::{self, PrefillAttention};
use gpu_kernels::qkv::SplitHeads;
use gpu_kernels::step::Rows;
use half::bf16;
use model::Config;
use model::plan::{self, Input, LayerPlan, Matrix, Operator};

use crate::Error;
use crate::cache::KvCache;
use crate::device::{Buffer, Device, TensorMaps};
use crate::e4m3::Activations;
use crate::forward::{HiddenStates, RowOutput};
use crate::gemm::{self, Epilogue};
use crate::row_buffers::RowBuffers;
use crate::tuning::PASS_ROWS;
use crate::weights::DeviceWeights;

// Tiles of attention are as high as those of the GEMMs. So a row at which a tile of attention begins is also the first
// of a GEMM's tile.
const _: () = assert!(TILE_ROWS == prefill_attention::TILE_ROWS);

/// Activations for a chunk of a prompt, and tensor maps of everything that TMA reads.
pub struct Prefill {
    capacity: usize,
    rows: RowBuffers,
    tiles: Buffer<u32>,
    residual: Buffer<f32>,
    scaled: Buffer<bf16>,
    squares: Buffer<f32>,
    spans: Buffer<f32>,
    /// Queries, then the output of attention. Once that has been multiplied, the activation takes the place of both.
    shared: Buffer<bf16>,
    maps: TensorMaps,
    beside: gemm::Beside,
    /// The activations as codes, for models whose GEMMs are of e4m3.
    codes: Option<Activations>,
}

/// From where on a pass makes [results](Prefill::result). Of the rows before that, the last layer makes keys and
/// values, and no more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Results {
    /// The first row with a result. If none is wanted: as many as the pass has rows.
    pub row: usize,
    /// The first attention tile of those rows: their tiles come last. If no result is wanted: as many as there are
    /// tiles.
    pub tile: usize,
}

/// What a pass reads that [`Prefill`] does not own.
pub(crate) struct PrefillInputs<'a> {
    /// The device.
    pub device: &'a Device,
    /// The model's sizes.
    pub config: &'a Config,
    /// Its weights.
    pub weights: &'a DeviceWeights,
    /// The cache.
    pub cache: &'a KvCache,
    /// `[sequences, table_stride]` pages.
    pub tables: Global<u32>,
    /// Entries of a sequence's table.
    pub table_stride: u32,
    /// `[positions, 64]`: cosines of the rotary embedding.
    pub cos: &'a Buffer<f32>,
    /// `[positions, 64]`: its sines.
    pub sin: &'a Buffer<f32>,
    /// Where hidden states go, if a head drafts from them.
    pub states: Option<&'a HiddenStates>,
}

// Numbers of the tensor maps: those of activations, then from `ACTIVATIONS` on those of each layer's pages.
const SCALED: usize = 0;
const QUERIES: usize = 1;
const ATTENDED: usize = 2;
const ACTIVATION: usize = 3;
const ACTIVATION_OUT: usize = 4;
const ACTIVATIONS: usize = 5;

/// Which tensor map describes what a GEMM reads.
fn input_map(input: Input) -> usize {
    match input {
        Input::Normed => SCALED,
        Input::Attended => ATTENDED,
        Input::Activation => ACTIVATION,
    }
}

/// The epilogue of a GEMM. That of queries, keys and values makes heads at once, so they need no launch of their own.
fn epilogue(gemm: &plan::Gemm) -> Epilogue {
    match gemm.epilogue {
        plan::Epilogue::Write { .. } if gemm.matrix == plan::Matrix::Qkv => Epilogue::Qkv,
        plan::Epilogue::Write { .. } => Epilogue::Write,
        plan::Epilogue::Add => Epilogue::Add,
        plan::Epilogue::SwiGlu => Epilogue::SwiGlu,
    }
}

/// Most rows of a pass when the cache holds `capacity` tokens: whole tiles.
pub(crate) fn rows(capacity: usize) -> usize {
    capacity.min(PASS_ROWS).next_multiple_of(TILE_ROWS as usize)
}

/// How many rows of prompts a pass had best read in: of the numbers of rows in [the tuning
/// table](crate::tuning::Tuning::prompt_rows), in whole tiles, the one whose GEMMs cost least for each row. The last
/// rounds of their tiles leave the fewest SMs idle.
pub fn best_rows(device: &Device, config: &Config) -> u32 {
    let cost = |m, gemm: plan::Gemm| gemm::cost(device, epilogue(&gemm), [m, gemm.weight_rows() as u32, gemm.k as u32]);
    let rows = device.capabilities().tuning().prompt_rows.clone();
    cheapest_rows(rows, |m| config.plan.gemms().map(|gemm| cost(m, gemm)).sum())
}

/// The number of rows in `of` with the least cost for each row, where a pass over `m` rows costs `cost(m)`. Of equal
/// ones the fewest.
fn cheapest_rows(of: RangeInclusive<u32>, cost: impl Fn(u32) -> u64) -> u32 {
    let of_row = |&m: &u32| cost(m) as f64 / f64::from(m);
    let rows = of.step_by(2 * TILE_ROWS as usize);
    rows.min_by(|a, b| of_row(a).total_cmp(&of_row(b))).unwrap_or(PASS_ROWS as u32)
}

/// Enqueues attention over so many `tiles`. `clusters` says whether CTAs work in clusters of 2 × 1; none
/// chooses what is faster. They never do unless each key-value head has an even number of query heads.
///
/// # Safety
/// As [`Device::launch`]: addresses and maps as [`PrefillAttention`] says.
///
/// # Errors
/// A refused launch.
pub unsafe fn enqueue_attention(
    device: &Device,
    p: PrefillAttention,
    tiles: u32,
    clusters: Option<bool>,
) -> Result<(), Error> {
    let cluster_tiles = device.capabilities().tuning().cluster_tiles;
    let can = (p.q_heads / p.cache.kv_heads).is_multiple_of(2);
    let (grid, shared) = ((p.q_heads, tiles), prefill_attention::SHARED_BYTES);
    // SAFETY: the caller's word.
    unsafe {
        if can && clusters.unwrap_or(tiles >= cluster_tiles) {
            device.launch_early::<prefill_attention::prefill_attention_2x1>(grid, shared, p)
        } else {
            device.launch_early::<prefill_attention::prefill_attention>(grid, shared, p)
        }
    }
}

impl Prefill {
    /// Bytes of activations for a cache of `capacity` tokens. Models in e4m3 need memory for their codes besides.
    pub fn bytes(config: &Config, capacity: usize) -> u64 {
        let LayerPlan { hidden, attention, .. } = config.plan;
        let row = hidden * 6
            + hidden / N_TILE as usize * 4
            + hidden / SPAN as usize * 4
            + (attention.query_size() * 4).max(config.plan.activation_size() * 2)
            + 16;
        (rows(capacity) * row) as u64
    }

    /// Bytes of activations' codes for a cache of `capacity` tokens.
    pub(crate) fn code_bytes(config: &Config, capacity: usize) -> u64 {
        Activations::bytes(config, rows(capacity))
    }

    /// Allocates everything for passes over a sequence of up to `capacity` tokens. `in_e4m3` says whether its GEMMs are
    /// of e4m3.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub(crate) fn new(
        device: &Device,
        config: &Config,
        cache: &KvCache,
        capacity: usize,
        in_e4m3: bool,
    ) -> Result<Self, Error> {
        let rows = rows(capacity);
        let LayerPlan { hidden, attention, .. } = config.plan;
        let (inner, q_size) = (config.plan.activation_size(), attention.query_size());
        let scaled: Buffer<bf16> = device.zeroed(rows * hidden)?;
        let shared: Buffer<bf16> = device.zeroed(rows * inner.max(2 * q_size))?;
        let mut matrices = vec![
            gemm::rows(scaled.ptr(), rows, hidden),
            gemm::out(shared.ptr(), rows, q_size),
            gemm::rows(shared.part(rows * q_size), rows, q_size),
            gemm::rows(shared.ptr(), rows, inner),
            gemm::out(shared.ptr(), rows, inner),
        ];
        let pages = |i| prefill_attention::pages(cache.layer(i).addr(), cache.layer_len());
        matrices.extend((0..cache.layers()).map(pages));
        Ok(Self {
            capacity: rows,
            rows: RowBuffers::new(device, rows)?,
            tiles: device.zeroed(rows / TILE_ROWS as usize * 4)?,
            residual: device.zeroed(rows * hidden)?,
            scaled,
            squares: device.zeroed(rows * hidden / N_TILE as usize)?,
            spans: device.zeroed(rows * hidden / SPAN as usize)?,
            shared,
            maps: device.tensor_maps(&matrices)?,
            beside: gemm::Beside::new(device)?,
            codes: if in_e4m3 { Some(Activations::new(device, config, rows)?) } else { None },
        })
    }

    /// Most rows of a pass.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The rows that the next pass runs; a planning kernel fills them in.
    pub fn rows(&self) -> Rows {
        self.rows.rows()
    }

    /// What the head reads of the last pass's rows: the residual stream scaled for the final norm, bf16 `[rows,
    /// hidden]`, each row in the order of [`slot`](gpu_kernels::linear::slot); and the sums of squares of its N-tiles,
    /// `[rows, hidden / 16]`.
    pub fn result(&self) -> (Global<bf16>, Global<f32>) {
        (self.scaled.ptr(), self.squares.ptr())
    }

    /// Enqueues all layers over `count` rows of sequence 0 from position `start` on, which [`rows`](Self::rows) hold by
    /// then. The [result](Self::result) is there for the rows of which `output` wants logits. Of the others the last
    /// layer makes keys and values, and no more.
    ///
    /// # Safety
    /// The parts are those that the pass was made for, and sequence 0 has pages for these positions.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If there is no room for so many rows: a bug of the caller.
    pub(crate) unsafe fn enqueue(
        &mut self,
        parts: &PrefillInputs<'_>,
        start: usize,
        count: usize,
        output: RowOutput,
    ) -> Result<(), Error> {
        assert!(count <= self.capacity, "{count} rows, and room for {}", self.capacity);
        let tiles = prefill_attention::tiles(0, count as u32, 0, start as u32, TILE_ROWS);
        self.tiles.write(0, &tiles.concat())?;
        let from = |row: u32| Results { row: row as usize, tile: (row / TILE_ROWS) as usize };
        let results = output.first().map_or(Results { row: count, tile: tiles.len() }, from);
        // SAFETY: the lists are of self: rows that follow each other, whose tiles are made here; the caller's word for
        // the parts.
        unsafe { self.enqueue_rows(parts, self.rows(), count, (self.tiles.ptr(), tiles.len()), results) }
    }

    /// Enqueues all layers over `count` rows of any sequences. `tiles` lists their attention tiles (see
    /// [`PrefillAttention::tiles`]), of which there are `tile_count`. The [result](Self::result) is there for the rows
    /// from `results` on.
    ///
    /// # Safety
    /// The parts are those that the pass was made for; the lists are as
    /// [`Forward::enqueue_prefill_rows`](crate::forward::Forward::enqueue_prefill_rows) says.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If there is no room for so many rows, or `results` begin beyond the rows or tiles: a bug of the caller.
    pub(crate) unsafe fn enqueue_rows(
        &self,
        parts: &PrefillInputs<'_>,
        rows: Rows,
        count: usize,
        (tiles, tile_count): (Global<u32>, usize),
        results: Results,
    ) -> Result<(), Error> {
        assert!(count <= self.capacity, "{count} rows, and room for {}", self.capacity);
        let PrefillInputs { device, config: c, weights: w, .. } = *parts;
        let m = count as u32;
        let Results { row, tile: first_tile } = results;
        assert!(row <= count && first_tile <= tile_count, "{results:?} of {count} rows in {tile_count} tiles");
        // GEMMs begin at a whole tile. What they make of its rows before the results, nobody reads.
        let first_row = if row < count { row as u32 / TILE_ROWS * TILE_ROWS } else { m };

        // SAFETY: every address is a buffer of self or of the model, of the size that its kernel's parameter block
        // states, with whole tiles of rows; the maps describe them; both outlive the work because freeing device memory
        // waits for it.
        unsafe {
            device.launch::<embedding::embed_spans>((1, m), 0, w.embedding(rows, self.residual(c)))?;
            let take = |layers| match parts.states {
                Some(states) => states.take(device, rows, m, layers, self.residual.ptr()),
                None => Ok(()),
            };
            take(0)?;
            for i in 0..w.layers.len() {
                // The last layer computes only what the results need.
                let is_last = i + 1 == w.layers.len();
                let (first_row, first_tile) = if is_last { (first_row, first_tile) } else { (0, 0) };
                let heads = self.heads(parts, rows, i);
                w.make_layer(device, i)?;
                for operator in c.plan.operators() {
                    match operator {
                        Operator::Gemm(gemm) if gemm.matrix == Matrix::Qkv && first_row > 0 => {
                            // Keys and values of all rows; queries of the rows from `first_row` on.
                            let (project, q_size) = (self.gemm(parts, i, &gemm, m), heads.q_heads * HEAD_DIM);
                            let project = Gemm { heads, ..project };
                            self.quantize(parts, (i, &gemm), [0, m])?;
                            self.enqueue_gemm(parts, i, &gemm, Gemm { first_feature: q_size, ..project })?;
                            self.enqueue_gemm(parts, i, &gemm, Gemm { first_row, n: q_size, ..project })?;
                        }
                        // No row has a result: the last layer makes keys and values, and no more.
                        _ if first_row == m => {}
                        Operator::Gemm(gemm) => {
                            let p = Gemm { heads, first_row, ..self.gemm(parts, i, &gemm, m) };
                            self.quantize(parts, (i, &gemm), [first_row, m])?;
                            self.enqueue_gemm(parts, i, &gemm, p)?;
                        }
                        // The epilogue of the first GEMM made the heads.
                        Operator::Heads(_) => {}
                        Operator::Attention(_) => {
                            let attend = PrefillAttention {
                                tiles: tiles.at(first_tile * 4),
                                q: self.maps.ptr(QUERIES),
                                pages: self.maps.ptr(ACTIVATIONS + i),
                                cache: heads.cache,
                                out: self.shared.ptr_mut().at(self.capacity * c.plan.attention.query_size()),
                                codes: self.codes.as_ref().map(Activations::attended).unwrap_or_default(),
                                q_heads: heads.q_heads,
                                scale: 1.0 / (HEAD_DIM as f32).sqrt(),
                            };
                            enqueue_attention(device, attend, (tile_count - first_tile) as u32, None)?;
                        }
                    }
                }
                take(i + 1)?;
            }
        }
        Ok(())
    }

    /// Of models in e4m3: enqueues the quantisation of rows `rows[0]..rows[1]` of what a GEMM reads, unless they are
    /// codes already.
    ///
    /// # Safety
    /// As [`enqueue_rows`](Self::enqueue_rows).
    unsafe fn quantize(
        &self,
        parts: &PrefillInputs<'_>,
        (layer, gemm): (usize, &plan::Gemm),
        rows: [u32; 2],
    ) -> Result<(), Error> {
        let Some(codes) = &self.codes else { return Ok(()) };
        let x = match gemm.input {
            Input::Normed => self.scaled.ptr(),
            // Attention wrote codes itself.
            Input::Attended => return Ok(()),
            Input::Activation => self.shared.ptr(),
        };
        // SAFETY: the caller's word.
        unsafe { codes.quantize(parts.device, (layer, gemm), x, rows, false) }
    }

    /// Enqueues a GEMM of a layer, of bf16 or of the codes.
    ///
    /// # Safety
    /// As [`enqueue_rows`](Self::enqueue_rows).
    unsafe fn enqueue_gemm(
        &self,
        parts: &PrefillInputs<'_>,
        layer: usize,
        gemm: &plan::Gemm,
        p: Gemm,
    ) -> Result<(), Error> {
        // SAFETY: the caller's word.
        unsafe {
            match (&self.codes, parts.weights.e4m3()) {
                (Some(codes), Some(weights)) => codes.enqueue(parts.device, epilogue(gemm), weights, (layer, gemm), p),
                _ => gemm::enqueue(parts.device, &self.beside, epilogue(gemm), p),
            }
        }
    }

    fn residual(&self, config: &Config) -> Residual {
        Residual {
            x: self.residual.ptr_mut(),
            scaled: self.scaled.ptr_mut(),
            squares: self.squares.ptr_mut(),
            spans: self.spans.ptr_mut(),
            dim: config.plan.hidden as u32,
        }
    }

    /// Parameters of how a layer makes the heads of these rows.
    fn heads(&self, parts: &PrefillInputs<'_>, rows: Rows, layer: usize) -> SplitHeads {
        let (c, of_layer) = (parts.config, &parts.weights.layers[layer]);
        SplitHeads {
            rows,
            qkv: Default::default(),
            q_norm: of_layer.q_norm.ptr(),
            k_norm: of_layer.k_norm.ptr(),
            cos: parts.cos.ptr(),
            sin: parts.sin.ptr(),
            q: self.shared.ptr_mut(),
            cache: parts.cache.params(layer, parts.tables, parts.table_stride),
            q_heads: c.plan.attention.query_heads as u32,
            eps: c.rms_norm_eps,
            head_norm: c.plan.attention.traits.head_norm.into(),
        }
    }

    /// Parameters of a layer's GEMM of `m` rows, all but the heads.
    fn gemm(&self, parts: &PrefillInputs<'_>, layer: usize, of: &plan::Gemm, m: u32) -> Gemm {
        let out = match of.epilogue {
            plan::Epilogue::SwiGlu => self.maps.ptr(ACTIVATION_OUT),
            _ => Default::default(),
        };
        let (residual, eps) = (self.residual(parts.config), parts.config.rms_norm_eps);
        let p = gemm::of_layer(parts.weights, layer, of, m, residual, eps);
        Gemm { x: self.maps.ptr(input_map(of.input)), out, ..p }
    }
}

#[cfg(test)]
mod tests {
    use super::cheapest_rows;

    #[test]
    fn rounds_of_tiles_are_full() {
        // Qwen3-8B's GEMMs on 132 SMs, where two CTAs take 256 × 256 together: how many of these lie side by side,
        // and what a round takes.
        let gemms = [(24, 1), (16, 1), (96, 1), (16, 3)];
        let rounds = |m: u32| gemms.iter().map(|&(across, k)| u64::from((m / 256 * across).div_ceil(66) * k)).sum();
        assert_eq!(cheapest_rows(4096..=6144, rounds), 6144);
        // A GEMM that is three tiles across. 66 tiles are a round.
        assert_eq!(cheapest_rows(4096..=6144, |m| u64::from((m / 256 * 3).div_ceil(66))), 5632);
        assert_eq!(cheapest_rows(4096..=6144, u64::from), 4096);
    }
}
