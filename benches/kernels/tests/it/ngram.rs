//! The drafting kernels against the serial algorithm, on hand-worked cases, random batches and hostile values.

use bench_kernels::ngram::{self as kernels, peers};
use cuda_std::Kernel;
use cuda_std::emulator::{Buffer, Launch, Plain, Report, launch};
use gpu_kernels::ngram::reference::{self, Batch, Drafts};
use gpu_kernels::ngram::{self, NgramMatch, NgramMatchMixed, Sequences, Token};
use proptest::prelude::*;

/// The value of a draft that nobody wrote.
const UNTOUCHED: i32 = -77_777;

/// A token type that is made from small numbers, in which tests are written.
trait Id: Token + Plain + std::fmt::Debug + Send + Sync + 'static {
    fn from_small(small: i32) -> Self;
    fn plain(launch: &Launch, p: NgramMatch<Self>) -> Report;
    fn mixed(launch: &Launch, p: NgramMatchMixed<Self>) -> Report;
    fn plain_together(launch: &Launch, p: NgramMatch<Self>) -> Report;
    fn mixed_together(launch: &Launch, p: NgramMatchMixed<Self>) -> Report;
    /// The slower designs, if this type has them: the name and the two launches of each.
    fn peers(_batch: u32, _p: NgramMatch<Self>) -> Vec<(&'static str, Peer)> {
        Vec::new()
    }
}

type Peer = Box<dyn Fn(u64)>;

impl Id for i32 {
    fn from_small(small: i32) -> Self {
        small
    }
    fn plain(launch: &Launch, p: NgramMatch<Self>) -> Report {
        run::<kernels::ngram_match_i32>(launch, p)
    }
    fn mixed(launch: &Launch, p: NgramMatchMixed<Self>) -> Report {
        run::<ngram::ngram_match_mixed_i32>(launch, p)
    }
    fn plain_together(launch: &Launch, p: NgramMatch<Self>) -> Report {
        run::<kernels::ngram_match_together_i32>(launch, p)
    }
    fn mixed_together(launch: &Launch, p: NgramMatchMixed<Self>) -> Report {
        run::<kernels::ngram_match_mixed_together_i32>(launch, p)
    }
}

impl Id for i64 {
    /// Ids that differ only in their high words: comparing half an id would find matches everywhere.
    fn from_small(small: i32) -> Self {
        (small as i64) << 33
    }
    fn plain(launch: &Launch, p: NgramMatch<Self>) -> Report {
        run::<kernels::ngram_match_i64>(launch, p)
    }
    fn mixed(launch: &Launch, p: NgramMatchMixed<Self>) -> Report {
        run::<kernels::ngram_match_mixed_i64>(launch, p)
    }
    fn plain_together(launch: &Launch, p: NgramMatch<Self>) -> Report {
        run::<kernels::ngram_match_together_i64>(launch, p)
    }
    fn mixed_together(launch: &Launch, p: NgramMatchMixed<Self>) -> Report {
        run::<kernels::ngram_match_mixed_together_i64>(launch, p)
    }
    fn peers(batch: u32, p: NgramMatch<Self>) -> Vec<(&'static str, Peer)> {
        let search = move |threads, seed| Launch {
            shared_bytes: peers::SEARCH_SHARED_BYTES,
            seed,
            ..Launch::new(batch, threads)
        };
        let share = |threads, seed| Launch { shared_bytes: ngram::SHARED_BYTES, seed, ..Launch::new(1, threads) };
        let plain = move |seed| {
            run::<peers::ngram_windows_256_i64>(&search(peers::PLAIN_THREADS, seed), p);
            run::<peers::ngram_serial_share_i64>(&share(32, seed), p);
        };
        let scan = move |seed| {
            run::<peers::ngram_windows_1024_i64>(&search(ngram::THREADS, seed), p);
            run::<peers::ngram_scan_share_i64>(&share(ngram::THREADS, seed), p);
        };
        vec![("plain", Box::new(plain)), ("block scan", Box::new(scan))]
    }
}

/// A workspace, filled as it must be before the first launch.
fn workspace(batch: usize) -> Buffer<u64> {
    let filled = u64::from_ne_bytes([ngram::WORKSPACE_FILL; 8]);
    Buffer::from_slice(&vec![filled; ngram::workspace_len(batch as u32)])
}

fn run<K: Kernel>(on: &Launch, params: K::Params) -> Report {
    launch::<K>(on, params).unwrap_or_else(|error| panic!("{error}"))
}

/// One sequence as a test states it.
#[derive(Clone, Debug)]
struct Sequence {
    prompt: Vec<i32>,
    /// The newest token is the last.
    generated: Vec<i32>,
    /// Replaces the prompt's length.
    input_ids_len: Option<i64>,
    /// Replaces the index of the newest token.
    step_idx: Option<i64>,
    draft_token_num: i32,
    /// `max_dec_len - step_idx - 1`, if that can be represented.
    left: i64,
    encoder: i32,
    decoder: i32,
    rows: i32,
}

impl Sequence {
    /// A decoding sequence that wants `want` drafts.
    fn new(prompt: &[i32], generated: &[i32], want: i32) -> Self {
        Self {
            prompt: prompt.to_vec(),
            generated: generated.to_vec(),
            input_ids_len: None,
            step_idx: None,
            draft_token_num: want,
            left: 1000,
            encoder: 0,
            decoder: 1,
            rows: 1,
        }
    }
}

/// Which operator, and what it is told about the whole batch.
#[derive(Clone, Copy, Debug)]
enum Operator {
    Plain,
    Mixed { max_draft_tokens: i32, min_ngram_size: u32 },
}

/// A batch in the operators' layout.
#[derive(Clone, Debug)]
struct Case<T> {
    batch: usize,
    input_ids: Vec<T>,
    input_ids_stride: usize,
    input_ids_len: Vec<i64>,
    pre_ids: Vec<T>,
    pre_ids_stride: usize,
    step_idx: Vec<i64>,
    draft_token_num: Vec<i32>,
    max_dec_len: Vec<i64>,
    encoder: Vec<i32>,
    decoder: Vec<i32>,
    rows: Vec<i32>,
    draft_tokens_stride: usize,
    max_ngram_size: u32,
    threshold: i32,
    operator: Operator,
}

/// What an operator leaves behind.
#[derive(Clone, Debug, PartialEq)]
struct Outcome<T> {
    rows: Vec<i32>,
    drafts: Vec<T>,
}

impl<T: Id> Case<T> {
    /// Rows are `slack` elements longer than the longest text, and padded with tokens that occur in texts.
    fn new(
        sequences: &[Sequence],
        slack: usize,
        places: usize,
        max_ngram_size: u32,
        threshold: i32,
        operator: Operator,
    ) -> Self {
        let longest = |text: fn(&Sequence) -> &Vec<i32>| sequences.iter().map(|s| text(s).len()).max().unwrap_or(0);
        let input_ids_stride = longest(|s| &s.prompt) + slack;
        let pre_ids_stride = longest(|s| &s.generated) + slack;
        let matrix = |text: fn(&Sequence) -> &Vec<i32>, stride: usize| -> Vec<T> {
            let row = |s| (0..stride).map(move |i| text(s).get(i).copied().unwrap_or(i as i32 % 2));
            sequences.iter().flat_map(row).map(T::from_small).collect()
        };
        let step_idx: Vec<i64> = sequences.iter().map(|s| s.step_idx.unwrap_or(s.generated.len() as i64 - 1)).collect();
        Self {
            batch: sequences.len(),
            input_ids: matrix(|s| &s.prompt, input_ids_stride),
            input_ids_stride,
            input_ids_len: sequences.iter().map(|s| s.input_ids_len.unwrap_or(s.prompt.len() as i64)).collect(),
            pre_ids: matrix(|s| &s.generated, pre_ids_stride),
            pre_ids_stride,
            draft_token_num: sequences.iter().map(|s| s.draft_token_num).collect(),
            max_dec_len: sequences
                .iter()
                .zip(&step_idx)
                .map(|(s, &i)| i.saturating_add(1).saturating_add(s.left))
                .collect(),
            step_idx,
            encoder: sequences.iter().map(|s| s.encoder).collect(),
            decoder: sequences.iter().map(|s| s.decoder).collect(),
            rows: sequences.iter().map(|s| s.rows).collect(),
            draft_tokens_stride: places,
            max_ngram_size,
            threshold,
            operator,
        }
    }

    fn before(&self) -> Outcome<T> {
        let drafts = vec![T::from_small(UNTOUCHED); self.batch * self.draft_tokens_stride];
        Outcome { rows: self.rows.clone(), drafts }
    }

    /// The outcome by [`reference`].
    fn expected(&self) -> Outcome<T> {
        let mut outcome = self.before();
        let batch = Batch {
            input_ids: &self.input_ids,
            input_ids_stride: self.input_ids_stride,
            input_ids_len: &self.input_ids_len,
            pre_ids: &self.pre_ids,
            pre_ids_stride: self.pre_ids_stride,
            step_idx: &self.step_idx,
            max_dec_len: &self.max_dec_len,
            seq_lens_decoder: &self.decoder,
        };
        let mut out = Drafts {
            seq_lens_this_time: &mut outcome.rows,
            draft_tokens: &mut outcome.drafts,
            draft_tokens_stride: self.draft_tokens_stride,
        };
        let (n, threshold) = (self.max_ngram_size, self.threshold);
        match self.operator {
            Operator::Plain => {
                reference::ngram_match(&batch, &self.encoder, &self.draft_token_num, n, threshold, &mut out);
            }
            Operator::Mixed { max_draft_tokens, min_ngram_size } => {
                reference::ngram_match_mixed(&batch, max_draft_tokens, n, min_ngram_size, threshold, &mut out);
            }
        }
        outcome
    }

    /// The outcome by the definition, line by line: windows are tried with `want` in hand, sizes downwards, and all
    /// sums are computed afresh. Only for values that a serial program could run on.
    fn by_definition(&self) -> Outcome<T> {
        let Outcome { mut rows, mut drafts } = self.before();
        let counts = |b: usize| match self.operator {
            Operator::Plain => self.encoder[b] > 0 || self.decoder[b] > 0,
            Operator::Mixed { .. } => self.decoder[b] > 0,
        };
        let mut active = (0..self.batch).filter(|&b| counts(b)).count() as i64;
        for b in 0..self.batch {
            let (step, len) = (self.step_idx[b], self.input_ids_len[b]);
            let base = rows[b] as i64;
            let (first, shortest, mut want) = match self.operator {
                Operator::Plain => (1, 1, (self.draft_token_num[b] as i64).min(self.max_dec_len[b] - step - 1)),
                Operator::Mixed { max_draft_tokens, min_ngram_size } => {
                    let want = (max_draft_tokens as i64 - base + 1).min(self.max_dec_len[b] - step - 1);
                    (base, min_ngram_size as i64, want)
                }
            };
            if let Operator::Plain = self.operator {
                if self.encoder[b] > 0 {
                    continue;
                }
                if self.decoder[b] == 0 {
                    rows[b] = 0;
                    continue;
                }
                rows[b] = 1;
            } else if base == 0 || want <= 0 {
                continue;
            }
            active -= 1;
            let used: i64 = rows[..=b].iter().map(|&r| r as i64).sum();
            let threshold = self.threshold as i64;
            if used + want + active > threshold {
                want = want.min(threshold - used - active);
            }
            if used + active >= threshold - 1 {
                continue;
            }
            let input_ids = &self.input_ids[b * self.input_ids_stride..];
            let pre_ids = &self.pre_ids[b * self.pre_ids_stride..];
            let mut n = self.max_ngram_size as i64;
            'sizes: while n >= shortest {
                if n <= step {
                    for (text, len) in [(input_ids, len), (pre_ids, step)] {
                        let mut i = 0;
                        while i <= len - n {
                            let equal = (0..n).all(|j| text[(i + j) as usize] == pre_ids[(step + 1 - n + j) as usize]);
                            let start = i + n;
                            let end = (start + want).min(len);
                            if equal && start < end {
                                for d in start..end {
                                    drafts[b * self.draft_tokens_stride + (first + d - start) as usize] =
                                        text[d as usize];
                                }
                                rows[b] = (first + end - start) as i32;
                                break 'sizes;
                            }
                            i += 1;
                        }
                    }
                }
                n -= 1;
            }
        }
        Outcome { rows, drafts }
    }

    /// The outcome by the kernel, after `launches` launches with one workspace, each under another schedule.
    fn launched(&self, blocks: u32, seed: u64, launches: u64) -> Outcome<T> {
        self.reported(blocks, seed, launches).0
    }

    /// As `launched`, and also runs the slower designs on the same buffers.
    fn with_peers(&self, blocks: u32, seed: u64) -> Outcome<T> {
        self.run(blocks, seed, 1, true).0
    }

    fn reported(&self, blocks: u32, seed: u64, launches: u64) -> (Outcome<T>, Report) {
        self.run(blocks, seed, launches, false)
    }

    fn run(&self, blocks: u32, seed: u64, launches: u64, with_peers: bool) -> (Outcome<T>, Report) {
        self.run_in(&workspace(self.batch), blocks, seed, launches, with_peers)
    }

    fn run_in(
        &self,
        workspace: &Buffer<u64>,
        blocks: u32,
        seed: u64,
        launches: u64,
        with_peers: bool,
    ) -> (Outcome<T>, Report) {
        let input_ids = Buffer::from_slice(&self.input_ids);
        let input_ids_len = Buffer::from_slice(&self.input_ids_len);
        let pre_ids = Buffer::from_slice(&self.pre_ids);
        let step_idx = Buffer::from_slice(&self.step_idx);
        let max_dec_len = Buffer::from_slice(&self.max_dec_len);
        let draft_token_num = Buffer::from_slice(&self.draft_token_num);
        let encoder = Buffer::from_slice(&self.encoder);
        let decoder = Buffer::from_slice(&self.decoder);
        let mut outcome = (self.before(), Report::default());
        for again in 0..launches {
            let before = self.before();
            let mut rows = Buffer::from_slice(&before.rows);
            let mut drafts = Buffer::from_slice(&before.drafts);
            let sequences = Sequences {
                input_ids: input_ids.ptr(),
                input_ids_len: input_ids_len.ptr(),
                pre_ids: pre_ids.ptr(),
                step_idx: step_idx.ptr(),
                max_dec_len: max_dec_len.ptr(),
                seq_lens_decoder: decoder.ptr(),
                seq_lens_this_time: rows.ptr_mut(),
                draft_tokens: drafts.ptr_mut(),
                workspace: workspace.ptr_mut(),
                input_ids_stride: self.input_ids_stride as u32,
                pre_ids_stride: self.pre_ids_stride as u32,
                draft_tokens_stride: self.draft_tokens_stride as u32,
                batch: self.batch as u32,
                max_ngram_size: self.max_ngram_size,
                threshold: self.threshold,
            };
            let on = Launch {
                grid: [blocks, 1, 1],
                threads: ngram::THREADS,
                shared_bytes: ngram::SHARED_BYTES,
                seed: seed + again,
                ..Launch::default()
            };
            let plain =
                NgramMatch { sequences, seq_lens_encoder: encoder.ptr(), draft_token_num: draft_token_num.ptr() };
            if let (Operator::Plain, true) = (self.operator, with_peers) {
                for (name, peer) in T::peers(self.batch as u32, plain) {
                    peer(seed + again);
                    let got = Outcome { rows: rows.to_vec(), drafts: drafts.to_vec() };
                    assert_eq!(got, self.expected(), "{name}, seed {}", seed + again);
                    rows.copy_from(&before.rows);
                    drafts.copy_from(&before.drafts);
                }
            }
            let run = |together: Option<&Launch>| match (self.operator, together) {
                (Operator::Plain, None) => T::plain(&on, plain),
                (Operator::Plain, Some(on)) => T::plain_together(on, plain),
                (Operator::Mixed { max_draft_tokens, min_ngram_size }, together) => {
                    let params = NgramMatchMixed { sequences, max_draft_tokens, min_ngram_size };
                    together.map_or_else(|| T::mixed(&on, params), |on| T::mixed_together(on, params))
                }
            };
            if self.batch <= ngram::MOST_SEQUENCES as usize {
                let on = Launch {
                    // Only a few lanes, since each has a stack.
                    threads: if self.batch < 3 { ngram::together::THREADS } else { 32 << ((seed + again) % 3) },
                    shared_bytes: ngram::together::SHARED_BYTES,
                    cooperative: true,
                    seed: seed + again,
                    ..Launch::new(self.batch as u32, 32)
                };
                run(Some(&on));
                let got = Outcome { rows: rows.to_vec(), drafts: drafts.to_vec() };
                assert_eq!(got, self.expected(), "together, {} threads, seed {}", on.threads, on.seed);
                assert!(ngram::is_ready(&workspace.to_vec()), "the workspace was not put back");
                rows.copy_from(&before.rows);
                drafts.copy_from(&before.drafts);
            }
            let report = run(None);
            outcome = (Outcome { rows: rows.to_vec(), drafts: drafts.to_vec() }, report);
            assert!(ngram::is_ready(&workspace.to_vec()), "the workspace was not put back");
            assert_eq!(outcome.0, self.expected(), "launch {again}, seed {}", seed + again);
        }
        outcome
    }
}

/// Runs both kernels' operator on hand-made sequences, checks all implementations against each other, and returns the
/// rows and drafts of each sequence.
fn worked(sequences: &[Sequence], max_ngram_size: u32, threshold: i32, operator: Operator) -> Vec<(i32, Vec<i32>)> {
    let case = Case::<i32>::new(sequences, 0, 24, max_ngram_size, threshold, operator);
    let outcome = case.launched(1, 1, 1);
    assert_eq!(outcome, case.by_definition());
    Case::<i64>::new(sequences, 0, 24, max_ngram_size, threshold, operator).with_peers(2, 2);
    let drafts = outcome.drafts.chunks(24).map(|row| row.iter().copied().filter(|&t| t != UNTOUCHED).collect());
    outcome.rows.iter().copied().zip(drafts).collect()
}

fn plain(sequences: &[Sequence], max_ngram_size: u32, threshold: i32) -> Vec<(i32, Vec<i32>)> {
    worked(sequences, max_ngram_size, threshold, Operator::Plain)
}

#[test]
fn largest_n_wins_then_prompt_then_leftmost() {
    // 7, the end of the pattern, is in the prompt three times; 6 7 once, late; 5 6 7 only among the generated tokens.
    let prompt = [7, 1, 7, 2, 6, 7, 3];
    let generated = [0, 5, 6, 7, 4, 5, 6, 7];
    assert_eq!(plain(&[Sequence::new(&prompt, &generated, 2)], 1, 128), [(3, vec![1, 7])]);
    assert_eq!(plain(&[Sequence::new(&prompt, &generated, 2)], 2, 128), [(2, vec![3])]);
    assert_eq!(plain(&[Sequence::new(&prompt, &generated, 2)], 3, 128), [(3, vec![4, 5])]);
    // Drafts from the generated tokens end before the newest.
    assert_eq!(plain(&[Sequence::new(&prompt, &generated, 9)], 3, 128), [(4, vec![4, 5, 6])]);
}

#[test]
fn window_needs_a_token_after_it() {
    // 1 2 stands at the very end of the prompt, so it is passed over for a window of one.
    assert_eq!(plain(&[Sequence::new(&[2, 9, 1, 2], &[0, 1, 2], 5)], 2, 128), [(4, vec![9, 1, 2])]);
    // Among the generated tokens, the newest is no token to draft.
    assert_eq!(plain(&[Sequence::new(&[], &[3, 3], 5)], 1, 128), [(1, vec![])]);
    assert_eq!(plain(&[Sequence::new(&[], &[3, 3, 3], 5)], 1, 128), [(2, vec![3])]);
}

#[test]
fn pattern_leaves_out_the_first_generated_token() {
    // n = 2, which would find 4, needs step_idx >= 2.
    assert_eq!(plain(&[Sequence::new(&[2, 9, 1, 2, 4], &[1, 2], 2)], 2, 128), [(3, vec![9, 1])]);
    assert_eq!(plain(&[Sequence::new(&[1, 2, 4], &[1], 2)], 2, 128), [(1, vec![])]);
}

#[test]
fn want_is_cut_by_the_length_limit() {
    let mut s = Sequence::new(&[1, 2, 3, 4, 5], &[0, 1], 4);
    for (left, rows) in [(9, 5), (3, 4), (1, 2), (0, 1), (-3, 1)] {
        s.left = left;
        assert_eq!(plain(&[s.clone()], 1, 128)[0].0, rows, "{left} tokens left");
    }
}

#[test]
fn budget_is_shared_out_in_order() {
    let s = Sequence::new(&[1, 2, 3, 4, 5, 6, 7], &[0, 1], 4);
    let batch = vec![s; 4];
    let rows = |threshold| plain(&batch, 1, threshold).into_iter().map(|(rows, _)| rows).collect::<Vec<_>>();
    assert_eq!(rows(128), [5, 5, 5, 5]);
    // Four rows are taken already: a threshold of 10 leaves 6 drafts.
    assert_eq!(rows(10), [5, 3, 1, 1]);
    // A room of one is not used.
    assert_eq!(rows(9), [5, 1, 1, 1]);
    assert_eq!(rows(6), [3, 1, 1, 1]);
    assert_eq!(rows(5), [1, 1, 1, 1]);
    assert_eq!(rows(0), [1, 1, 1, 1]);
    assert_eq!(rows(-5), [1, 1, 1, 1]);
}

#[test]
fn prefilling_counts_twice_and_idle_is_cleared() {
    let s = Sequence::new(&[1, 2, 3, 4, 5, 6, 7], &[0, 1], 4);
    let prefilling = Sequence { encoder: 6, decoder: 0, rows: 6, ..s.clone() };
    let idle = Sequence { decoder: 0, rows: 9, ..s.clone() };
    let batch = [prefilling, s.clone(), idle, s];
    let rows = |threshold| plain(&batch, 1, threshold).into_iter().map(|(rows, _)| rows).collect::<Vec<_>>();
    assert_eq!(rows(128), [6, 5, 0, 5]);
    // 6 rows for prefilling, one more for that sequence since it is active, one for each decoding sequence: 9 before
    // any draft.
    assert_eq!(rows(12), [6, 4, 0, 1]);
    assert_eq!(rows(15), [6, 5, 0, 3]);
}

#[test]
fn rows_below_zero_give_room_back() {
    // Nobody should pass such rows, but the serial algorithm has an answer: they are room for the sequences after them.
    let s = Sequence::new(&[1, 2, 3, 4, 5, 6, 7], &[0, 1], 4);
    let batch = [s.clone(), Sequence { encoder: 1, rows: -5, ..s.clone() }, s];
    assert_eq!(plain(&batch, 1, 5).iter().map(|(rows, _)| *rows).collect::<Vec<_>>(), [3, -5, 5]);
}

#[test]
fn mixed_extends_what_is_there() {
    let operator = |max_draft_tokens, min_ngram_size| Operator::Mixed { max_draft_tokens, min_ngram_size };
    let s = Sequence { rows: 3, ..Sequence::new(&[1, 2, 3, 4, 5, 6, 7], &[0, 1], 0) };
    let batch = [s.clone(), Sequence { rows: 0, ..s.clone() }, s];
    // Two drafts are there already; five are allowed.
    let got = worked(&batch, 3, 1024, operator(5, 1));
    assert_eq!(got, [(6, vec![2, 3, 4]), (0, vec![]), (6, vec![2, 3, 4])]);
    // Full already: two are allowed.
    assert_eq!(worked(&batch, 3, 1024, operator(2, 1))[0].0, 3);
    // No pattern of two.
    assert_eq!(worked(&batch, 3, 1024, operator(5, 2))[0].0, 3);
    // The third sequence's two drafts come out of the budget when its turn comes.
    assert_eq!(worked(&batch, 3, 10, operator(5, 1)).iter().map(|(rows, _)| *rows).collect::<Vec<_>>(), [6, 0, 3]);
}

#[test]
fn decode_loop_drafts_from_the_history() {
    // The whole history is in pre_ids and there is no prompt. The batch is 1, and the budget never binds.
    let history = [4, 5, 6, 7, 8, 9, 4, 5];
    let operator = Operator::Mixed { max_draft_tokens: 3, min_ngram_size: 1 };
    assert_eq!(worked(&[Sequence::new(&[], &history, 0)], 4, 1024, operator), [(4, vec![6, 7, 8])]);
}

#[test]
fn long_texts_take_several_tiles_and_blocks() {
    // Three matches of lengths 1, 2 and 3 in the prompt, and one of length 3 among the generated tokens. Every boundary
    // of a tile has a decoy.
    let tile = 512;
    for (at, blocks) in [(0, 3), (tile - 2, 1), (tile - 1, 2), (2 * tile + 17, 3), (2 * tile - 1, 5)] {
        let mut prompt: Vec<i32> = (0..3 * tile as i32 - 5).map(|i| 10 + i % 97).collect();
        let mut generated: Vec<i32> = (0..tile as i32 + 100).map(|i| 200 + i % 89).collect();
        for boundary in [1, tile, 2 * tile] {
            prompt[boundary] = 3;
        }
        prompt[at..at + 3].copy_from_slice(&[1, 2, 3]);
        generated[tile..tile + 3].copy_from_slice(&[1, 2, 3]);
        generated.extend([1, 2, 3]);
        let case = Case::<i32>::new(&[Sequence::new(&prompt, &generated, 5)], 3, 8, 3, 128, Operator::Plain);
        let outcome = case.launched(blocks, at as u64, 2);
        assert_eq!(outcome.drafts[1..6], prompt[at + 3..at + 8]);
        // A pattern at the end of a prompt that exactly fills a tile has nothing after it. That among the generated
        // tokens has.
        let mut full: Vec<i32> = (0..tile as i32).map(|i| 10 + i % 97).collect();
        full[tile - 3..].copy_from_slice(&[1, 2, 3]);
        let case = Case::<i32>::new(&[Sequence::new(&full, &generated, 5)], 0, 8, 3, 128, Operator::Plain);
        assert_eq!(case.launched(blocks, at as u64, 1).drafts[1..6], generated[tile + 3..tile + 8]);
        // The same without a prompt.
        let case = Case::<i64>::new(&[Sequence::new(&[], &generated, 5)], 0, 8, 3, 128, Operator::Plain);
        assert_eq!(case.launched(blocks, at as u64, 1).rows, [6]);
    }
}

#[test]
fn each_token_is_read_once_and_none_after_the_best_match() {
    // A warp's tile: 128 units of 16 bytes. A block's 32 warps have one each, or two, or four.
    let tiles = 32 * 512;
    let loaded = |prompt: &[i32], generated: &[i32]| {
        let case = Case::<i32>::new(&[Sequence::new(prompt, generated, 5)], 0, 8, 3, 128, Operator::Plain);
        case.reported(1, 1, 1).1.bytes_loaded
    };
    let prompt: Vec<i32> = (0..4 * tiles as i32 + 1).collect();
    // The end of the pattern is nowhere: one more tile for each warp costs the reading of its tokens, and nothing else.
    let nowhere = [-1, -2, -3, -4];
    let more = loaded(&prompt[..2 * tiles + 1], &nowhere) - loaded(&prompt[..tiles + 1], &nowhere);
    assert_eq!(more, tiles as u64 * 4);
    // Found in the first tile. How far other warps have read by then depends on the schedule.
    let at_once = [-1, 7, 8, 9];
    let (stopped, ran_on) = (loaded(&prompt, &at_once), loaded(&prompt, &nowhere));
    assert!(stopped < ran_on);
}

#[test]
fn ends_outside_of_whole_units_are_searched() {
    // Every alignment of a row, with the match at every place in it: before the first 16-byte boundary, between
    // boundaries, and after the last.
    for stride in 9..14 {
        for at in 0..stride - 3 {
            let rows: Vec<_> = (0..4)
                .map(|_| {
                    let mut prompt: Vec<i32> = (0..stride).map(|i| 10 + i).collect();
                    prompt[at as usize..at as usize + 2].copy_from_slice(&[1, 2]);
                    Sequence::new(&prompt, &[0, 3, 1, 2], 1)
                })
                .collect();
            for outcome in worked(&rows, 3, 128, Operator::Plain) {
                assert_eq!(outcome, (2, vec![12 + at]));
            }
            let rows: Vec<_> = (0..4)
                .map(|_| {
                    let mut generated: Vec<i32> = (0..stride + 2).map(|i| 10 + i).collect();
                    generated[at as usize..at as usize + 2].copy_from_slice(&[1, 2]);
                    generated.extend([1, 2]);
                    Sequence::new(&[], &generated, 1)
                })
                .collect();
            for outcome in worked(&rows, 2, 128, Operator::Plain) {
                assert_eq!(outcome, (2, vec![12 + at]));
            }
        }
    }
}

#[test]
fn batches_of_any_size_take_turns_with_one_workspace() {
    let most = ngram::MOST_SEQUENCES as usize;
    let workspace = workspace(most);
    let sequence = |b: usize| Sequence {
        decoder: (b % 7 != 2) as i32,
        encoder: (b % 11 == 3) as i32,
        rows: (b % 3) as i32,
        ..Sequence::new(&[1, 2, 1, 3, 4, 5], &[0, 1], 3)
    };
    for (seed, batch) in [1, most, 3, 33, most, 32, 65, 1, 100].into_iter().enumerate() {
        let sequences: Vec<_> = (0..batch).map(sequence).collect();
        for threshold in [batch as i32 + 40, 3 * most as i32] {
            let case = Case::<i32>::new(&sequences, 0, 6, 2, threshold, Operator::Plain);
            let (outcome, _) = case.run_in(&workspace, 1 + seed as u32 % 2, seed as u64, 1, false);
            assert_eq!(outcome, case.by_definition());
            let operator = Operator::Mixed { max_draft_tokens: 4, min_ngram_size: 1 };
            Case::<i64>::new(&sequences, 1, 6, 2, threshold, operator).run_in(&workspace, 1, seed as u64, 1, false);
        }
    }
}

#[test]
fn batches_above_one_chunk_of_the_scan() {
    for (operator, batch, threshold) in
        [(Operator::Plain, 1025, 3000), (Operator::Mixed { max_draft_tokens: 5, min_ngram_size: 1 }, 1400, 2500)]
    {
        let sequences: Vec<_> = (0..batch)
            .map(|b| Sequence {
                // Few search, so that the test is quick; those that do are on both sides of the chunk's boundary.
                decoder: (b % 7 < 4) as i32,
                encoder: (b % 11 == 3) as i32,
                rows: b % 3,
                left: if (100..1010).contains(&b) && b % 9 != 0 { 0 } else { 50 },
                ..Sequence::new(&[1, 2, 1, 3], &[0, 1], 3)
            })
            .collect();
        let case = Case::<i32>::new(&sequences, 0, 6, 2, threshold, operator);
        let outcome = case.launched(1, 7, 1);
        assert_eq!(outcome, case.by_definition());
    }
}

fn values(alphabet: i32) -> impl Strategy<Value = i32> {
    // A negative id is an id like any other.
    (0..alphabet).prop_map(|id| id - 1)
}

/// A sequence as a sane engine would pass it.
fn sane(alphabet: i32) -> impl Strategy<Value = Sequence> {
    (
        prop::collection::vec(values(alphabet), 0..24),
        prop::collection::vec(values(alphabet), 1..24),
        -1..9i32,
        prop_oneof![4 => 1..20i64, 1 => -3..2i64],
        prop_oneof![6 => Just((0, 5)), 1 => Just((0, 0)), 1 => Just((4, 0))],
        0..5i32,
    )
        .prop_map(|(prompt, generated, draft_token_num, left, (encoder, decoder), rows)| Sequence {
            left,
            encoder,
            decoder,
            rows,
            ..Sequence::new(&prompt, &generated, draft_token_num)
        })
}

/// A sequence with any value in any place.
fn hostile(alphabet: i32) -> impl Strategy<Value = Sequence> {
    let length = || {
        prop_oneof![
            6 => Just(None),
            1 => (-2..40i64).prop_map(Some),
            1 => prop::sample::select(vec![i64::MIN, -1, 0, i32::MAX as i64 + 1, 1 << 40, i64::MAX]).prop_map(Some),
        ]
    };
    let word = || prop_oneof![4 => -2..6i32, 1 => prop::sample::select(vec![i32::MIN, -1, 40, i32::MAX])];
    (
        sane(alphabet),
        (length(), length()),
        word(),
        prop_oneof![6 => Just(None), 1 => prop::sample::select(vec![i64::MIN, -1, i64::MAX]).prop_map(Some)],
        (prop_oneof![3 => Just(0), 1 => Just(2), 1 => word()], prop_oneof![4 => Just(3), 1 => word()]),
        prop_oneof![3 => 0..5i32, 1 => -9..0i32, 1 => word()],
    )
        .prop_map(|(s, (input_ids_len, step_idx), draft_token_num, left, (encoder, decoder), rows)| Sequence {
            input_ids_len,
            step_idx,
            draft_token_num,
            left: left.unwrap_or(s.left),
            encoder,
            decoder,
            rows,
            ..s
        })
}

fn batches<S: Strategy<Value = Sequence>>(
    sequence: impl Fn(i32) -> S + Copy,
    most: usize,
) -> impl Strategy<Value = Vec<Sequence>> {
    (1..4i32).prop_flat_map(move |alphabet| prop::collection::vec(sequence(alphabet), 1..=most))
}

fn operators() -> impl Strategy<Value = Operator> {
    prop_oneof![
        Just(Operator::Plain),
        (-1..12i32, 0..4u32)
            .prop_map(|(max_draft_tokens, min_ngram_size)| Operator::Mixed { max_draft_tokens, min_ngram_size }),
    ]
}

/// Budgets that never bind, that bind, and that are gone before the first sequence.
fn thresholds() -> impl Strategy<Value = i32> {
    prop_oneof![3 => 0..60i32, 2 => 60..200i32, 1 => prop::sample::select(vec![i32::MIN, -1, 1024, i32::MAX])]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// What the reference leaves out of the definition (`want` in the search) makes no difference.
    #[test]
    fn reference_is_the_definition(
        sequences in batches(sane, 20),
        n in 0..5u32,
        threshold in thresholds(),
        operator in operators(),
    ) {
        let operator = match operator {
            // An empty pattern is the one thing that the definition leaves open.
            Operator::Mixed { max_draft_tokens, min_ngram_size } => {
                Operator::Mixed { max_draft_tokens, min_ngram_size: min_ngram_size.max(1) }
            }
            plain => plain,
        };
        let case = Case::<i32>::new(&sequences, 1, 24, n, threshold, operator);
        prop_assert_eq!(case.expected(), case.by_definition());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn kernels_equal_the_reference(
        sequences in batches(sane, 24),
        slack in 0..3usize,
        n in 0..5u32,
        threshold in thresholds(),
        operator in operators(),
        blocks in 1..3u32,
        seed in 0..1000u64,
        wide in any::<bool>(),
    ) {
        if wide {
            Case::<i64>::new(&sequences, slack, 14, n, threshold, operator).launched(blocks, seed, 2);
        } else {
            Case::<i32>::new(&sequences, slack, 14, n, threshold, operator).launched(blocks, seed, 2);
        }
    }

    #[test]
    fn kernels_equal_the_reference_on_hostile_values(
        sequences in batches(hostile, 12),
        slack in 0..3usize,
        places in 0..8usize,
        n in prop_oneof![0..5u32, Just(u32::MAX)],
        threshold in thresholds(),
        operator in operators(),
        seed in 0..1000u64,
        wide in any::<bool>(),
    ) {
        if wide {
            Case::<i64>::new(&sequences, slack, places, n, threshold, operator).launched(1, seed, 1);
        } else {
            Case::<i32>::new(&sequences, slack, places, n, threshold, operator).launched(1, seed, 1);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn peers_equal_the_reference(
        sequences in batches(hostile, 8),
        slack in 0..3usize,
        places in 0..8usize,
        n in 0..5u32,
        threshold in thresholds(),
        seed in 0..1000u64,
    ) {
        Case::<i64>::new(&sequences, slack, places, n, threshold, Operator::Plain).with_peers(1, seed);
    }
}
