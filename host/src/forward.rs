//! The forward pass on a device: its kernels, their order, and the memory that they work in.

mod batched;
mod capacity;
mod coded;
mod covered;
mod head;
mod listed;
mod prompts;
mod states;
mod tree;
mod unfused;

use cuda_std::Global;
use gpu_kernels::decode::{DecodeStep, Mark};
use gpu_kernels::drafting::Cost;
use gpu_kernels::eagle::EagleStep;
use gpu_kernels::kv::HEAD_DIM;
use gpu_kernels::linear::N_TILE;
use gpu_kernels::norm::{Norm, Residual};
use gpu_kernels::step::{Counters, MAX_DECODE_ROWS, Rows};
use gpu_kernels::workspace::Workspace;
use half::bf16;
use model::{Config, plan::LayerPlan, rope::RopeTable};

use self::batched::Batched;
pub use self::batched::{FULL_ROWS, MOST_PASS_ROWS};
use self::capacity::pages;
pub use self::capacity::{Capacity, Footprint};
use self::coded::Coded;
pub(crate) use self::head::Begin;
pub use self::head::HeadWeights;
use self::head::Pairs;
pub use self::listed::{ListedRows, Row};
pub(crate) use self::states::HiddenStates;
use self::tree::Tree;
use crate::Error;
use crate::cache::KvCache;
use crate::decode::Decode;
use crate::device::{Buffer, Device};
use crate::draft::{decode_cost, pass_bytes};
use crate::lossless::Packed;
use crate::prefill::Prefill;
use crate::row_buffers::RowBuffers;
use crate::timed::timed;
use crate::tuning::{DRAFT_COST, layer_bytes};
use crate::weights::DeviceWeights;

/// A model on a device, with the memory of its sequences: KV cache, activations, logits. All memory is allocated in
/// advance; passes allocate nothing.
pub struct Forward {
    device: Device,
    config: Config,
    weights: DeviceWeights,
    room: Capacity,
    cos: Buffer<f32>,
    sin: Buffer<f32>,
    cache: KvCache,
    page_table: Buffer<u32>,
    rows: RowBuffers,
    residual: Buffer<f32>,
    scaled: Buffer<bf16>,
    squares: Buffer<f32>,
    qkv: Buffer<f32>,
    q: Buffer<bf16>,
    sums: Buffer<f32>,
    scales: Buffer<f32>,
    attended: Buffer<bf16>,
    activation: Buffer<bf16>,
    logits: Buffer<f32>,
    decode: Option<Decode>,
    /// What drafts add to the time of a step of one row.
    draft_cost: Cost,
    trace: Option<Buffer<u64>>,
    prefill: Option<Prefill>,
    batched: Option<Batched>,
    /// Present if the model's GEMMs are of e4m3.
    coded: Option<Coded>,
    /// Present if a head drafts for this model.
    states: Option<HiddenStates>,
    /// Present if this model's steps may be trees.
    tree: Option<Tree>,
    /// Present if this is a head.
    pairs: Option<Pairs>,
}

/// Which outputs are wanted of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOutput {
    /// Nothing. For a chunk of a prompt that is not the last.
    None,
    /// The logits of the rows from this one on.
    LogitsFrom(u32),
    /// The best token of each row. A pass that cannot find it without logits leaves the logits of all rows.
    Best,
}

impl RowOutput {
    /// Checks that a pass over `count` rows can give this output.
    ///
    /// # Panics
    /// If it cannot.
    fn check(self, count: usize) {
        assert!(self.first().is_none_or(|row| row as usize <= count), "{self:?} of {count} rows");
    }

    /// The first row that needs logits, for a pass whose only output is logits. None if no row does.
    pub fn first(self) -> Option<u32> {
        match self {
            Self::None => None,
            Self::LogitsFrom(row) => Some(row),
            Self::Best => Some(0),
        }
    }
}

/// The tiles of attention: groups of rows that are attended together.
#[derive(Clone, Copy, Debug)]
pub struct Tiles {
    /// `[count, 2]`, in the form of [`AttendTiles::tiles`](gpu_kernels::attention::AttendTiles::tiles); 16-byte
    /// aligned.
    pub list: Global<u32>,
    /// The number of tiles.
    pub count: u32,
}

/// The rows of a pass, which may be of any sequences, and what the host knows about them.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// The rows. A planning kernel or the host has filled them in when the pass runs.
    pub rows: Rows,
    /// An upper bound of the number of rows.
    pub most_rows: u32,
    /// All positions are below this.
    pub end: u32,
    /// The tiles of attention. None: all rows are of one sequence.
    pub tiles: Option<Tiles>,
    /// The output that is wanted.
    pub output: RowOutput,
}

/// How the rows of a pass relate to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsOf {
    /// All rows are of one sequence, at consecutive positions.
    OneSequence,
    /// The rows are of several sequences. Rows of the same sequence are adjacent and at consecutive positions.
    Sequences,
}

impl RowsOf {
    /// The relation of rows whose sequences are these. Rows of the same sequence must be adjacent and at consecutive
    /// positions.
    pub fn of(sequences: &[u32]) -> Self {
        if sequences.windows(2).all(|two| two[0] == two[1]) { Self::OneSequence } else { Self::Sequences }
    }
}

/// Whether a pass of up to `most_rows` rows is small enough for the decode kernel.
pub fn is_for_few(most_rows: u32) -> bool {
    most_rows <= MAX_DECODE_ROWS
}

impl Forward {
    /// Allocates everything for one sequence of up to `capacity` tokens. Page `i` of the sequence is page `i` of the
    /// cache.
    ///
    /// # Errors
    /// As [`with_room`](Self::with_room).
    pub fn new(device: &Device, config: &Config, weights: DeviceWeights, capacity: usize) -> Result<Self, Error> {
        let mut forward = Self::with_room(device, config, weights, Capacity::single(capacity))?;
        let tables: Vec<u32> = (0..forward.page_table.len() as u32).collect();
        forward.set_page_tables(&tables)?;
        Ok(forward)
    }

    /// Allocates everything for several sequences. The caller fills in their page tables; until then, every entry names
    /// page 0.
    ///
    /// # Errors
    /// A shape that the kernels do not [cover](Self::check), weights of another shape or on another card, too little
    /// memory, sizes for which there could be none, or a driver error.
    ///
    /// # Panics
    /// If `room` has no pages: a bug of the caller.
    pub fn with_room(device: &Device, config: &Config, weights: DeviceWeights, room: Capacity) -> Result<Self, Error> {
        Self::with_inputs(device, config, weights, room, None)
    }

    /// As [`with_room`](Self::with_room). With `pairs`, this is a head, whose rows are made from them.
    fn with_inputs(
        device: &Device,
        config: &Config,
        weights: DeviceWeights,
        room: Capacity,
        pairs: Option<Pairs>,
    ) -> Result<Self, Error> {
        Self::check(config)?;
        room.check()?;
        covered::check_weights(device, config, &weights, if pairs.is_some() { 2 } else { 1 })?;
        assert!(room.pages > 0, "a cache without pages");
        let (rows, splits) = (room.rows, room.splits());
        let coded = weights.e4m3().is_some();
        // GEMMs of e4m3 write whole tiles of rows.
        let of_gemms = if coded { Coded::rows(rows) } else { rows };
        let LayerPlan { hidden, attention, .. } = config.plan;
        let (q, q_heads) = (attention.query_size(), attention.query_heads);
        let rope = timed("the rotary table", || RopeTable::of(config, room.context));
        let forward = || {
            let activation = device.zeroed_array("the activations", &[of_gemms, config.plan.activation_size()])?;
            Ok(Self {
                cos: device.upload(&rope.cos)?,
                sin: device.upload(&rope.sin)?,
                cache: KvCache::new(device, config, room.pages)?,
                decode: None,
                draft_cost: DRAFT_COST,
                trace: None,
                prefill: None,
                batched: None,
                coded: if coded { Some(Coded::new(device, config, rows, &activation)?) } else { None },
                states: None,
                tree: None,
                pairs,
                page_table: device.zeroed_array("the page tables", &[room.sequences, pages(room.context)])?,
                rows: RowBuffers::new(device, rows)?,
                residual: device.zeroed_array("the residual stream", &[of_gemms, hidden])?,
                scaled: device.zeroed_array("the scaled residual stream", &[of_gemms, hidden])?,
                squares: device.zeroed_array("the sums of squares", &[of_gemms, hidden / N_TILE as usize])?,
                qkv: device.zeroed_array("queries, keys and values", &[of_gemms, attention.qkv_size()])?,
                q: device.zeroed_array("the queries", &[rows, q])?,
                sums: device.zeroed_array("the sums of attention", &[rows, q_heads, splits, HEAD_DIM as usize])?,
                scales: device.zeroed_array("the scales of attention", &[rows, q_heads, splits, 2])?,
                attended: device.zeroed_array("the output of attention", &[rows, q])?,
                activation,
                logits: device.zeroed_array("the logits", &[rows, config.vocab_size])?,
                device: device.clone(),
                config: config.clone(),
                weights,
                room,
            })
        };
        timed("cache and activations", forward)
    }

    /// Allocates what the decode kernel needs, if the device and the model suit it. Returns whether they do.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn prepare_decode(&mut self) -> Result<bool, Error> {
        let decode = || Decode::new(&self.device, &self.config, &self.weights, &self.cache, self.room.splits());
        self.decode = timed("memory for the decode kernel", decode)?;
        if self.decode.is_some() {
            self.draft_cost = decode_cost(&self.weights.compact, self.config.num_hidden_layers, self.pass_bytes());
        }
        Ok(self.decode.is_some())
    }

    /// Bytes of the weights in a format smaller than bf16, if steps read one.
    pub fn compact_bytes(&self) -> Option<u64> {
        self.weights.compact.bytes()
    }

    /// The cost of a step of one row: see [`pass_bytes`].
    pub(crate) fn pass_bytes(&self) -> u64 {
        pass_bytes(self.weights.step_bytes(&self.config), self.config.num_hidden_layers, layer_bytes::ONE_ROW)
    }

    /// What drafts add to the time of a step of one row.
    pub(crate) const fn draft_cost(&self) -> Cost {
        self.draft_cost
    }

    /// Bytes of the packed head that the decode kernel reads, if the head was packed alone.
    pub fn packed_head_bytes(&self) -> Option<u64> {
        self.weights.packed_head.as_ref().map(Packed::bytes)
    }

    /// The decode kernel, if it was [prepared](Self::prepare_decode). Its counters must be zero when it begins.
    pub fn decode(&self) -> Option<&Decode> {
        self.decode.as_ref()
    }

    /// The counters of the decode kernel, for a planning kernel to zero; null if the decode kernel was not prepared.
    pub fn counters(&self) -> Counters {
        self.decode.as_ref().map_or(Counters::default(), |decode| {
            let counters = decode.counters();
            Counters { words: counters.ptr_mut(), count: counters.len() as u32 }
        })
    }

    /// Enqueues the zeroing of the decode kernel's counters, for a pass that no kernel plans. Returns where the decode
    /// kernel will leave the ranks of the best tokens; none if it was not prepared.
    ///
    /// # Errors
    /// A driver error.
    pub(crate) fn begin_decode(&mut self) -> Result<Option<Global<u64>>, Error> {
        let Some(decode) = self.decode.as_mut() else { return Ok(None) };
        decode.begin()?;
        Ok(Some(decode.best()))
    }

    /// [`Decode::use_up_flags`], if the decode kernel was prepared.
    ///
    /// # Errors
    /// A driver error.
    pub fn use_up_flags(&mut self) -> Result<(), Error> {
        self.decode.as_mut().map_or(Ok(()), |decode| decode.use_up_flags(&self.config))
    }

    /// Starts tracing: from now on, each run of the decode kernel records when its CTAs passed which points, and
    /// overwrites the record of the run before.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn begin_trace(&mut self) -> Result<(), Error> {
        let words = DecodeStep::trace_len(self.config.num_hidden_layers as u32) as usize;
        self.trace = Some(self.device.zeroed_array("the trace", &[self.device.sms() as usize, words])?);
        Ok(())
    }

    /// Ends tracing.
    pub fn end_trace(&mut self) {
        self.trace = None;
    }

    /// The trace of the last run of the decode kernel: for each CTA, the points that it passed and when, in
    /// nanoseconds. The lists are empty if there was no run since the last call.
    /// Waits for the device.
    ///
    /// # Errors
    /// A driver error.
    pub fn take_trace(&mut self) -> Result<Vec<Vec<(Mark, u64)>>, Error> {
        let Some(trace) = &mut self.trace else { return Ok(Vec::new()) };
        let mut words = vec![0; trace.len()];
        trace.read(0, &mut words)?;
        trace.clear()?;
        let point = |&word: &u64| {
            let mark = Mark::ALL.get((word >> 56) as usize - 1).copied();
            mark.map(|mark| (mark, word & (!0 >> 8)))
        };
        let len = DecodeStep::trace_len(self.config.num_hidden_layers as u32) as usize;
        Ok(words.chunks(len).map(|block| block[1..=block[0] as usize].iter().filter_map(point).collect()).collect())
    }

    /// Fills the whole cache with zeros, after everything enqueued so far.
    ///
    /// # Errors
    /// A driver error.
    pub fn clear_cache(&mut self) -> Result<(), Error> {
        self.cache.clear(0..self.cache.pages() as u32)
    }

    /// Fills these pages of the cache with zeros, after everything enqueued so far.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If there is no such page: a bug of the caller.
    pub fn clear_pages(&mut self, pages: &[u32]) -> Result<(), Error> {
        self.cache.clear(pages.iter().copied())
    }

    /// Fills the cache with repetitions of `pattern`, for measurements. No page counts as packed afterwards.
    ///
    /// # Errors
    /// A driver error.
    pub fn fill_cache(&mut self, pattern: &[bf16]) -> Result<(), Error> {
        if let Some(batched) = &mut self.batched {
            batched.forget_packed()?;
        }
        self.cache.fill(pattern)
    }

    /// The norm by which readers of the residual stream still have to divide.
    fn norm(&self) -> Norm {
        self.residual().norm(self.config.rms_norm_eps)
    }

    fn table_stride(&self) -> u32 {
        pages(self.room.context) as u32
    }

    /// The memory that a step works in, whether it is one launch or many.
    fn workspace(&self, rows: Rows) -> Workspace {
        let c = &self.config;
        Workspace {
            rows,
            embed: self.weights.embed.ptr(),
            cos: self.cos.ptr(),
            sin: self.sin.ptr(),
            tables: self.page_table.ptr(),
            residual: self.residual(),
            qkv: self.qkv.ptr_mut(),
            sums: self.sums.ptr_mut(),
            scales: self.scales.ptr_mut(),
            attended: self.attended.ptr_mut(),
            activation: self.activation.ptr_mut(),
            q_heads: c.plan.attention.query_heads as u32,
            kv_heads: c.plan.attention.key_value_heads as u32,
            vocab: c.vocab_size as u32,
            table_stride: self.table_stride(),
            splits: self.room.splits() as u32,
            eps: c.rms_norm_eps,
            head_norm: c.plan.attention.traits.head_norm.into(),
        }
    }

    fn residual(&self) -> Residual {
        Residual {
            x: self.residual.ptr_mut(),
            scaled: self.scaled.ptr_mut(),
            squares: self.squares.ptr_mut(),
            spans: Default::default(),
            dim: self.config.plan.hidden as u32,
        }
    }

    /// Most tokens that a sequence may have.
    pub fn capacity(&self) -> usize {
        self.room.context
    }

    /// The sizes that memory was allocated for.
    pub fn room(&self) -> Capacity {
        self.room
    }

    /// The cache.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// Writes the [page tables](Self::page_tables), beginning with the first, after everything enqueued so far.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If there are more entries than fit, or an entry names a page that the cache does not have: a bug of the caller.
    pub fn set_page_tables(&mut self, tables: &[u32]) -> Result<(), Error> {
        let pages = self.cache.pages();
        if let Some(page) = tables.iter().find(|&&page| page as usize >= pages) {
            panic!("page {page} of a cache of {pages}");
        }
        self.page_table.write(0, tables)
    }

    /// `[sequences, pages of the context]`: for each page of a sequence, the number of its page in the cache.
    pub fn page_tables(&self) -> &Buffer<u32> {
        &self.page_table
    }

    /// The model's sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The lists of rows that the next pass runs. A planning kernel fills them in.
    pub fn rows(&self) -> Rows {
        self.rows.rows()
    }

    /// `[rows, vocab]`. A pass writes the logits of the rows that they were wanted for.
    pub fn logits(&self) -> &Buffer<f32> {
        &self.logits
    }

    /// Enqueues a pass over the rows that [`rows`](Self::rows) holds when it runs: at most `most_rows` rows of one
    /// sequence, at positions below `end`.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If there is no [room](Self::room) for so many rows or such positions, or `output` names other rows: a bug of the
    /// caller.
    pub fn enqueue(&self, most_rows: u32, end: u32, output: RowOutput) -> Result<(), Error> {
        // SAFETY: the lists are of self; launches alone fill them in, and each is of rows that there is room for.
        unsafe { self.enqueue_rows(&Pass { rows: self.rows(), most_rows, end, tiles: None, output }).map(drop) }
    }

    /// Checks that there is room for a pass over `rows` rows, at positions below `end`.
    ///
    /// # Panics
    /// If there is not.
    fn check_room(&self, rows: usize, end: usize) {
        let room = &self.room;
        assert!(rows <= room.rows, "{rows} rows, and room for {}", room.rows);
        assert!(end <= room.context, "positions below {end}, and room for {}", room.context);
    }

    /// Enqueues a pass over rows of any sequences, as many as there is [room](Self::room) for. If the pass has tiles
    /// and [`prepare_batched`](Self::prepare_batched) was called, it takes the kernels for many rows. The bits are the
    /// same on every path. If [best tokens](RowOutput::Best) are wanted and found without logits, returns where the
    /// [rank](gpu_kernels::sample::rank) of each row's best token will be.
    ///
    /// If the host knows the rows, [`list_rows`](Self::list_rows) makes lists for which this is safe.
    ///
    /// # Safety
    /// When it runs, the pass's lists are as [`Pass`] says: at most `most_rows` rows, of sequences that there is room
    /// for, at positions below its `end`; and tiles within the rows. All lists live until the device is done.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// As [`enqueue`](Self::enqueue).
    pub unsafe fn enqueue_rows(&self, pass: &Pass) -> Result<Option<Global<u64>>, Error> {
        self.check_room(pass.most_rows as usize, pass.end as usize);
        pass.output.check(pass.most_rows as usize);
        match (&self.batched, pass.tiles) {
            (Some(batched), Some(tiles)) => self.enqueue_batched(batched, pass, tiles),
            _ => self.enqueue_unfused(pass).map(|()| None),
        }
    }

    /// Enqueues a pass over at most [`MAX_DECODE_ROWS`] rows of one sequence, with the logits of all of them. If there
    /// is a decode kernel, the pass is one launch of it; otherwise it is as [`enqueue`](Self::enqueue). Both give the
    /// same bits.
    ///
    /// # Safety
    /// If there is a [decode kernel](Self::decode), its counters are zero when it begins: a planning kernel sees to
    /// that.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// As [`enqueue`](Self::enqueue), and if there are more rows than [`MAX_DECODE_ROWS`].
    pub unsafe fn enqueue_decode(&self, most_rows: u32, end: u32) -> Result<(), Error> {
        assert!(most_rows <= MAX_DECODE_ROWS, "{most_rows} rows, of {MAX_DECODE_ROWS}");
        self.check_room(most_rows as usize, end as usize);
        match self.decode() {
            // SAFETY: the lists are of self; the caller's word for the counters.
            Some(decode) => unsafe {
                self.enqueue_decode_kernel(decode, self.step_rows(), (most_rows, RowsOf::OneSequence))
            },
            None => self.enqueue(most_rows, end, RowOutput::LogitsFrom(0)),
        }
    }

    /// Enqueues a pass over rows of any sequences, on the path that is quickest on Hopper
    /// (docs/reference/performance.md). Up to [`MAX_DECODE_ROWS`] rows go through the decode kernel, if there is one;
    /// all others go as in [`enqueue_rows`](Self::enqueue_rows). The bits are the same. The result is as that
    /// function's.
    ///
    /// # Safety
    /// As [`enqueue_rows`](Self::enqueue_rows), and the rows relate to each other as `rows` says. If they are of
    /// several sequences, there are exactly `most_rows` of them.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// As [`enqueue_rows`](Self::enqueue_rows).
    pub unsafe fn enqueue_quickest(&mut self, pass: &Pass, rows: RowsOf) -> Result<Option<Global<u64>>, Error> {
        if is_for_few(pass.most_rows) {
            self.check_room(pass.most_rows as usize, pass.end as usize);
            if let Some(decode) = self.decode.as_mut() {
                decode.begin()?;
            }
            if let Some(decode) = self.decode() {
                // SAFETY: the counters were cleared; the caller's word for the rows.
                unsafe { self.enqueue_decode_kernel(decode, pass.rows, (pass.most_rows, rows))? };
                return Ok((pass.output == RowOutput::Best).then(|| decode.best()));
            }
        }
        // SAFETY: the caller's word.
        unsafe { self.enqueue_rows(pass) }
    }

    /// Enqueues a run of the decode kernel. `most` is the most rows and how they relate to each other.
    ///
    /// # Safety
    /// The counters are zero when it runs. The rows are as [`enqueue_rows`](Self::enqueue_rows) says, at most so many,
    /// and relate to each other as `most` says.
    unsafe fn enqueue_decode_kernel(&self, decode: &Decode, rows: Rows, most: (u32, RowsOf)) -> Result<(), Error> {
        let c = &self.config;
        if let Some(trace) = &self.trace {
            // The trace has room for one run only.
            trace.enqueue_clear()?;
        }
        let eagle = |pairs: &Pairs| EagleStep { pairs: pairs.rows(), own: pairs.own() };
        let step = DecodeStep {
            work: self.workspace(rows),
            stream: self.weights.stream.weights().ptr(),
            logits: self.logits.ptr_mut(),
            trace: self.trace.as_ref().map_or(Default::default(), Buffer::ptr_mut),
            layer_count: c.num_hidden_layers as u32,
            intermediate: c.plan.activation_size() as u32,
            taps: self.wanted_states().map(HiddenStates::taps).unwrap_or_default(),
            eagle: self.pairs.as_ref().map(eagle).unwrap_or_default(),
            ..DecodeStep::default()
        };
        // SAFETY: buffers of self, sized as the parameter block says; the caller's word for the rest.
        unsafe { decode.enqueue(&self.device, most, step) }
    }
}
