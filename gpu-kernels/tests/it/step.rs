//! Planning and acceptance: what one step hands to the next.

use crate::common::run;
use cuda_std::emulator::Buffer;
use cuda_std::{Global, kernel};
use gpu_kernels::drafting::{self, Cost, ONE};
use gpu_kernels::ngram::{self, NgramMatchMixed, Sequences, together};
use gpu_kernels::sample::GENERATED;
use gpu_kernels::step::{
    self, Accept, AcceptAndDraft, Counters, DraftState, MAX_DECODE_ROWS, MAX_ROWS, PlanDecode, PlanPrompt, Report,
    Rows, STATE_WORDS, SequenceState,
};

/// The n-gram match by one block, in a launch of its own.
#[kernel(threads = together::THREADS)]
pub unsafe fn match_together(p: NgramMatchMixed<i32>) {
    // SAFETY: the parameter block's word.
    unsafe { together::draft(&p) }
}

/// A sequence on the device and everything that a step touches.
struct Device {
    history: Buffer<i32>,
    words: Buffer<u32>,
    count: Buffer<u32>,
    tokens: Buffer<u32>,
    positions: Buffer<u32>,
    sequences: Buffer<u32>,
    uses: Buffer<u32>,
    ring: Buffer<u32>,
    step_idx: Buffer<i64>,
    draft_rows: Buffer<i32>,
    proposed: Buffer<i32>,
}

const RING: u32 = 4;

impl Device {
    fn new(prompt: &[i32]) -> Self {
        let mut history = prompt.to_vec();
        history.resize(prompt.len() + 128, -1);
        let mut words = [0; STATE_WORDS];
        words[SequenceState::LENGTH] = prompt.len() as u32;
        words[SequenceState::ACCEPTANCE] = drafting::UNTRIED;
        let column = || Buffer::from_slice(&[0; MAX_ROWS as usize]);
        Self {
            history: Buffer::from_slice(&history),
            words: Buffer::from_slice(&words),
            count: Buffer::from_slice(&[0]),
            tokens: column(),
            positions: column(),
            sequences: column(),
            uses: Buffer::from_slice(&[0; 100]),
            ring: Buffer::from_slice(&[0; RING as usize * Report::WORDS]),
            step_idx: Buffer::from_slice(&[0]),
            draft_rows: Buffer::from_slice(&[0]),
            proposed: Buffer::from_slice(&[0; MAX_DECODE_ROWS as usize]),
        }
    }

    fn rows(&self) -> Rows {
        Rows {
            count: self.count.ptr_mut(),
            tokens: self.tokens.ptr_mut(),
            positions: self.positions.ptr_mut(),
            sequences: self.sequences.ptr_mut(),
            paths: Default::default(),
        }
    }

    fn state(&self) -> SequenceState {
        SequenceState { history: self.history.ptr_mut(), words: self.words.ptr_mut() }
    }

    /// The planned rows, as (token, position).
    fn planned(&self) -> Vec<(u32, u32)> {
        let count = self.count.to_vec()[0] as usize;
        self.tokens.to_vec().into_iter().zip(self.positions.to_vec()).take(count).collect()
    }

    fn plan_decode(&mut self, drafts: &[i32]) {
        self.plan_worthwhile(drafts, Cost::default());
    }

    fn plan_worthwhile(&mut self, drafts: &[i32], cost: Cost) {
        let mut row = vec![0];
        row.extend_from_slice(drafts);
        row.resize(MAX_DECODE_ROWS as usize, 0);
        self.proposed = Buffer::from_slice(&row);
        self.draft_rows = Buffer::from_slice(&[1 + drafts.len() as i32]);
        let counters = Buffer::from_slice(&[7u32; 40]);
        let params = PlanDecode {
            rows: self.rows(),
            state: self.state(),
            drafts: self.proposed.ptr(),
            draft_rows: self.draft_rows.ptr(),
            counters: Counters { words: counters.ptr_mut(), count: 40 },
            cost,
        };
        run::<step::plan_decode>([1, 1, 1], 0, 0, params);
        assert_eq!(counters.to_vec(), [0; 40]);
    }

    /// Accepts `sampled` with end token 9; gives the report's tokens, drafts tried, and whether it is finished.
    fn accept(&self, sampled: &[u32], max_length: u32, first_row: u32) -> (Vec<u32>, u32, bool) {
        self.accept_by(sampled, max_length, first_row, |params| run::<step::accept>([1, 1, 1], 0, 0, params))
    }

    /// As [`accept`](Self::accept), by a launch that has [`Accept`] as a part of its parameters.
    fn accept_by(
        &self,
        sampled: &[u32],
        max_length: u32,
        first_row: u32,
        launch: impl FnOnce(Accept),
    ) -> (Vec<u32>, u32, bool) {
        let step = self.words.to_vec()[SequenceState::STEP];
        let mut padded = sampled.to_vec();
        padded.resize(MAX_ROWS as usize, 99);
        let sampled = Buffer::from_slice(&padded);
        let stops = Buffer::from_slice(&[9u32]);
        let params = Accept {
            rows: self.rows(),
            state: self.state(),
            sampled: sampled.ptr(),
            best: Default::default(),
            stop_tokens: stops.ptr(),
            uses: self.uses.ptr_mut(),
            draft: DraftState {
                step_idx: self.step_idx.ptr_mut(),
                rows: self.draft_rows.ptr_mut(),
                proposed: self.proposed.ptr(),
            },
            ring: self.ring.ptr_mut(),
            ring_reports: RING,
            stop_count: 1,
            max_length,
            first_row,
        };
        launch(params);
        let ring = self.ring.to_vec();
        let report = &ring[(step % RING) as usize * Report::WORDS..][..Report::WORDS];
        assert_eq!(report[Report::FLAG], step + 1);
        let count = report[Report::COUNT] as usize;
        (report[Report::TOKENS..][..count].to_vec(), report[Report::DRAFTED], report[Report::FINISHED] == 1)
    }

    fn history(&self) -> Vec<i32> {
        self.history.to_vec()[..self.words.to_vec()[SequenceState::LENGTH] as usize].to_vec()
    }
}

#[test]
fn a_prompt_runs_in_chunks_and_brings_one_token() {
    let d = Device::new(&[5, 6, 7, 8]);
    let plan = |start, count| PlanPrompt { rows: d.rows(), state: d.state(), start, count };
    run::<step::plan_prompt>([1, 1, 1], 0, 0, plan(0, 3));
    assert_eq!(d.planned(), [(5, 0), (6, 1), (7, 2)]);
    run::<step::plan_prompt>([1, 1, 1], 0, 0, plan(2, 2));
    assert_eq!(d.planned(), [(7, 2), (8, 3)]);
    assert_eq!(d.accept(&[0, 42], 64, 1), (vec![42], 0, false));
    assert_eq!(d.history(), [5, 6, 7, 8, 42]);
}

#[test]
fn drafts_are_accepted_as_long_as_they_agree() {
    let mut d = Device::new(&[5, 6]);
    d.plan_decode(&[20, 21, 22]);
    assert_eq!(d.planned(), [(6, 1), (20, 2), (21, 3), (22, 4)]);
    // Rows 0 and 1 confirm 20 and 21, row 2 says 30 instead of 22.
    assert_eq!(d.accept(&[20, 21, 30, 99], 64, 0), (vec![20, 21, 30], 3, false));
    assert_eq!(d.history(), [5, 6, 20, 21, 30]);
    assert_eq!(d.step_idx.to_vec(), [4]);
    assert_eq!(d.draft_rows.to_vec(), [1]);
    let uses = d.uses.to_vec();
    for token in [20, 21, 30] {
        assert_eq!(uses[token], GENERATED);
    }
    assert_eq!(uses[22], 0);
}

#[test]
fn all_drafts_right_bring_one_token_more() {
    let mut d = Device::new(&[5, 6]);
    d.plan_decode(&[20, 21]);
    assert_eq!(d.accept(&[20, 21, 22], 64, 0), (vec![20, 21, 22], 2, false));
}

#[test]
fn an_end_token_and_the_length_finish_it() {
    let mut d = Device::new(&[5, 6]);
    d.plan_decode(&[9, 20]);
    assert_eq!(d.accept(&[9, 20, 21], 64, 0), (vec![9], 2, true));
    // Steps that were enqueued ahead run no rows, and report so.
    d.plan_decode(&[20]);
    assert_eq!(d.planned(), []);
    assert_eq!(d.accept(&[1, 1], 64, 0), (vec![], 0, true));
    assert_eq!(d.history(), [5, 6, 9]);

    let mut d = Device::new(&[5, 6]);
    d.plan_decode(&[20, 21, 22]);
    assert_eq!(d.accept(&[20, 21, 22, 23], 4, 0), (vec![20, 21], 3, true));
}

#[test]
fn the_ring_goes_round() {
    let mut d = Device::new(&[5]);
    for i in 0..10 {
        d.plan_decode(&[]);
        assert_eq!(d.accept(&[10 + i], 64, 0), (vec![10 + i], 0, false));
    }
    assert_eq!(d.history().len(), 11);
}

#[test]
fn nothing_drafts() {
    let d = Device::new(&[5, 6]);
    let params = PlanDecode {
        rows: d.rows(),
        state: d.state(),
        drafts: Global::default(),
        draft_rows: Global::default(),
        counters: Counters::default(),
        cost: Cost::default(),
    };
    run::<step::plan_decode>([1, 1, 1], 0, 0, params);
    assert_eq!(d.planned(), [(6, 1)]);
}

/// Acceptance, the match and the plan in one launch do the same as in three. A warp has less than one tile of the text
/// to search, or several. Matches are near, far, in the tokens just accepted, or nowhere. All of the text is known
/// beforehand, or less, or nothing. One case is at the end of the sequence.
#[test]
fn one_launch_does_what_three_do() {
    for (case, (length, period, settled, sampled)) in [
        (5, 3, 5, [1, 2, 0]),
        (700, 50, 700, [20, 21, 22]),
        (9_000, 8_990, 9_000, [3, 3, 3]),
        (9_000, 100_000, 8_192, [3, 4, 5]),
        (9_000, 40, 0, [7, 7, 9]),
        (34_000, 33_990, 34_000, [20, 30, 31]),
        // The only match is in a warp's second tile, in its fourth, and in one that was not requested beforehand.
        (9_000, 100_000, 9_000, [8_510, 0, 0]),
        (34_000, 100_000, 34_000, [30_010, 0, 0]),
        (34_000, 100_000, 34_000, [33_010, 0, 0]),
    ]
    .into_iter()
    .enumerate()
    {
        // Tokens from 10 on, so that the end token comes from the samples alone.
        let prompt: Vec<i32> = (0..length).map(|i| 10 + i % period).collect();
        let [one, three] = [(); 2].map(|()| {
            let mut d = Device::new(&prompt);
            d.uses = Buffer::from_slice(&vec![0; 200_000]);
            d.plan_decode(&[20, 21]);
            d
        });
        let by_one = |of: &Device| {
            let workspace = Buffer::from_slice(&vec![u64::MAX; ngram::workspace_len(1)]);
            let (limit, zero, decoding) = ([length as i64 + 50], [0i64], [1i32]);
            let [limit, zero] = [limit, zero].map(|v| Buffer::from_slice(&v));
            let decoding = Buffer::from_slice(&decoding);
            let counters = Buffer::from_slice(&[7u32; 40]);
            let draft = NgramMatchMixed {
                sequences: Sequences {
                    input_ids: of.history.ptr(),
                    input_ids_len: zero.ptr(),
                    pre_ids: of.history.ptr(),
                    step_idx: of.step_idx.ptr(),
                    max_dec_len: limit.ptr(),
                    seq_lens_decoder: decoding.ptr(),
                    seq_lens_this_time: of.draft_rows.ptr_mut(),
                    draft_tokens: of.proposed.ptr_mut(),
                    workspace: workspace.ptr_mut(),
                    input_ids_stride: 0,
                    pre_ids_stride: of.history.len() as u32,
                    draft_tokens_stride: MAX_DECODE_ROWS,
                    batch: 1,
                    max_ngram_size: 3,
                    threshold: 1024,
                },
                max_draft_tokens: 7,
                min_ngram_size: 1,
            };
            let plan = PlanDecode {
                rows: of.rows(),
                state: of.state(),
                drafts: of.proposed.ptr(),
                draft_rows: of.draft_rows.ptr(),
                counters: Counters { words: counters.ptr_mut(), count: 40 },
                cost: CHEAP,
            };
            let is_one = std::ptr::eq(of, &one);
            let report = of.accept_by(&sampled, length as u32 + 50, 0, |accept| {
                if is_one {
                    let params = AcceptAndDraft { accept, draft, plan, settled };
                    run::<step::accept_and_draft>([1, 1, 1], AcceptAndDraft::SHARED_BYTES, case as u64, params);
                } else {
                    run::<step::accept>([1, 1, 1], 0, 0, accept);
                }
            });
            if !is_one {
                let shared = together::SHARED_BYTES;
                run::<match_together>([1, 1, 1], shared, 0, draft);
                run::<step::plan_decode>([1, 1, 1], 0, 0, plan);
            }
            assert_eq!(counters.to_vec(), [0; 40]);
            let proposed = of.draft_rows.to_vec()[0] as usize;
            let words = of.words.to_vec();
            (report, of.history(), of.planned(), of.proposed.to_vec()[1.min(proposed)..proposed].to_vec(), words)
        };
        let (found, expected) = (by_one(&one), by_one(&three));
        assert_eq!(found, expected, "case {case}");
        assert_eq!(found.2.is_empty(), found.0.2, "case {case}: rows, as long as it goes on");
        if sampled[0] > 100 {
            assert_eq!(found.3, (1..8).map(|i| sampled[0] as i32 + i).collect::<Vec<_>>(), "case {case}");
        }
    }
}

/// About what a row adds to a step on a card.
const CHEAP: Cost = Cost { any: 0, each: ONE / 64 };

#[test]
fn drafts_fall_away_in_hopeless_text_and_come_back() {
    let mut d = Device::new(&[5, 6]);
    // Proposals that are never right: within a few dozen steps they get no rows, and it stays so.
    let ran: Vec<u32> = (0..48)
        .map(|_| {
            d.plan_worthwhile(&[20, 21, 22, 23, 24, 25, 26], CHEAP);
            let (tokens, ran, _) = d.accept(&[30], 128, 0);
            assert_eq!(tokens, [30]);
            ran
        })
        .collect();
    assert!(ran[0] >= 3 && ran.is_sorted_by(|a, b| a >= b), "{ran:?}");
    assert!(ran.iter().sum::<u32>() < 60 && ran[40..].iter().all(|&n| n == 0), "{ran:?}");
    // A proposal that would have been right, had it had a row, brings them back.
    d.plan_worthwhile(&[20, 21, 22], CHEAP);
    assert_eq!(d.accept(&[20], 128, 0), (vec![20], 0, false));
    let mut came = Vec::new();
    for _ in 0..4 {
        d.plan_worthwhile(&[20, 21, 22], CHEAP);
        came.push(d.accept(&[20, 21, 22, 23], 128, 0).1);
    }
    assert!(came[0] >= 1 && came[3] == 3, "{came:?}");
}

#[test]
fn as_many_drafts_as_make_the_most_tokens_in_a_time() {
    // Against a plain maximum in floating point.
    let speed = |a: f64, cost: Cost, others: f64, n: u32| {
        let share = |c: u32| f64::from(c) / f64::from(ONE);
        let tokens: f64 = others + (0..=n).map(|i| a.powi(i as i32)).sum::<f64>();
        let any = if n > 0 && others == 0.0 { share(cost.any) } else { 0.0 };
        tokens / (1.0 + any + share(cost.each) * (others + f64::from(n)))
    };
    for cost in [CHEAP, Cost { any: ONE * 13 / 8, each: ONE * 5 / 16 }, Cost { any: 0, each: ONE }] {
        for others in [0, 3, 63] {
            for acceptance in (0..=ONE).step_by(1 << 10) {
                let found = drafting::worthwhile(acceptance, cost, others, 15);
                let of = |n| speed(f64::from(acceptance) / f64::from(ONE), cost, f64::from(others), n);
                let best = (0..=15).map(of).fold(0.0, f64::max);
                assert!(of(found) > best * (1.0 - 1e-4), "{acceptance} {cost:?} {others}: {found}");
            }
        }
    }
    // All drafts where rows cost nothing, however bad they are; none where a row costs as much as its token.
    assert_eq!(drafting::worthwhile(0, Cost::default(), 0, 15), 15);
    assert_eq!(drafting::worthwhile(ONE * 9 / 10, Cost { any: 0, each: ONE }, 0, 15), 0);
}
