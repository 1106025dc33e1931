//! Planning and acceptance: what one step hands to the next.

mod common;

use common::run;
use cuda_std::GlobalMut;
use cuda_std::emulator::Buffer;
use gpu_kernels::sample::{GENERATED, SEEN};
use gpu_kernels::step::{
    self, Accept, DraftState, MAX_DECODE_ROWS, MAX_ROWS, PlanDecode, PlanPrompt, Report, Rows, STATE_WORDS,
    SequenceState,
};

/// A sequence on the device and everything that a step touches.
struct Device {
    history: Buffer<i32>,
    words: Buffer<u32>,
    count: Buffer<u32>,
    tokens: Buffer<u32>,
    positions: Buffer<u32>,
    sequences: Buffer<u32>,
    seen: Buffer<u8>,
    ring: Buffer<u32>,
    step_idx: Buffer<i64>,
    draft_rows: Buffer<i32>,
}

const RING: u32 = 4;

impl Device {
    fn new(prompt: &[i32]) -> Self {
        let mut history = prompt.to_vec();
        history.resize(64, -1);
        let mut words = [0; STATE_WORDS];
        words[SequenceState::LENGTH] = prompt.len() as u32;
        let column = || Buffer::from_slice(&[0; MAX_ROWS as usize]);
        Self {
            history: Buffer::from_slice(&history),
            words: Buffer::from_slice(&words),
            count: Buffer::from_slice(&[0]),
            tokens: column(),
            positions: column(),
            sequences: column(),
            seen: Buffer::from_slice(&[0; 100]),
            ring: Buffer::from_slice(&[0; RING as usize * Report::WORDS]),
            step_idx: Buffer::from_slice(&[0]),
            draft_rows: Buffer::from_slice(&[0]),
        }
    }

    fn rows(&self) -> Rows {
        Rows {
            count: self.count.ptr_mut(),
            tokens: self.tokens.ptr_mut(),
            positions: self.positions.ptr_mut(),
            sequences: self.sequences.ptr_mut(),
        }
    }

    fn state(&self) -> SequenceState {
        SequenceState { history: self.history.ptr_mut(), words: self.words.ptr_mut() }
    }

    /// The planned rows, (token, position).
    fn planned(&self) -> Vec<(u32, u32)> {
        let count = self.count.as_slice()[0] as usize;
        self.tokens.as_slice()[..count]
            .iter()
            .copied()
            .zip(self.positions.as_slice()[..count].iter().copied())
            .collect()
    }

    fn plan_decode(&self, drafts: &[i32]) {
        let mut row = vec![0];
        row.extend_from_slice(drafts);
        row.resize(MAX_DECODE_ROWS as usize, 0);
        let tokens = Buffer::from_slice(&row);
        let rows = Buffer::from_slice(&[1 + drafts.len() as i32]);
        let counters = Buffer::from_slice(&[7u32; 40]);
        let params = PlanDecode {
            rows: self.rows(),
            state: self.state(),
            drafts: tokens.ptr(),
            draft_rows: rows.ptr(),
            counters: counters.ptr_mut(),
            counter_count: 40,
        };
        run::<step::plan_decode>([1, 1, 1], 0, 0, params);
        assert_eq!(counters.as_slice(), [0; 40]);
    }

    /// Accepts `sampled` with end token 9; gives the report's tokens, drafts tried, and whether it is finished.
    fn accept(&self, sampled: &[u32], max_length: u32, first_row: u32) -> (Vec<u32>, u32, bool) {
        let step = self.words.as_slice()[SequenceState::STEP];
        let sampled = Buffer::from_slice(sampled);
        let stops = Buffer::from_slice(&[9u32]);
        let params = Accept {
            rows: self.rows(),
            state: self.state(),
            sampled: sampled.ptr(),
            best: Default::default(),
            stop_tokens: stops.ptr(),
            seen: self.seen.ptr_mut(),
            draft: DraftState { step_idx: self.step_idx.ptr_mut(), rows: self.draft_rows.ptr_mut() },
            ring: self.ring.ptr_mut(),
            ring_reports: RING,
            stop_count: 1,
            max_length,
            first_row,
        };
        run::<step::accept>([1, 1, 1], 0, 0, params);
        let report = &self.ring.as_slice()[(step % RING) as usize * Report::WORDS..][..Report::WORDS];
        assert_eq!(report[Report::STAMP], step + 1);
        let count = report[Report::COUNT] as usize;
        (report[Report::TOKENS..][..count].to_vec(), report[Report::DRAFTED], report[Report::FINISHED] == 1)
    }

    fn history(&self) -> Vec<i32> {
        self.history.as_slice()[..self.words.as_slice()[SequenceState::LENGTH] as usize].to_vec()
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
    let d = Device::new(&[5, 6]);
    d.plan_decode(&[20, 21, 22]);
    assert_eq!(d.planned(), [(6, 1), (20, 2), (21, 3), (22, 4)]);
    // Rows 0 and 1 confirm 20 and 21, row 2 says 30 instead of 22.
    assert_eq!(d.accept(&[20, 21, 30, 99], 64, 0), (vec![20, 21, 30], 3, false));
    assert_eq!(d.history(), [5, 6, 20, 21, 30]);
    assert_eq!(d.step_idx.as_slice(), [4]);
    assert_eq!(d.draft_rows.as_slice(), [1]);
    for token in [20, 21, 30] {
        assert_eq!(d.seen.as_slice()[token], SEEN | GENERATED);
    }
    assert_eq!(d.seen.as_slice()[22], 0);
}

#[test]
fn all_drafts_right_bring_one_token_more() {
    let d = Device::new(&[5, 6]);
    d.plan_decode(&[20, 21]);
    assert_eq!(d.accept(&[20, 21, 22], 64, 0), (vec![20, 21, 22], 2, false));
}

#[test]
fn an_end_token_and_the_length_finish_it() {
    let d = Device::new(&[5, 6]);
    d.plan_decode(&[9, 20]);
    assert_eq!(d.accept(&[9, 20, 21], 64, 0), (vec![9], 2, true));
    // Steps that were enqueued ahead run no rows and say so.
    d.plan_decode(&[20]);
    assert_eq!(d.planned(), []);
    assert_eq!(d.accept(&[1, 1], 64, 0), (vec![], 0, true));
    assert_eq!(d.history(), [5, 6, 9]);

    let d = Device::new(&[5, 6]);
    d.plan_decode(&[20, 21, 22]);
    assert_eq!(d.accept(&[20, 21, 22, 23], 4, 0), (vec![20, 21], 3, true));
}

#[test]
fn the_ring_goes_round() {
    let d = Device::new(&[5]);
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
        drafts: GlobalMut::<i32>::from_raw(0).read(),
        draft_rows: GlobalMut::<i32>::from_raw(0).read(),
        counters: GlobalMut::from_raw(0),
        counter_count: 0,
    };
    run::<step::plan_decode>([1, 1, 1], 0, 0, params);
    assert_eq!(d.planned(), [(6, 1)]);
}
