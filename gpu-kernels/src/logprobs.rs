//! What log-probabilities of tokens are computed from: a row's largest logit, the mass of all its tokens, the likeliest
//! tokens, and the logit of the token that is chosen.
//!
//! All of these are by the model's own logits, before penalties and temperature. Rows are split over CTAs as for the
//! [sampler](crate::sample). Unless few are wanted, the likeliest tokens are found in the way in which the sampler
//! finds what top-k keeps. Masses are the sampler's integers: their sum does not depend on the order, and is the same
//! on the CPU.
//!
//! # Safety
//! `p` is a launch's parameter block, whose addresses are as it says. Every function that is not a kernel is called by
//! whole CTAs, and for a row by all CTAs of its team, which take the same branches: they wait for each other, so the
//! launch is cooperative. A CTA has [`sample::SHARED_BYTES`] of dynamic shared memory to itself, and a team its
//! scratch.

use core::marker::PhantomData;

use cuda_std::{Global, GlobalMut, device, kernel, shared, thread};

use crate::sample::{
    self, All, Count, Inputs, MOST_CANDIDATES, MOST_SPLITS, Question, Raw, Row, SIDE_BY_SIDE, Split, THREADS, Team,
    masses_of, nominate_best, rank, ranked_logit, ranked_token, select,
};
use crate::step::{NO_TOKEN, Rows};

/// The most likeliest tokens that can be noted of a row.
pub const MOST: usize = 20;
/// Up to this many likeliest tokens are found one after the other: each CTA nominates the best of its slice, and the
/// last CTA takes the best of these.
const FEW: u32 = 4;
const _: () = assert!(FEW * MOST_SPLITS <= MOST_CANDIDATES);

/// Where in a note the parts are, in words.
pub struct Note;

impl Note {
    /// The chosen token's logit.
    pub const CHOSEN: usize = 0;
    /// The largest logit.
    pub const MAX: usize = 1;
    /// The mass of all tokens, two words, the low one first. The largest logit has [`UNIT_MASS`](sample::UNIT_MASS).
    pub const TOTAL: usize = 2;
    /// `[MOST, 2]` tokens with their logits, as many as were asked for: the likeliest first, and of equal logits the
    /// lower token first.
    pub const TOP: usize = 4;
    /// Words of a note.
    pub const WORDS: usize = Self::TOP + 2 * MOST;
}

/// Where in an entry of [`NoteLogits::wanted`] the parts are, in words.
pub struct Wanted;

impl Wanted {
    /// The row of the logits, or [`NO_ROW`](Self::NO_ROW).
    pub const ROW: usize = 0;
    /// In place of a row: nothing is noted.
    pub const NO_ROW: u32 = u32::MAX;
    /// How many likeliest tokens, at most [`MOST`].
    pub const TOP: usize = 1;
    /// The index among [`NoteLogits::sampled`] of the token that was chosen after the row.
    pub const CHOICE: usize = 2;
    /// Words of an entry.
    pub const WORDS: usize = 3;
}

/// Parameters of [`note_logits`] and [`note_chosen`]. The first: cooperative; grid: a [`Split`]'s, with as many teams
/// as rows noted, or with fewer teams of one CTA each, which take turns; shared memory: [`sample::SHARED_BYTES`]. The
/// second: grid 1.
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct NoteLogits {
    /// `[any, vocab]`.
    pub logits: Global<f32>,
    /// `[noted, Wanted::WORDS]`; for [`note_chosen`] each entry has a row.
    pub wanted: Global<u32>,
    /// `[choices]` the chosen tokens, for [`note_chosen`].
    pub sampled: Global<u32>,
    /// `[noted, Note::WORDS]`; words of tokens that were not asked for stay as they are.
    pub notes: GlobalMut<u32>,
    /// How rows are split.
    pub split: Split,
    /// Tokens, at most [`MOST_VOCAB`](sample::MOST_VOCAB).
    pub vocab: u32,
    /// Entries of [`wanted`](Self::wanted).
    pub noted: u32,
}

/// Notes all but the chosen token's logit.
#[kernel(threads = THREADS, min_blocks = 2)]
pub unsafe fn note_logits(p: NoteLogits) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        note_rows(&p);
    }
}

/// [`note_logits`] as part of a launch. Returns whether this CTA has written the note of the last of its rows; then all
/// of its threads see the note.
///
/// # Safety
/// All CTAs of the launch call it, once. Nobody changes a row's entry of [`wanted`](NoteLogits::wanted) before a CTA is
/// told that it was the last.
#[device]
pub(crate) unsafe fn note_rows(p: &NoteLogits) -> bool {
    // SAFETY: the caller's word.
    unsafe {
        let (mut noted, teams, _) = p.split.team();
        let mut is_noted = false;
        while noted < p.noted {
            let (_, _, team) = p.split.team();
            let wanted = p.wanted.at(noted as usize * Wanted::WORDS);
            if wanted.load(Wanted::ROW) == Wanted::NO_ROW {
                noted += teams;
                continue;
            }
            let (rows, logits, uses, vocab) = (Rows::default(), p.logits, Default::default(), p.vocab);
            let row = Row {
                inputs: Inputs { rows, logits, uses, vocab },
                logits: logits.at(wanted.load(Wanted::ROW) as usize * vocab as usize),
                slice: team.slice(vocab),
            };
            is_noted = note(team, row, wanted.load(Wanted::TOP), p.notes.at(noted as usize * Note::WORDS));
            noted += teams;
        }
        is_noted
    }
}

/// Notes a row, with its `top` likeliest tokens. Returns whether this CTA was the last of its team, which writes the
/// note.
///
/// # Safety
/// `top` is at most [`MOST`], and the same for the whole team. `row` has this CTA's slice, and `note` room for a note,
/// which no other team writes.
#[device]
unsafe fn note(mut team: Team, mut row: Row, top: u32, note: GlobalMut<u32>) -> bool {
    // SAFETY: the caller's word.
    unsafe {
        let mut among_few = true;
        loop {
            nominate(&mut team, row, top, among_few);
            if !team.is_last() {
                return false;
            }
            let candidates = team.nominated();
            if candidates <= MOST_CANDIDATES {
                note_candidates(&team, candidates, top, note);
            }
            team.reset();
            if candidates <= MOST_CANDIDATES {
                return true;
            }
            // There are more candidates than there is room for. As in `sample`, the last CTA takes the row again,
            // alone.
            team = team.alone();
            row.slice = (0, row.inputs.vocab);
            among_few = false;
        }
    }
}

/// Adds up the mass of a row, and nominates its likeliest tokens.
///
/// # Safety
/// As for [`note`]; `among_few` is the same for the whole team.
#[device]
unsafe fn nominate(team: &mut Team, row: Row, top: u32, among_few: bool) {
    // SAFETY: the caller's word.
    unsafe {
        let mine = row.best::<Raw>();
        let best = team.max(mine);
        let max = ranked_logit(best);
        let mut total = 0;
        let weigh = |logits: &[f32; SIDE_BY_SIDE]| masses_of(&logits.map(|logit| logit - max));
        row.each_weighed::<Raw>(|_| true, weigh, |_, _, mass| total += mass);
        team.add_to_total(total);
        if top <= FEW {
            each_best(top, mine, |best| row.best_below::<Raw>(best), |_, best| team.nominate_if(best > 0, best));
            return;
        }
        let question = Question { low: 0, high: best, narrow: 0, enough: MOST_CANDIDATES.into() };
        if among_few && nominate_best::<Raw>(team, &row, mine, question, top, 1.0) {
            return;
        }
        let kept = select(team, &All(row, PhantomData::<Raw>), question, Count, |all| all.min(top.into()));
        let least = ranked_logit(kept);
        row.each::<Raw>(
            |logit| logit >= least,
            |token, logit| {
                let rank = rank(logit, token);
                team.nominate_if(rank >= kept, rank);
            },
        );
    }
}

/// Writes what the team has found to the note: the largest logit, the mass, and the `top` best candidates.
///
/// # Safety
/// This CTA is the team's last, and has not reset it. There are `count` candidates, at most [`MOST_CANDIDATES`].
#[device]
unsafe fn note_candidates(team: &Team, count: u32, top: u32, note: GlobalMut<u32>) {
    // SAFETY: the caller's word.
    unsafe {
        // A thread has one of the candidates.
        let tid = thread::thread_idx_x();
        let mine = if tid < count { team.candidate(tid) } else { 0 };
        let put = |place: u32, rank: u64| {
            let logit = ranked_logit(rank).to_bits();
            if place == 0 {
                let total = team.total();
                note.store(Note::MAX, logit);
                note.store(Note::TOTAL, total as u32);
                note.store(Note::TOTAL + 1, (total >> 32) as u32);
            }
            if place < top {
                note.store(Note::TOP + 2 * place as usize, ranked_token(rank));
                note.store(Note::TOP + 2 * place as usize + 1, logit);
            }
        };
        if top <= FEW {
            each_best(top, mine, |_| 0, put);
            return;
        }
        let ranks = shared::dynamic::<u64>(sample::RANKS);
        ranks.store(tid as usize, mine);
        thread::sync_threads();
        let (mut place, mut i) = (0, 0);
        while i < count {
            place += u32::from(ranks.load(i as usize) > mine);
            i += 1;
        }
        if tid >= count {
            return;
        }
        put(place, mine);
    }
}

/// Calls `f` with the CTA's `count` best ranks, or with the best one if `count` is 0: the best first, each with its
/// place from 0 on. One thread makes the calls. `mine` is this thread's best rank, and `next(rank)` gives its best rank
/// below that. When there are no more ranks, `f` gets 0.
///
/// # Safety
/// `count` is the same for the whole CTA.
#[device]
unsafe fn each_best(count: u32, mut mine: u64, next: impl Fn(u64) -> u64, f: impl Fn(u32, u64)) {
    let mut place = 0;
    loop {
        // SAFETY: the caller's word.
        let best = unsafe { sample::block_max(mine) };
        if thread::thread_idx_x() == 0 {
            f(place, best);
        }
        place = thread::opaque(place) + 1;
        if place >= count {
            return;
        }
        if mine == best && best > 0 {
            mine = next(best);
        }
    }
}

/// Notes the logits of the chosen tokens.
#[kernel(threads = 256)]
pub unsafe fn note_chosen(p: NoteLogits) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let mut noted = thread::thread_idx_x();
        while noted < p.noted {
            let wanted = p.wanted.at(noted as usize * Wanted::WORDS);
            let token = p.sampled.load(wanted.load(Wanted::CHOICE) as usize);
            if token != NO_TOKEN {
                let row = wanted.load(Wanted::ROW) as usize * p.vocab as usize;
                let logit = p.logits.load(row + token as usize);
                p.notes.store(noted as usize * Note::WORDS + Note::CHOSEN, logit.to_bits());
            }
            noted += 256;
        }
    }
}
