//! Passes over the rows of many sequences on Hopper, each in one launch of `gpu_kernels::batched`. They give the same
//! bits as the unfused path. Passes with [many] rows have several launches.

mod many;

use cuda_std::tensor::Matrix;
use cuda_std::{Global, GlobalMut, Kernel};
use gpu_kernels::batched::{self, BatchedStep, CodedKernels, MAX_BATCHED_ROWS, Phase, PhaseKind, Share};
use gpu_kernels::packed::{self, PackPages};
use gpu_kernels::stream::StreamMatrix;
use gpu_kernels::weights;
use model::plan::{self, Epilogue, Input, LayerPlan, Operator};

use self::many::Many;
use super::{Capacity, Forward, Pass, RowOutput, Tiles};
use crate::Error;
use crate::device::{Buffer, TensorMaps};
use crate::lossless::Packed;
use crate::quantized::{Quantized, by_code};

/// The programs: rows of a GEMM's tile, and the number of tiles of rows. A pass takes the first program that has room
/// for its rows.
const PROGRAMS: [(u32, u32); 7] = [(64, 1), (96, 1), (128, 1), (96, 2), (128, 2), (128, 3), (128, 4)];
/// Most rows of a pass.
pub const MOST_PASS_ROWS: u32 = 1024;
/// Numbers of rows that a batch may fill by leaving some sequences out of each step: those of whole tiles. With fewer
/// rows than the first, a step takes as long as its weights do.
pub const FULL_ROWS: [u32; 8] = {
    let [_, _, a, b, c, d, e] = PROGRAMS;
    let tile = TILE_ROWS_OF_GEMM;
    let most = MOST_PASS_ROWS;
    [a.0 * a.1, b.0 * b.1, c.0 * c.1, d.0 * d.1, e.0 * e.1, most - 3 * tile, most - 2 * tile, most - tile]
};
const _: () = assert!(FULL_ROWS[0] == 128 && FULL_ROWS[4] == 512 && FULL_ROWS[5] == 640);
/// The possible heights of a tile, in rows.
const TILE_ROWS: [u32; 3] = [64, 96, 128];
/// The height of the tiles of [`gpu_kernels::gemm`].
const TILE_ROWS_OF_GEMM: u32 = gpu_kernels::gemm::TILE_ROWS;
/// Phases of a layer. The second one is attention. Before the layers there is one phase for the embedding, and after
/// them one for the head.
const LAYER_PHASES: usize = 5;
const LARGEST: (u32, u32) = PROGRAMS[PROGRAMS.len() - 1];
const _: () = assert!(LARGEST.0 * LARGEST.1 == MAX_BATCHED_ROWS);

/// The memory that only these passes need.
pub struct Batched {
    /// CTAs of the launch.
    grid: u32,
    /// The tensor maps of the GEMMs' inputs, in the order of [`input_map`].
    maps: TensorMaps,
    /// The tensor map by which packed weights or codes are read a stage at a time, if there are any.
    boxes: Option<TensorMaps>,
    /// The phases of each of [`PROGRAMS`]: with logits as the result, and with best tokens instead.
    programs: Vec<[Buffer<u64>; 2]>,
    kinds: Vec<PhaseKind>,
    partials: Buffer<f32>,
    arrivals: Buffer<u32>,
    items: Buffer<u32>,
    packed: PackedPages,
    /// `[MOST_PASS_ROWS]`: the rank of each row's best token.
    best: Buffer<u64>,
    trace: Option<Buffer<u64>>,
    many: Many,
}

/// What these passes know about packed pages.
struct PackedPages {
    /// `[pages]`: 1 for a packed page, as in [`BatchedStep::packed`].
    pages: Buffer<u32>,
    /// `[layers, pages, kv_heads]`: the form of each packed page.
    forms: Buffer<u32>,
}

/// The index in [`Batched::maps`] of the map of a GEMM's `input`. `height` is the index of the tile height in
/// [`TILE_ROWS`].
fn input_map(input: Input, height: usize) -> usize {
    let place = match input {
        Input::Normed => 0,
        Input::Attended => 1,
        Input::Activation => 2,
    };
    TILE_ROWS.len() * place + height
}

/// What `upload` makes for each of [`PROGRAMS`]: with logits as the result, and with best tokens instead.
fn for_each_program<T>(upload: impl Fn((u32, u32), PhaseKind) -> Result<T, Error>) -> Result<Vec<[T; 2]>, Error> {
    PROGRAMS
        .iter()
        .map(|&program| Ok([upload(program, PhaseKind::Write)?, upload(program, PhaseKind::Best)?]))
        .collect()
}

/// The index of a tile height in [`TILE_ROWS`].
fn height_of(tile_rows: u32) -> usize {
    TILE_ROWS.iter().position(|&rows| rows == tile_rows).expect("there are maps of these tiles")
}

impl Batched {
    /// Marks every page as not packed.
    pub(super) fn forget_packed(&mut self) -> Result<(), Error> {
        let none = vec![0; self.packed.pages.len()];
        self.packed.pages.write(0, &none)
    }
}

impl Capacity {
    /// Room for `sequences` sequences of up to `context` tokens, for `pages` pages, and for passes over `rows` rows.
    /// Rounds the rows up to whole tiles of the [batched step](gpu_kernels::batched): for rows outside its memory TMA
    /// reads zeros, but takes longer. More rows than such a step has are rounded up to whole steps, since it takes the
    /// head of so many at a time.
    #[must_use]
    pub const fn batch(context: usize, sequences: usize, pages: usize, rows: usize) -> Self {
        let (smallest, largest, step) = (PROGRAMS[0].0 as usize, LARGEST.0 as usize, MAX_BATCHED_ROWS as usize);
        let unit = if rows > step {
            step
        } else if rows > smallest {
            largest
        } else {
            smallest
        };
        let rows = rows.next_multiple_of(unit);
        Self { context, sequences, pages, rows }
    }
}

impl Forward {
    /// Allocates what passes over up to [`MOST_PASS_ROWS`] rows of many sequences need, so that they run at the speed
    /// of memory. Needs a prepared [decode kernel](Self::prepare_decode) and a device with `wgmma`; returns whether
    /// both are there.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn prepare_batched(&mut self) -> Result<bool, Error> {
        if self.decode().is_none() || !self.device.capabilities().has_gemms() {
            return Ok(false);
        }
        let grid = self.batched_grid();
        if grid == 0 {
            return Ok(false);
        }
        let (c, LayerPlan { hidden, attention, .. }) = (&self.config, self.config.plan);
        let (q_size, inner) = (attention.query_size(), c.plan.activation_size());
        let kv_heads = attention.key_value_heads;
        let inputs = [(&self.scaled, hidden), (&self.attended, q_size), (&self.activation, inner)];
        let matrix = |(buffer, columns): (&Buffer<half::bf16>, usize), tile_rows| {
            Matrix::dense(buffer.ptr().addr(), self.room.rows as u64, columns as u64, tile_rows)
        };
        let matrices: Vec<Matrix> =
            inputs.iter().flat_map(|&input| TILE_ROWS.map(|rows| matrix(input, rows))).collect();
        let maps = self.device.tensor_maps(&matrices)?;
        let boxes = self.weights.packed().map(Packed::stages).or(self.weights.codes().map(Quantized::stages));
        let pages = self.cache.pages();
        let packed = PackedPages {
            pages: self.device.zeroed(pages)?,
            forms: self.device.zeroed(c.num_hidden_layers * pages * kv_heads)?,
        };
        let phases = |program, head| self.phases(grid, &maps, &packed, program, head);
        let kinds = phases(PROGRAMS[0], PhaseKind::Best).iter().map(|phase| phase.kind).collect();
        let upload = |program, head| self.device.upload(Phase::words(&phases(program, head)));
        let many = self.prepare_many(grid, &maps, &packed)?;
        let partials = TILE_ROWS.map(|rows| BatchedStep::partial_len(rows, grid)).into_iter().max().unwrap_or(0);
        self.batched = Some(Batched {
            grid,
            programs: for_each_program(upload)?,
            maps,
            boxes: boxes.map(|array| self.device.array_maps(&[array])).transpose()?,
            packed,
            kinds,
            trace: None,
            partials: self.device.zeroed(partials)?,
            arrivals: self.device.zeroed(self.arrivals_len(grid))?,
            items: self.device.zeroed(BatchedStep::items_len(self.room.rows, kv_heads, self.room.splits()))?,
            best: self.device.zeroed(MOST_PASS_ROWS as usize)?,
            many,
        });
        Ok(true)
    }

    /// How many [counters](BatchedStep::arrivals) a launch of `grid` CTAs needs for the rows of a pass.
    fn arrivals_len(&self, grid: u32) -> usize {
        BatchedStep::arrivals_len(grid, self.room.rows as u32, self.config.plan.attention.query_heads as u32)
    }

    /// The flags that tell these passes which pages are packed: `[pages]` words, 0 or 1. None if they were not
    /// [prepared](Self::prepare_batched). Whoever packs a page sets its flag, and clears the flag when the page is
    /// unpacked or overwritten.
    pub fn packed_pages(&self) -> Option<GlobalMut<u32>> {
        self.batched.as_ref().map(|batched| batched.packed.pages.ptr_mut())
    }

    /// From how many rows on, one for each sequence, a pass attends by [single warps](fn@batched::attend_batch). These
    /// read packed pages faster than a CTA's warps together. `u32::MAX`: never.
    pub(crate) fn single_warps_from(&self) -> u32 {
        match &self.batched {
            Some(batched) if self.config.plan.attention.group() as u32 <= BatchedStep::ATTEND_PAIRS => {
                if self.coded.is_some() { 0 } else { batched.many.from }
            }
            _ => u32::MAX,
        }
    }

    /// Enqueues the [packing](packed) of pages in all layers, as far as they can be packed. `list` holds `count` pages,
    /// each once, and all tokens of these pages are written. After that, only passes over rows with tiles may read such
    /// a page. Does nothing if these passes were not [prepared](Self::prepare_batched).
    ///
    /// # Safety
    /// When it runs, `list` holds `count` numbers of pages of the [cache](Self::cache), each once, none of which is
    /// packed. It lives until the device is done.
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue_pack(&self, list: Global<u32>, count: usize) -> Result<(), Error> {
        // SAFETY: the caller's word.
        unsafe { self.enqueue_packing::<packed::pack_pages>(list, count) }
    }

    /// Enqueues the unpacking of packed pages in all layers, which restores their bits. `list` holds `count` pages.
    ///
    /// # Safety
    /// As [`enqueue_pack`](Self::enqueue_pack), except that all of the pages are packed.
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue_unpack(&self, list: Global<u32>, count: usize) -> Result<(), Error> {
        // SAFETY: the caller's word.
        unsafe { self.enqueue_packing::<packed::unpack_pages>(list, count) }
    }

    /// # Safety
    /// As [`enqueue_pack`](Self::enqueue_pack), or [`enqueue_unpack`](Self::enqueue_unpack).
    unsafe fn enqueue_packing<K: Kernel<Params = PackPages>>(
        &self,
        list: Global<u32>,
        count: usize,
    ) -> Result<(), Error> {
        let Some(batched) = self.batched.as_ref().filter(|_| count > 0) else { return Ok(()) };
        let params = PackPages {
            list,
            pages: self.cache.elements().ptr_mut(),
            forms: batched.packed.forms.ptr_mut(),
            page_count: self.cache.pages() as u32,
        };
        let heads = self.config.plan.attention.key_value_heads as u32;
        let grid = (heads, self.config.num_hidden_layers as u32, count as u32);
        // SAFETY: the cache and its forms, sized as the parameter block says; the list is the caller's.
        unsafe { self.device.launch::<K>(grid, PackPages::SHARED_BYTES, params) }
    }

    /// Starts tracing: from the next of these passes on, records when each CTA finished each phase. Every pass must
    /// then ask for logits or best tokens.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn begin_batched_trace(&mut self) -> Result<(), Error> {
        if let Some(batched) = &mut self.batched {
            batched.trace = Some(self.device.zeroed(batched.grid as usize * batched.kinds.len())?);
        }
        Ok(())
    }

    /// The trace of the last pass: for each phase its kind, and when each CTA finished it, in nanoseconds. Waits for
    /// the device.
    ///
    /// # Errors
    /// A driver error.
    pub fn take_batched_trace(&mut self) -> Result<Vec<(PhaseKind, Vec<u64>)>, Error> {
        let Some(Batched { kinds, trace: Some(trace), .. }) = &self.batched else { return Ok(Vec::new()) };
        let mut words = vec![0; trace.len()];
        trace.read(0, &mut words)?;
        let blocks = |i: usize| words.iter().skip(i).step_by(kinds.len()).copied().collect();
        Ok(kinds.iter().enumerate().map(|(i, &kind)| (kind, blocks(i))).collect())
    }

    /// The [rank](gpu_kernels::sample::rank) of the best token after each of the first `rows` rows of the last pass, if
    /// best tokens were wanted of it. Waits for the device.
    ///
    /// # Errors
    /// A driver error.
    pub fn best_tokens(&self, rows: usize) -> Result<Vec<u64>, Error> {
        let mut best = vec![0; rows];
        self.batched.as_ref().map_or(Ok(()), |batched| batched.best.read(0, &mut best))?;
        Ok(best)
    }

    /// CTAs of the launch: as many whole clusters as run at once, but at most the CTAs that the weights were laid
    /// out for.
    fn batched_grid(&self) -> u32 {
        let blocks = self.weights.stream.blocks();
        let known = [
            self.device.clusters_at_once::<batched::batched_64>(BatchedStep::shared_bytes(64)),
            self.device.clusters_at_once::<batched::batched_96>(BatchedStep::shared_bytes(96)),
            self.device.clusters_at_once::<batched::batched_128>(BatchedStep::shared_bytes(128)),
        ];
        // Zero means that the driver does not say; the emulator never does.
        let clusters = known.into_iter().filter(|&n| n > 0).fold(blocks / batched::CLUSTER, u32::min);
        clusters * batched::CLUSTER
    }

    /// The phases of a step on `grid` CTAs, for GEMMs with tiles of `tile_rows` rows and `row_tiles` such tiles. The
    /// last phase is the output head; its kind is `head`.
    fn phases(
        &self,
        grid: u32,
        maps: &TensorMaps,
        packed: &PackedPages,
        (tile_rows, row_tiles): (u32, u32),
        head: PhaseKind,
    ) -> Vec<Phase> {
        let (c, w) = (&self.config, &self.weights);
        let height = height_of(tile_rows);
        let gemm_phase = |kind, layer: usize, gemm: &plan::Gemm| {
            let StreamMatrix { stream, base, n_tiles, k, .. } = w.stream.matrix(layer, gemm.matrix);
            let program = (tile_rows, row_tiles);
            let packed = self.packed_of(program);
            let (base, plain, scale) = match (self.codes_of(program), packed) {
                (Some(codes), _) if gemm.matrix != plan::Matrix::Head => {
                    (codes.base(layer, gemm.matrix), Global::default(), codes.unit())
                }
                (Some(_), _) => (base, stream, 1.0),
                (None, Some(packed)) => {
                    (packed.base(layer, gemm.matrix), Global::default(), packed.scale(layer, gemm.matrix))
                }
                (None, None) => (base, Global::default(), 1.0),
            };
            Phase {
                n_tiles,
                n: gemm.n as u32,
                k,
                share: Share::new(Share::tiles(n_tiles, row_tiles), tile_rows, grid, k),
                base,
                plain,
                x: maps.ptr(input_map(gemm.input, height)),
                row_tiles,
                scale,
                ..Phase::new(kind)
            }
        };
        let mut phases = vec![Phase { norm: w.layers[0].input_norm.ptr(), ..Phase::new(PhaseKind::Embed) }];
        for (i, layer) in w.layers.iter().enumerate() {
            phases.extend(c.plan.operators().filter_map(|operator| match operator {
                Operator::Gemm(gemm) => Some(match gemm.epilogue {
                    Epilogue::Write { .. } => Phase {
                        y: self.qkv.ptr_mut(),
                        norm: w.bias(i, &gemm),
                        ..gemm_phase(PhaseKind::Write, i, &gemm)
                    },
                    Epilogue::Add => {
                        Phase { norm: w.norm_after(i, &gemm).ptr(), ..gemm_phase(PhaseKind::Add, i, &gemm) }
                    }
                    Epilogue::SwiGlu => gemm_phase(PhaseKind::SwiGlu, i, &gemm),
                }),
                // The attention phase splits the heads.
                Operator::Heads(_) => None,
                Operator::Attention(_) => Some(Phase {
                    pages: self.cache.layer(i),
                    // SAFETY: within the buffer.
                    forms: unsafe { packed.forms.ptr().at(i * packed.forms.len() / c.num_hidden_layers) },
                    norm: layer.q_norm.ptr(),
                    key_norm: layer.k_norm.ptr(),
                    ..Phase::new(PhaseKind::Attend)
                }),
            }));
        }
        assert_eq!(phases.len(), 1 + LAYER_PHASES * w.layers.len());
        phases.push(Phase { y: self.logits.ptr_mut(), ..gemm_phase(head, w.layers.len(), &c.head()) });
        phases
    }

    /// Enqueues a pass; see [`enqueue_rows`](Self::enqueue_rows).
    pub(super) fn enqueue_batched(
        &self,
        of: &Batched,
        pass: &Pass,
        tiles: Tiles,
    ) -> Result<Option<Global<u64>>, Error> {
        let takes_whole_tiles = self.room.rows.is_multiple_of(TILE_ROWS_OF_GEMM as usize);
        // If packed layers are unpacked into the memory of one layer, one at a time, a single launch over all layers
        // cannot read them.
        let is_made_again = self.weights.packed().is_some_and(|_| self.weights.stream.is_of_layer())
            && self.packed_of(PROGRAMS[self.program(pass.most_rows)]).is_none();
        let are_many = pass.most_rows >= of.many.from.min(MAX_BATCHED_ROWS + 1) && takes_whole_tiles;
        if self.coded.is_some() || is_made_again || are_many {
            return self.enqueue_many(of, pass, tiles);
        }
        assert!(pass.most_rows <= MAX_BATCHED_ROWS, "{} rows, and no room for whole tiles", pass.most_rows);
        let count = of.kinds.len() as u32 - u32::from(pass.output == RowOutput::None);
        let step = self.batched_step(of, pass, tiles, (0, count));
        self.launch_batched(of, pass.most_rows, step)?;
        Ok((pass.output == RowOutput::Best).then(|| of.best.ptr()))
    }

    /// The parameters of a launch that runs `phase_count` phases of a pass, from phase `first` on.
    fn batched_step(&self, of: &Batched, pass: &Pass, tiles: Tiles, (first, phase_count): (usize, u32)) -> BatchedStep {
        let weights = &self.weights.stream;
        let finds_best = pass.output == RowOutput::Best;
        let program = self.program(pass.most_rows);
        let list: Global<Phase> = of.programs[program][usize::from(finds_best)].ptr().cast();
        // SAFETY: `first` is one of the program's phases.
        let phases = unsafe { list.at(first) };
        // Only a launch that begins with the first phase is traced.
        let trace = of.trace.as_ref().filter(|_| first == 0);
        BatchedStep {
            work: self.workspace(pass.rows),
            phases,
            phase_count,
            blocks: weights.blocks(),
            stream: weights.weights().ptr(),
            boxes: of.boxes.as_ref().map_or(Global::default(), |boxes| boxes.ptr(0)),
            lossless: self.packed_of(PROGRAMS[program]).map(Packed::parts).unwrap_or_default(),
            tiles: tiles.list,
            packed: of.packed.pages.ptr(),
            items: of.items.ptr_mut(),
            partials: of.partials.ptr_mut(),
            arrivals: of.arrivals.ptr_mut(),
            best: if finds_best { of.best.ptr_mut() } else { Default::default() },
            trace: trace.map_or(Default::default(), |trace| trace.ptr_mut()),
            tile_count: tiles.count,
            ..BatchedStep::default()
        }
    }

    /// The index of the program for a pass over up to `rows` rows, or for the first part of its rows. Kernels that read
    /// codes have no tiles of 96 rows.
    fn program(&self, rows: u32) -> usize {
        let rows = rows.min(MAX_BATCHED_ROWS);
        let has_room = |&program: &(u32, u32)| {
            rows <= program.0 * program.1 && !(program.0 == 96 && self.codes_of(program).is_some())
        };
        PROGRAMS.iter().position(has_room).expect("the last program has room")
    }

    /// The codes that a program reads, if it reads any. It does if the layers' bf16 weights are not kept, or if it has
    /// few rows.
    fn codes_of(&self, (tile_rows, row_tiles): (u32, u32)) -> Option<&Quantized> {
        let reads =
            self.weights.stream.is_of_layer() || tile_rows * row_tiles <= self.device.capabilities().tuning().code_rows;
        self.weights.codes().filter(|_| reads)
    }

    /// The packed weights that a program reads, if it reads any. Only the program with the fewest rows does, and only
    /// if the bf16 weights are not kept, as reading those is quicker.
    fn packed_of(&self, (tile_rows, row_tiles): (u32, u32)) -> Option<&Packed> {
        let reads = self.weights.stream.is_of_layer() && tile_rows * row_tiles == TILE_ROWS[0];
        self.weights.packed().filter(|_| reads)
    }

    /// Launches the phases that `step` names, of a pass over up to `rows` rows.
    fn launch_batched(&self, of: &Batched, rows: u32, step: BatchedStep) -> Result<(), Error> {
        let (d, grid, program) = (&self.device, of.grid, PROGRAMS[self.program(rows)]);
        let tile_rows = program.0;
        let shared = BatchedStep::shared_bytes(tile_rows);
        // SAFETY: every address is a buffer of self, of the size that the parameter block states; self outlives the
        // work because freeing device memory waits for it.
        unsafe {
            macro_rules! launch {
                ($kernel:ty) => {
                    d.launch_cooperative::<$kernel>(grid, shared, step)
                };
            }
            match (self.codes_of(program).map(Quantized::coding), tile_rows) {
                (None, 64) if !step.lossless.tiles.is_null() => launch!(batched::batched_64_lossless),
                (None, 64) => launch!(batched::batched_64),
                (None, 96) => launch!(batched::batched_96),
                (None, _) => launch!(batched::batched_128),
                (Some(codes), 64) => by_code!(codes, C => launch!(<weights::Quantized<C> as CodedKernels>::Of64)),
                (Some(codes), _) => by_code!(codes, C => launch!(<weights::Quantized<C> as CodedKernels>::Of128)),
            }
        }
    }
}
