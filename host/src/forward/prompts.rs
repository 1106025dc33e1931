//! Passes over many rows of prompts, and the logits of selected rows.

use cuda_std::Global;
use gpu_kernels::batch::{self, PickRows};
use gpu_kernels::step::Rows;

use super::{Forward, RowOutput};
use crate::Error;
use crate::prefill::{Prefill, PrefillInputs, Results};
use crate::timed::timed;

impl Forward {
    /// Allocates what passes over many rows of a prompt need, if the device has the hardware.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn prepare_prefill(&mut self) -> Result<(), Error> {
        self.prepare_prefill_of(self.room.context)
    }

    /// As [`prepare_prefill`](Self::prepare_prefill), for up to `rows` rows at a time.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn prepare_prefill_of(&mut self, rows: usize) -> Result<(), Error> {
        if self.device.capabilities().has_gemms() {
            let in_e4m3 = self.weights.e4m3().is_some();
            let prefill = || Prefill::new(&self.device, &self.config, &self.cache, rows, in_e4m3);
            self.prefill = Some(timed("memory for passes over prompts", prefill)?);
        }
        Ok(())
    }

    /// The memory of passes over prompts, if it was prepared. All rows of prompts then go through such passes.
    pub fn prefill(&self) -> Option<&Prefill> {
        self.prefill.as_ref()
    }

    /// Enqueues a pass over `count` rows of a prompt, from position `start` on. The rows of the
    /// [prefill](Self::prefill) hold them when it runs. Afterwards, logits can be had only of the rows that `output`
    /// names.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If passes over prompts were not prepared, or there is no room for these rows: a bug of the caller.
    pub fn enqueue_prefill(&mut self, start: usize, count: usize, output: RowOutput) -> Result<(), Error> {
        self.check_room(0, start.saturating_add(count));
        output.check(count);
        let (tables, table_stride) = (self.page_table.ptr(), self.table_stride());
        let Self { device, config, weights, cache, cos, sin, prefill, states, .. } = self;
        let states = states.as_ref();
        let parts = PrefillInputs { device, config, weights, cache, tables, table_stride, cos, sin, states };
        // SAFETY: every part is of self; sequence 0 has pages for so many positions.
        unsafe { prefill.as_mut().expect("prepared").enqueue(&parts, start, count, output) }
    }

    /// Enqueues a pass over `count` rows of prompts of any sequences. `tiles` are the tiles of attention, in the form
    /// of [`PrefillAttention::tiles`](gpu_kernels::prefill_attention::PrefillAttention::tiles), and their number. Only
    /// rows from `results` on may be [picked](Self::enqueue_picked) afterwards.
    ///
    /// # Safety
    /// When they run, `rows` are lists of `count` rows, of sequences that there is [room](Self::room) for, at positions
    /// below the context. `tiles` lists as many tiles as it says, each within the rows, and the tiles from `results` on
    /// hold the rows from `results` on. All lists live until the device is done.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If passes over prompts were not prepared, or have no room for so many rows: a bug of the caller.
    pub unsafe fn enqueue_prefill_rows(
        &self,
        rows: Rows,
        count: usize,
        tiles: (Global<u32>, usize),
        results: Results,
    ) -> Result<(), Error> {
        let (tables, table_stride) = (self.page_table.ptr(), self.table_stride());
        let Self { device, config, weights, cache, cos, sin, prefill, .. } = self;
        let states = self.wanted_states();
        // A head that reads the last layer's hidden states needs those of all rows.
        let results = if self.wants_last_layer() { Results { row: 0, tile: 0 } } else { results };
        let parts = PrefillInputs { device, config, weights, cache, tables, table_stride, cos, sin, states };
        // SAFETY: every part is of self; the caller's word for the lists.
        unsafe { prefill.as_ref().expect("prepared").enqueue_rows(&parts, rows, count, tiles, results) }
    }

    /// Enqueues the logits of `count` rows of the last prefill, which `picks` lists. Row `i` of
    /// [`logits`](Self::logits) is that of pick `i`. Of `rows`, only the count is used.
    ///
    /// # Safety
    /// When it runs, `picks` lists `count` rows of the last prefill, and `rows` has their number. Both live until the
    /// device is done.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If passes over prompts were not prepared, or there is no room for so many logits: a bug of the caller.
    pub unsafe fn enqueue_picked(&self, picks: Global<u32>, rows: Rows, count: u32) -> Result<(), Error> {
        // SAFETY: the caller's word.
        unsafe { self.enqueue_picks(picks, 0, rows, count) }
    }

    /// Enqueues the logits of `count` rows of the last prefill, from its row `first` on. Row 0 of
    /// [`logits`](Self::logits) is that of row `first`. [`rows`](Self::rows) hold the same rows when this runs.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If passes over prompts were not prepared or have fewer rows, or there is no room for so many logits: a bug of
    /// the caller.
    pub fn enqueue_head(&self, first: usize, count: u32) -> Result<(), Error> {
        let most = self.prefill().expect("prepared").capacity();
        assert!(first.saturating_add(count as usize) <= most, "{count} rows from {first} on, of {most}");
        // SAFETY: there are such rows, and the lists are of self.
        unsafe { self.enqueue_picks(Global::default(), first as u32, self.rows(), count) }
    }

    /// Enqueues the logits of `count` rows of the last prefill: those that `picks` lists or, without a list, those from
    /// `first` on.
    ///
    /// # Safety
    /// As [`enqueue_picked`](Self::enqueue_picked). Without a list, the prefill has these rows.
    unsafe fn enqueue_picks(&self, picks: Global<u32>, first: u32, rows: Rows, count: u32) -> Result<(), Error> {
        self.check_room(count as usize, 0);
        let (scaled, squares) = self.prefill().expect("prepared").result();
        let pick = PickRows { rows: picks, first, scaled, squares, to: self.residual() };
        // SAFETY: buffers of self with room for so many rows; the picks are rows of the pass.
        unsafe {
            self.device.launch::<batch::pick_rows>((1, count), 0, pick)?;
            self.launch_linear(self.config.head().epilogue, count, self.head(rows, self.scaled.ptr(), self.norm()))
        }
    }
}
