//! The n-gram drafting operators over batches. [`Inputs`] are a batch's arrays on the host, with the serial algorithm's
//! answer. [`Batch`] is the same batch on a device, where the kernels run on it.
//!
//! The decode loop of [`host::Gpu`] launches the operator on its own buffers. This module is for batches that come as
//! arrays: tests at scale, and measuring ([`measure`]).

mod inputs;
pub mod measure;

use bench_kernels::ngram::{self as kernels, peers};
use bytemuck::Pod;
use cuda_std::Kernel;
use gpu_kernels::ngram::{self, NgramMatch, NgramMatchMixed, Sequences, Token};

pub use inputs::{Hit, Inputs, Operator, Outcome, Published};

use host::Error;
use host::device::{Buffer, Device, Pinned};

/// A token id that the operators are compiled for.
pub trait TokenId: Token + Pod + Eq + std::fmt::Debug + Send + Sync {
    /// `ngram_match` for it.
    type Match: Kernel<Params = NgramMatch<Self>>;
    /// `ngram_match_mixed` for it.
    type Mixed: Kernel<Params = NgramMatchMixed<Self>>;
    /// `ngram_match_together` for it.
    type MatchTogether: Kernel<Params = NgramMatch<Self>>;
    /// `ngram_match_mixed_together` for it.
    type MixedTogether: Kernel<Params = NgramMatchMixed<Self>>;

    /// Id number `small`: distinct ids for distinct numbers.
    fn from_small(small: i32) -> Self;
}

impl TokenId for i32 {
    type Match = kernels::ngram_match_i32;
    type Mixed = ngram::ngram_match_mixed_i32;
    type MatchTogether = kernels::ngram_match_together_i32;
    type MixedTogether = kernels::ngram_match_mixed_together_i32;

    fn from_small(small: i32) -> Self {
        small
    }
}

impl TokenId for i64 {
    type Match = kernels::ngram_match_i64;
    type Mixed = kernels::ngram_match_mixed_i64;
    type MatchTogether = kernels::ngram_match_together_i64;
    type MixedTogether = kernels::ngram_match_mixed_together_i64;

    fn from_small(small: i32) -> Self {
        small.into()
    }
}

/// How a batch is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Spreads the work over this many blocks, at least 1.
    Blocks(u32),
    /// One block for each sequence: [`ngram::together`](mod@ngram::together).
    Together,
}

/// Batches on a device: one or several copies of the same [`Inputs`], side by side in memory.
///
/// Several copies are for measuring: launches that rotate over them find no tokens in the cache.
pub struct Batch<T> {
    device: Device,
    sets: usize,
    batch: usize,
    input_ids: Buffer<T>,
    input_ids_stride: usize,
    input_ids_len: Buffer<i64>,
    pre_ids: Buffer<T>,
    pre_ids_stride: usize,
    step_idx: Buffer<i64>,
    max_dec_len: Buffer<i64>,
    draft_token_num: Buffer<i32>,
    encoder: Buffer<i32>,
    decoder: Buffer<i32>,
    rows: Buffer<i32>,
    draft_tokens: Buffer<T>,
    draft_tokens_stride: usize,
    workspace: Buffer<u64>,
    max_ngram_size: u32,
    threshold: i32,
    operator: Operator,
    longest: u32,
}

/// `copies` copies of `data`, one after the other.
fn upload<T: Pod>(device: &Device, data: &[T], copies: usize) -> Result<Buffer<T>, Error> {
    let mut buffer = device.zeroed(data.len() * copies)?;
    for copy in 0..copies {
        buffer.write(copy * data.len(), data)?;
    }
    Ok(buffer)
}

impl<T: TokenId> Batch<T> {
    /// Uploads `sets` copies of `inputs`.
    ///
    /// # Errors
    /// If there is too little device memory, or the driver fails.
    pub fn new(device: &Device, inputs: &Inputs<T>, sets: usize) -> Result<Self, Error> {
        let before = inputs.before();
        let filled = u64::from_ne_bytes([ngram::WORKSPACE_FILL; 8]);
        let workspace = vec![filled; ngram::workspace_len(inputs.batch as u32)];
        Ok(Self {
            device: device.clone(),
            sets,
            batch: inputs.batch,
            input_ids: upload(device, &inputs.input_ids, sets)?,
            input_ids_stride: inputs.input_ids_stride,
            input_ids_len: upload(device, &inputs.input_ids_len, sets)?,
            pre_ids: upload(device, &inputs.pre_ids, sets)?,
            pre_ids_stride: inputs.pre_ids_stride,
            step_idx: upload(device, &inputs.step_idx, sets)?,
            max_dec_len: upload(device, &inputs.max_dec_len, sets)?,
            draft_token_num: upload(device, &inputs.draft_token_num, sets)?,
            encoder: upload(device, &inputs.encoder, sets)?,
            decoder: upload(device, &inputs.decoder, sets)?,
            rows: upload(device, &before.rows, sets)?,
            draft_tokens: upload(device, &before.drafts, sets)?,
            draft_tokens_stride: inputs.draft_tokens_stride,
            workspace: device.upload(&workspace)?,
            max_ngram_size: inputs.max_ngram_size,
            threshold: inputs.threshold,
            operator: inputs.operator,
            longest: inputs.longest(),
        })
    }

    /// How many copies there are.
    pub fn sets(&self) -> usize {
        self.sets
    }

    fn sequences(&self, set: usize) -> Sequences<T> {
        assert!(set < self.sets, "set {set} of {}", self.sets);
        let at = set * self.batch;
        // SAFETY: every array holds `sets * batch` rows.
        unsafe {
            Sequences {
                input_ids: self.input_ids.ptr().at(at * self.input_ids_stride),
                input_ids_len: self.input_ids_len.ptr().at(at),
                pre_ids: self.pre_ids.ptr().at(at * self.pre_ids_stride),
                step_idx: self.step_idx.ptr().at(at),
                max_dec_len: self.max_dec_len.ptr().at(at),
                seq_lens_decoder: self.decoder.ptr().at(at),
                seq_lens_this_time: self.rows.ptr_mut().at(at),
                draft_tokens: self.draft_tokens.ptr_mut().at(at * self.draft_tokens_stride),
                workspace: self.workspace.ptr_mut(),
                input_ids_stride: self.input_ids_stride as u32,
                pre_ids_stride: self.pre_ids_stride as u32,
                draft_tokens_stride: self.draft_tokens_stride as u32,
                batch: self.batch as u32,
                max_ngram_size: self.max_ngram_size,
                threshold: self.threshold,
            }
        }
    }

    fn match_params(&self, set: usize) -> NgramMatch<T> {
        let at = set * self.batch;
        let sequences = self.sequences(set);
        // SAFETY: as in `sequences`, which has checked the set.
        let (seq_lens_encoder, draft_token_num) =
            unsafe { (self.encoder.ptr().at(at), self.draft_token_num.ptr().at(at)) };
        NgramMatch { sequences, seq_lens_encoder, draft_token_num }
    }

    /// How the operator is launched by default.
    pub fn way(&self) -> Way {
        let (batch, longest, sms) = (self.batch as u32, self.longest, self.device.sms());
        if ngram::together::<T>(batch, longest, sms) {
            Way::Together
        } else {
            Way::Blocks(ngram::blocks::<T>(batch, longest, sms))
        }
    }

    /// Enqueues the operator on copy `set`, in [`Batch::way`]. Copies share a workspace, so all launches must be on one
    /// queue.
    ///
    /// # Errors
    /// If the driver fails; under the emulator also whatever the kernel did wrong.
    pub fn launch(&self, set: usize) -> Result<(), Error> {
        self.launch_with(set, self.way())
    }

    /// As [`Batch::launch`], in a given way. The result does not depend on the way.
    ///
    /// # Errors
    /// As for [`Batch::launch`].
    ///
    /// # Panics
    /// If the way cannot take so many sequences.
    pub fn launch_with(&self, set: usize, way: Way) -> Result<(), Error> {
        match self.operator {
            _ if self.batch == 0 => Ok(()),
            Operator::Match => self.enqueue::<T::Match, T::MatchTogether, _>(way, self.match_params(set)),
            Operator::Mixed { max_draft_tokens, min_ngram_size } => {
                let params = NgramMatchMixed { sequences: self.sequences(set), max_draft_tokens, min_ngram_size };
                self.enqueue::<T::Mixed, T::MixedTogether, _>(way, params)
            }
        }
    }

    fn enqueue<K, Together, P: Copy + 'static>(&self, way: Way, params: P) -> Result<(), Error>
    where
        K: Kernel<Params = P>,
        Together: Kernel<Params = P>,
    {
        let (device, batch) = (&self.device, self.batch as u32);
        // SAFETY: buffers of self, as large as the inputs say, and a workspace of the batch's size.
        unsafe {
            match way {
                Way::Blocks(blocks) => device.launch::<K>(blocks, ngram::SHARED_BYTES, params),
                Way::Together => {
                    assert!(batch <= ngram::MOST_SEQUENCES, "{batch} sequences together");
                    device.launch_cooperative::<Together>(batch, ngram::together::SHARED_BYTES, params)
                }
            }
        }
    }

    /// Resets the outputs of every copy to what they were before the first launch.
    ///
    /// # Errors
    /// A driver error.
    pub fn reset(&mut self, inputs: &Inputs<T>) -> Result<(), Error> {
        let before = inputs.before();
        for set in 0..self.sets {
            self.rows.write(set * self.batch, &before.rows)?;
            self.draft_tokens.write(set * self.batch * self.draft_tokens_stride, &before.drafts)?;
        }
        Ok(())
    }

    /// What the operator left in copy `set`; waits for it.
    ///
    /// # Errors
    /// A driver error, or whatever a kernel failed with.
    pub fn outcome(&self, set: usize) -> Result<Outcome<T>, Error> {
        let mut rows = vec![0; self.batch];
        let mut drafts = vec![T::NONE; self.batch * self.draft_tokens_stride];
        self.rows.read(set * self.batch, &mut rows)?;
        self.draft_tokens.read(set * drafts.len(), &mut drafts)?;
        Ok(Outcome { rows, drafts })
    }

    /// Checks what the operator left in copy `set`, and that the workspace is as the next launch needs it. Returns what
    /// is wrong, if anything.
    ///
    /// # Errors
    /// As for [`Batch::outcome`].
    pub fn check(&self, set: usize, expected: &Outcome<T>) -> Result<Option<String>, Error> {
        let found = self.outcome(set)?;
        if let Some(b) = (0..self.batch).find(|&b| found.rows[b] != expected.rows[b]) {
            let (found, expected) = (found.rows[b], expected.rows[b]);
            return Ok(Some(format!("sequence {b} of {} has {found} rows instead of {expected}", self.batch)));
        }
        if let Some(at) = (0..found.drafts.len()).find(|&at| found.drafts[at] != expected.drafts[at]) {
            let stride = self.draft_tokens_stride;
            return Ok(Some(format!("row {} of sequence {} of {}", at % stride, at / stride, self.batch)));
        }
        let mut workspace = vec![0u64; self.workspace.len()];
        self.workspace.read(0, &mut workspace)?;
        Ok((!ngram::is_ready(&workspace)).then(|| "the workspace was not put back".into()))
    }
}

/// A slower design of [`peers`], to be measured against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// 256 threads a sequence, then one thread for the budget and the copies.
    Plain,
    /// 1,024 threads a sequence, then a block scan.
    BlockScan,
}

impl Batch<i64> {
    /// Enqueues `ngram_match` on copy `set` in a slower design.
    ///
    /// # Errors
    /// As for [`Batch::launch`].
    ///
    /// # Panics
    /// If the operator is the mixed one, which has no such designs.
    pub fn launch_peer(&self, set: usize, peer: Peer) -> Result<(), Error> {
        assert!(self.operator == Operator::Match, "a peer of the mixed operator");
        if self.batch == 0 {
            return Ok(());
        }
        let (device, params) = (&self.device, self.match_params(set));
        let (batch, search, share) = (self.batch as u32, peers::SEARCH_SHARED_BYTES, ngram::SHARED_BYTES);
        // SAFETY: as in `launch_with`.
        unsafe {
            match peer {
                Peer::Plain => {
                    device.launch::<peers::ngram_windows_256_i64>(batch, search, params)?;
                    device.launch::<peers::ngram_serial_share_i64>(1, 0, params)
                }
                Peer::BlockScan => {
                    device.launch::<peers::ngram_windows_1024_i64>(batch, search, params)?;
                    device.launch::<peers::ngram_scan_share_i64>(1, share, params)
                }
            }
        }
    }
}

/// The way over the host: it copies the batch to pinned memory, runs the serial algorithm, and copies the outputs back.
pub struct OverHost<'a, T: TokenId> {
    batch: &'a mut Batch<T>,
    input_ids: Pinned<T>,
    pre_ids: Pinned<T>,
    long: [Pinned<i64>; 3],
    short: [Pinned<i32>; 4],
    draft_tokens: Pinned<T>,
}

impl<'a, T: TokenId> OverHost<'a, T> {
    /// Pinned memory for copy 0 of `batch`.
    ///
    /// # Errors
    /// Too little pinnable memory.
    pub fn new(batch: &'a mut Batch<T>) -> Result<Self, Error> {
        let (device, n) = (batch.device.clone(), batch.batch);
        let long = || device.pinned(n);
        let short = || device.pinned(n);
        Ok(Self {
            input_ids: device.pinned(n * batch.input_ids_stride)?,
            pre_ids: device.pinned(n * batch.pre_ids_stride)?,
            long: [long()?, long()?, long()?],
            short: [short()?, short()?, short()?, short()?],
            draft_tokens: device.pinned(n * batch.draft_tokens_stride)?,
            batch,
        })
    }

    /// Runs `ngram_match` over the host: copies, search, copies.
    ///
    /// # Errors
    /// A driver error.
    pub fn run(&mut self) -> Result<(), Error> {
        let b = &mut *self.batch;
        // SAFETY: everything lives as long as self, and is waited for below.
        unsafe {
            b.input_ids.copy_to_pinned(0, &mut self.input_ids)?;
            b.pre_ids.copy_to_pinned(0, &mut self.pre_ids)?;
            for (from, to) in [&b.input_ids_len, &b.step_idx, &b.max_dec_len].into_iter().zip(&mut self.long) {
                from.copy_to_pinned(0, to)?;
            }
            for (from, to) in [&b.decoder, &b.encoder, &b.draft_token_num, &b.rows].into_iter().zip(&mut self.short) {
                from.copy_to_pinned(0, to)?;
            }
            b.draft_tokens.copy_to_pinned(0, &mut self.draft_tokens)?;
        }
        let [input_ids_len, step_idx, max_dec_len] = &self.long;
        let [decoder, encoder, draft_token_num, rows] = &mut self.short;
        ngram::reference::ngram_match(
            &ngram::reference::Batch {
                input_ids: &self.input_ids.as_slice()?,
                input_ids_stride: b.input_ids_stride,
                input_ids_len: &input_ids_len.as_slice()?,
                pre_ids: &self.pre_ids.as_slice()?,
                pre_ids_stride: b.pre_ids_stride,
                step_idx: &step_idx.as_slice()?,
                max_dec_len: &max_dec_len.as_slice()?,
                seq_lens_decoder: &decoder.as_slice()?,
            },
            &encoder.as_slice()?,
            &draft_token_num.as_slice()?,
            b.max_ngram_size,
            b.threshold,
            &mut ngram::reference::Drafts {
                seq_lens_this_time: &mut rows.as_mut_slice()?,
                draft_tokens: &mut self.draft_tokens.as_mut_slice()?,
                draft_tokens_stride: b.draft_tokens_stride,
            },
        );
        // SAFETY: as above.
        unsafe {
            b.rows.copy_from_pinned(0, rows)?;
            b.draft_tokens.copy_from_pinned(0, &self.draft_tokens)?;
        }
        b.device.synchronize()
    }
}
