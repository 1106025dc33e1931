//! The same rows on each path that a device has.

use std::ops::Range;

use crate::uploaded;

/// The logits of the last `rows` tokens, `[rows, vocab]` each, with made-up keys and values of those before them: by
/// the decode kernel, by the unfused path, and by the kernels for many sequences.
///
/// # Panics
/// If anything fails, or the device has no decode kernel.
pub fn decode_unfused_and_batched(
    device: &host::device::Device,
    config: &model::Config,
    weights: host::weights::DeviceWeights,
    tokens: &[u32],
    rows: usize,
) -> [Vec<f32>; 3] {
    use gpu_kernels::step::{self, PlanPrompt, STATE_WORDS, SequenceState};
    use host::forward::{Forward, Pass, Row, RowOutput, RowsOf};

    let run = move || -> Result<[Vec<f32>; 3], host::Error> {
        let quantised = weights.compact.bytes().is_some();
        let mut forward = Forward::new(device, config, weights, tokens.len())?;
        assert!(forward.prepare_decode()? && forward.prepare_batched()?, "the device has no decode kernels");
        let codes = forward.compact_bytes();
        assert_eq!(codes.is_some(), quantised, "quantised weights are read as codes");
        let history: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        let history = device.upload(&history)?;
        let words = device.zeroed::<u32>(STATE_WORDS)?;
        let state = SequenceState { history: history.ptr_mut(), words: words.ptr_mut() };
        let step_rows = forward.rows();
        let plan = |start: usize, count: usize| {
            let plan = PlanPrompt { rows: step_rows, state, start: start as u32, count: count as u32 };
            // SAFETY: the history has the tokens, and steps have room for the rows.
            unsafe { device.launch::<step::plan_prompt>(1, 0, plan) }
        };
        let prompt = tokens.len() - rows;
        forward.fill_cache(&cache_pattern())?;
        let logits = |forward: &Forward| {
            let mut out = vec![0.0; rows * config.vocab_size];
            forward.logits().read(0, &mut out).map(|()| out)
        };
        plan(prompt, rows)?;
        // SAFETY: no step was run yet: the counters are as they were made.
        unsafe { forward.enqueue_decode(rows as u32, tokens.len() as u32)? };
        let fused = logits(&forward)?;
        // The same rows once more: they append the same keys and values again.
        if rows == 1 {
            // Before the sequence flags of what blocks exchange begin anew, and after it.
            forward.use_up_flags()?;
        }
        for _ in 0..2 {
            plan(prompt, rows)?;
            let (most_rows, end) = (rows as u32, tokens.len() as u32);
            let pass = Pass { rows: step_rows, most_rows, end, tiles: None, output: RowOutput::LogitsFrom(0) };
            // SAFETY: the plan's rows, all of the one sequence.
            unsafe { forward.enqueue_quickest(&pass, RowsOf::OneSequence)? };
            assert_eq!(logits(&forward)?, fused);
        }
        plan(prompt, rows)?;
        forward.enqueue(rows as u32, tokens.len() as u32, RowOutput::LogitsFrom(0))?;
        let unfused = logits(&forward)?;
        let row = |position: usize| Row { token: tokens[position], position: position as u32, sequence: 0 };
        let listed = forward.list_rows(&(prompt..tokens.len()).map(row).collect::<Vec<_>>())?;
        forward.enqueue_listed(&listed, RowOutput::LogitsFrom(0))?;
        Ok([fused, unfused, logits(&forward)?])
    };
    run().unwrap_or_else(|e| panic!("{e}"))
}

/// Made-up keys and values: no page of them is like another.
fn cache_pattern() -> Vec<half::bf16> {
    (0..4101).map(|i| half::bf16::from_f32((i * 7919 % 2003) as f32 / 1e3 - 1.0)).collect()
}

/// Rows of many sequences with made-up keys and values before them.
struct Company {
    forward: host::forward::Forward,
    listed: host::forward::ListedRows,
    /// Of the sequences in the opposite order.
    reversed: host::forward::ListedRows,
    count: usize,
    vocab: usize,
    in_e4m3: bool,
    /// Whether there are kernels for many sequences.
    is_batched: bool,
}

impl Company {
    /// `positions` are those of each sequence's rows. With the logits of a step by the unfused path; from now on steps
    /// take the quickest one.
    fn new(
        device: &host::device::Device,
        config: &model::Config,
        weights: host::weights::DeviceWeights,
        positions: &[Range<u32>],
    ) -> Result<(Self, Vec<f32>), host::Error> {
        use host::forward::{Capacity, Forward, Row};

        let (sequences, in_e4m3) = (positions.len(), weights.e4m3().is_some());
        let count = positions.iter().map(Range::len).sum::<usize>();
        let context = positions.iter().map(|positions| positions.end as usize).max().unwrap_or(0);
        let stride = context.div_ceil(gpu_kernels::kv::PAGE_TOKENS as usize);
        let room = Capacity::batch(context, sequences, sequences * stride, count.max(65));
        let mut forward = Forward::with_room(device, config, weights, room)?;
        forward.fill_cache(&cache_pattern())?;
        // Every sequence has pages of its own, far from each other.
        let page = |i: u32| i % stride as u32 * sequences as u32 + i / stride as u32;
        forward.set_page_tables(&(0..room.pages as u32).map(page).collect::<Vec<_>>())?;
        let rows = |(sequence, positions): (u32, &Range<u32>)| {
            let token = move |i: u32| (sequence + i * 31) * 7919 % config.vocab_size as u32;
            positions.clone().zip(0..).map(move |(position, i)| Row { token: token(i), position, sequence })
        };
        let listed = forward.list_rows(&(0..).zip(positions).flat_map(rows).collect::<Vec<_>>())?;
        let reversed: Vec<_> = (0..sequences as u32).zip(positions).rev().flat_map(rows).collect();
        let reversed = forward.list_rows(&reversed)?;
        let vocab = config.vocab_size;
        let mut company = Self { forward, listed, reversed, count, vocab, in_e4m3, is_batched: false };
        let unfused = company.step()?;
        let forward = &mut company.forward;
        assert!(forward.prepare_decode()?, "the device has no decode kernel");
        company.is_batched = forward.prepare_batched()?;
        Ok((company, unfused))
    }

    /// The logits of the last step.
    fn read(&self) -> Result<Vec<f32>, host::Error> {
        let mut out = vec![0.0; self.count * self.vocab];
        self.forward.logits().read(0, &mut out).map(|()| out)
    }

    /// The logits of a step of many sequences.
    fn step(&self) -> Result<Vec<f32>, host::Error> {
        self.forward.enqueue_listed(&self.listed, host::forward::RowOutput::LogitsFrom(0))?;
        self.read()
    }

    /// That a step of many sequences finds the best tokens of these logits. Only where the head is a launch of its own,
    /// in e4m3 and with more rows than a launch takes: what the rows before had found must count no more.
    fn check_best(&self, logits: &[f32]) -> Result<(), host::Error> {
        if !self.in_e4m3 && self.count <= gpu_kernels::batched::MAX_BATCHED_ROWS as usize {
            return Ok(());
        }
        for rows in [&self.reversed, &self.listed] {
            self.forward.enqueue_listed(rows, host::forward::RowOutput::Best)?;
        }
        for (found, logits) in self.forward.best_tokens(self.count)?.into_iter().zip(logits.chunks(self.vocab)) {
            let ranks = logits.iter().zip(0..).map(|(&logit, token)| gpu_kernels::sample::rank(logit, token));
            assert_eq!(Some(found), ranks.max());
        }
        Ok(())
    }
}

/// The logits of rows of many sequences, `[rows, vocab]`: by the unfused path, by the kernels for many sequences, and
/// by those with GEMMs as launches. `positions` are those of each sequence's rows; keys and values before them are made
/// up.
///
/// # Panics
/// If anything fails, or the device has no such kernels.
pub fn unfused_and_batched(
    device: &host::device::Device,
    config: &model::Config,
    weights: host::weights::DeviceWeights,
    positions: &[Range<u32>],
) -> [Vec<f32>; 3] {
    let run = move || -> Result<[Vec<f32>; 3], host::Error> {
        let (mut company, unfused) = Company::new(device, config, weights, positions)?;
        assert!(company.is_batched, "the device has no kernels for many sequences");
        let batched = company.step()?;
        company.forward.use_gemm_from(1);
        let by_gemm = company.step()?;
        company.check_best(&by_gemm)?;
        Ok([unfused, batched, by_gemm])
    };
    run().unwrap_or_else(|e| panic!("{e}"))
}

/// The same of few rows, by the unfused path and by the decode kernel.
///
/// # Panics
/// As [`unfused_and_batched`].
pub fn unfused_and_decode_kernel(
    device: &host::device::Device,
    config: &model::Config,
    weights: host::weights::DeviceWeights,
    positions: &[Range<u32>],
) -> [Vec<f32>; 2] {
    use host::forward::RowOutput::LogitsFrom;

    let run = move || -> Result<[Vec<f32>; 2], host::Error> {
        let (mut company, unfused) = Company::new(device, config, weights, positions)?;
        // Twice: what one step leaves is read by the next. Other logits lie there until then.
        company.forward.enqueue_listed(&company.reversed, LogitsFrom(0))?;
        company.forward.enqueue_sequences(&company.listed, LogitsFrom(0))?;
        let once = company.read()?;
        company.forward.enqueue_sequences(&company.reversed, LogitsFrom(0))?;
        company.forward.enqueue_sequences(&company.listed, LogitsFrom(0))?;
        let again = company.read()?;
        assert!(once == again, "the second step of the decode kernel has other logits");
        company.forward.use_gemm_from(1);
        company.check_best(&again)?;
        Ok([unfused, again])
    };
    run().unwrap_or_else(|e| panic!("{e}"))
}

/// The logits of every token by the pass for prompts, run in pieces of `piece` tokens, `[tokens, vocab]`.
///
/// # Panics
/// If anything fails, or the device has no such pass.
pub fn prefilled(
    device: &host::device::Device,
    checkpoint: &model::Checkpoint,
    tokens: &[u32],
    piece: usize,
) -> Vec<f32> {
    prefilled_in_pieces(device, checkpoint, tokens, piece, 0)
}

/// The logits of the last token alone, the only ones that the pieces are asked for.
///
/// # Panics
/// As [`prefilled`].
pub fn prefilled_to_the_end(
    device: &host::device::Device,
    checkpoint: &model::Checkpoint,
    tokens: &[u32],
    piece: usize,
) -> Vec<f32> {
    prefilled_in_pieces(device, checkpoint, tokens, piece, tokens.len() - 1)
}

/// The logits of the tokens from `wanted` on.
fn prefilled_in_pieces(
    device: &host::device::Device,
    checkpoint: &model::Checkpoint,
    tokens: &[u32],
    piece: usize,
    wanted: usize,
) -> Vec<f32> {
    use gpu_kernels::step::{self, PlanPrompt, Rows, STATE_WORDS, SequenceState};
    use host::forward::{Forward, RowOutput};

    let run = || -> Result<Vec<f32>, host::Error> {
        let mut forward = Forward::new(device, &checkpoint.config, uploaded(device, checkpoint), tokens.len())?;
        forward.prepare_prefill()?;
        let history: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
        let history = device.upload(&history)?;
        let words = device.zeroed::<u32>(STATE_WORDS)?;
        let state = SequenceState { history: history.ptr_mut(), words: words.ptr_mut() };
        let plan = |rows: Rows, start: usize, count: usize| {
            let plan = PlanPrompt { rows, state, start: start as u32, count: count as u32 };
            // SAFETY: the history has the tokens, and rows have room for a piece.
            unsafe { device.launch::<step::plan_prompt>(1, 0, plan) }
        };
        let vocab = checkpoint.config.vocab_size;
        let mut logits = vec![0.0; (tokens.len() - wanted) * vocab];
        for at in (0..tokens.len()).step_by(piece) {
            let end = tokens.len().min(at + piece);
            plan(forward.prefill().expect("the device has no pass for prompts").rows(), at, end - at)?;
            let from = wanted.max(at);
            let rows = if from < end { RowOutput::LogitsFrom((from - at) as u32) } else { RowOutput::None };
            forward.enqueue_prefill(at, end - at, rows)?;
            for first in (from..end).step_by(64) {
                let rows = (end - first).min(64);
                plan(forward.rows(), first, rows)?;
                forward.enqueue_head(first - at, rows as u32)?;
                forward.logits().read(0, &mut logits[(first - wanted) * vocab..][..rows * vocab])?;
            }
        }
        Ok(logits)
    };
    run().unwrap_or_else(|e| panic!("{e}"))
}
