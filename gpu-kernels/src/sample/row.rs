//! A row of logits as the sampler sees it, and a CTA's walk over its slice.

use cuda_std::{Global, shared, thread};

use super::team::warp_total;
use super::{CHOICE, Choice, GENERATED, THREADS, WARPS};
use crate::step::Rows;

/// Logits that a thread asks for at a time.
const AT_ONCE: usize = 8;

/// What rows are chosen from.
#[derive(Clone, Copy)]
pub(crate) struct Inputs {
    /// The step's rows.
    pub rows: Rows,
    /// `[rows, vocab]`.
    pub logits: Global<f32>,
    /// `[slots, vocab]`.
    pub uses: Global<u32>,
    pub vocab: u32,
}

/// What becomes of logits before they are compared: by the [choice](Choice) that lies in shared memory. It is read there for each pass: registers are short
/// between passes.
pub(crate) trait Change: Sized {
    /// Whether it depends on the uses of tokens.
    const PENALISES: bool;

    /// What a pass needs to know.
    unsafe fn new(inputs: &Inputs) -> Self;

    /// `[vocab]` uses of tokens, where it depends on them.
    fn uses(&self) -> Global<u32>;

    /// A token's logit, by its `raw` one and its uses.
    unsafe fn of(&self, token: u32, raw: f32, uses: u32) -> f32;
}

/// Logits as they are.
pub(crate) struct Raw;

impl Change for Raw {
    const PENALISES: bool = false;

    #[inline(always)]
    unsafe fn new(_: &Inputs) -> Self {
        Self
    }

    fn uses(&self) -> Global<u32> {
        Default::default()
    }

    #[inline(always)]
    unsafe fn of(&self, _: u32, raw: f32, _: u32) -> f32 {
        raw
    }
}

/// Divided by the temperature, if there is one.
pub(super) struct Tempered(f32);

impl Change for Tempered {
    const PENALISES: bool = false;

    #[inline(always)]
    unsafe fn new(_: &Inputs) -> Self {
        unsafe { Self(Choice::load(shared::dynamic(CHOICE)).settings.temperature) }
    }

    fn uses(&self) -> Global<u32> {
        Default::default()
    }

    #[inline(always)]
    unsafe fn of(&self, _: u32, raw: f32, _: u32) -> f32 {
        if self.0 > 0.0 { raw / self.0 } else { raw }
    }
}

/// Penalised for its uses before that.
pub(super) struct Penalised {
    choice: Choice,
    uses: Global<u32>,
    tokens: Global<u32>,
}

impl Change for Penalised {
    const PENALISES: bool = true;

    #[inline(always)]
    unsafe fn new(inputs: &Inputs) -> Self {
        unsafe {
            let choice = Choice::load(shared::dynamic(CHOICE));
            let uses = inputs.uses.at(choice.slot as usize * inputs.vocab as usize);
            Self { choice, uses, tokens: inputs.rows.tokens.read() }
        }
    }

    #[inline(always)]
    fn uses(&self) -> Global<u32> {
        self.uses
    }

    #[inline(always)]
    unsafe fn of(&self, token: u32, raw: f32, uses: u32) -> f32 {
        unsafe {
            let (s, mut l, mut uses) = (&self.choice.settings, raw, uses);
            let mut r = self.choice.drafts;
            while r <= self.choice.row {
                if self.tokens.load(r as usize) == token {
                    uses += GENERATED;
                }
                r += 1;
            }
            if uses != 0 {
                l = if l > 0.0 { l / s.repetition_penalty } else { l * s.repetition_penalty };
            }
            let times = uses / GENERATED;
            if times != 0 {
                l -= s.presence_penalty;
                l -= s.frequency_penalty * times as f32;
            }
            if s.temperature > 0.0 { l / s.temperature } else { l }
        }
    }
}

/// A CTA's slice of a row, or a part of it.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub inputs: Inputs,
    /// `[vocab]`.
    pub logits: Global<f32>,
    /// The first token, and the one after the last.
    pub slice: (u32, u32),
}

impl Row {
    /// Hands every logit of the slice to `f`, with its token. A warp has a part of the slice that is contiguous.
    #[inline(always)]
    pub unsafe fn each<C: Change>(&self, mut f: impl FnMut(u32, f32)) {
        unsafe {
            let change = C::new(&self.inputs);
            let (first, end) = part(self.slice, thread::warp_id());
            let mut token = first + thread::lane_id();
            while token < end {
                let (mut raw, mut uses) = ([0.0; AT_ONCE], [0; AT_ONCE]);
                unroll!(I < AT_ONCE of 8; {
                    let token = (token + 32 * I as u32) as usize;
                    if token < end as usize {
                        raw[I] = self.logits.load(token);
                        if C::PENALISES {
                            uses[I] = change.uses().load(token);
                        }
                    }
                });
                // They take turns in the first place, for `f` is long: it is to be written out once.
                let mut left = AT_ONCE as u32;
                while left > 0 && token < end {
                    thread::keep_rolled();
                    f(token, change.of(token, raw[0], uses[0]));
                    token += 32;
                    let (first, first_uses) = (raw[0], uses[0]);
                    unroll!(I < 7 of 8; {
                        raw[I] = raw[I + 1];
                        uses[I] = uses[I + 1];
                    });
                    (raw[AT_ONCE - 1], uses[AT_ONCE - 1]) = (first, first_uses);
                    left = thread::fresh(left) - 1;
                }
            }
        }
    }

    /// Hands a logit to each of the first lanes of a warp, whose slice has no more than these.
    #[inline(always)]
    pub unsafe fn one_each<C: Change>(&self, mut f: impl FnMut(f32)) {
        unsafe {
            let token = self.slice.0 + thread::lane_id();
            if token < self.slice.1 {
                let change = C::new(&self.inputs);
                let uses = if C::PENALISES { change.uses().load(token as usize) } else { 0 };
                f(change.of(token, self.logits.load(token as usize), uses));
            }
        }
    }

    /// What the logits of this warp's part of the slice weigh together: known to each of its lanes.
    #[inline(always)]
    pub unsafe fn warp_weight<C: Change>(&self, weigh: impl Fn(f32) -> u64) -> u64 {
        unsafe {
            let mut own = 0;
            self.each::<C>(|_, logit| own += weigh(logit));
            warp_total(own)
        }
    }

    /// The same row with the slice of one warp's part.
    #[inline(always)]
    pub fn narrowed(&self, warp: u32) -> Self {
        Self { slice: part(self.slice, warp), ..*self }
    }
}

/// A warp's part of a slice.
#[inline(always)]
fn part(slice: (u32, u32), warp: u32) -> (u32, u32) {
    let (first, end) = slice;
    let len = (end - first).div_ceil(WARPS);
    let from = first + warp * len;
    (from.min(end), (from + len).min(end))
}

const _: () = assert!(WARPS * 32 == THREADS);
