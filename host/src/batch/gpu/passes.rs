//! A step's rows, cut into passes: which rows run together, in which tiles of attention, and after which of them a
//! token is chosen.
//!
//! Rows of prompts and rows of what was generated go different ways where the device has two
//! (docs/reference/architecture.md); prompts first, since a sequence may have both in one step. Any cut gives the same
//! bits.

use std::ops::Range;

use gpu_kernels::prefill_attention;

use crate::batch::plan::Slot;
use crate::forward::RowsOf;
use crate::prefill::Results;

/// A sequence's rows of a step.
#[derive(Clone, Debug)]
pub struct SequenceRows {
    /// Whose.
    pub slot: Slot,
    /// Position of the first.
    pub start: usize,
    /// Known tokens, then drafts.
    pub tokens: Vec<u32>,
    /// Rows from which on a token is chosen after each; none: as many as there are.
    pub chosen_from: usize,
    /// Positions below this are a prompt's, to be run as such: 0 where there is no difference.
    pub prompt: usize,
}

/// What passes have room for.
#[derive(Clone, Copy, Debug)]
pub struct Widths {
    /// Rows of prompts in a pass for them.
    pub prompt: usize,
    /// Rows of another pass.
    pub decode: usize,
    /// Rows of a tile of attention in such a pass.
    pub tile: usize,
}

/// Rows that run together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowPass {
    /// Whether they are run as rows of a prompt.
    pub prompt: bool,
    /// Their tokens.
    pub tokens: Vec<u32>,
    /// Their positions.
    pub positions: Vec<u32>,
    /// Their slots.
    pub slots: Vec<u32>,
    /// Tiles of attention, as the pass's kernel has them.
    pub tiles: Vec<Vec<u32>>,
    /// Rows after which a token is chosen.
    pub chosen: Vec<Chosen>,
    /// Of a prompt's pass: where the tiles of rows begin that have such among them.
    pub results: Results,
}

/// A row after which a token is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Which sequence's: the index of its [`SequenceRows`].
    pub of: usize,
    /// The row in the pass.
    pub row: usize,
    /// The first of the pass's rows that are drafts up to this one; `row + 1` if this is none.
    pub drafts: usize,
}

impl RowPass {
    /// Rows.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// What the rows are to each other: a sequence's lie together.
    pub fn rows_of(&self) -> RowsOf {
        RowsOf::of(&self.slots)
    }

    /// The positions of each sequence's rows, by slot.
    pub fn runs(&self) -> impl Iterator<Item = (Slot, Range<usize>)> {
        let rows: Vec<(Slot, u32)> = self.slots.iter().copied().zip(self.positions.iter().copied()).collect();
        let runs: Vec<_> = rows.chunk_by(|a, b| a.0 == b.0).map(|run| (run[0].0, run[0].1, run.len())).collect();
        runs.into_iter().map(|(slot, first, count)| (slot, first as usize..first as usize + count))
    }

    /// What is beyond every position.
    pub fn end(&self) -> u32 {
        self.positions.iter().max().map_or(0, |last| last + 1)
    }

    /// Appends `range` of a sequence's rows.
    fn push(&mut self, of: usize, rows: &SequenceRows, range: Range<usize>, tile: usize) {
        let (first, start) = (self.len(), rows.start + range.start);
        let tiles = prefill_attention::tiles(first as u32, range.len() as u32, rows.slot, start as u32, tile as u32);
        // The others' tiles know their sequence and position by their rows.
        let words = if self.prompt { 4 } else { 2 };
        self.tiles.extend(tiles.iter().map(|tile| tile[..words].to_vec()));
        let chosen = range.start.max(rows.chosen_from)..range.end;
        self.chosen.extend(chosen.map(|i| {
            let row = |i: usize| first + i - range.start;
            // The first row with a choice holds the newest token, and drafts follow.
            Chosen {
                of,
                row: row(i),
                drafts: if i == rows.chosen_from { row(i) + 1 } else { row(rows.chosen_from + 1) },
            }
        }));
        self.tokens.extend(&rows.tokens[range.clone()]);
        self.positions.extend((start as u32..).take(range.len()));
        self.slots.extend(std::iter::repeat_n(rows.slot, range.len()));
    }
}

/// Rows of prompts that run together.
#[derive(Default)]
struct Prompts {
    /// Whose, and which of its rows: what no token is chosen after, and the tiles behind that.
    parts: [Vec<(usize, Range<usize>)>; 2],
    len: usize,
}

impl Prompts {
    const TILE: usize = prefill_attention::TILE_ROWS as usize;

    /// Takes up `range` of a sequence's rows.
    fn push(&mut self, of: usize, rows: &SequenceRows, range: Range<usize>) {
        let border = if rows.chosen_from < range.end {
            range.start + rows.chosen_from.saturating_sub(range.start) / Self::TILE * Self::TILE
        } else {
            range.end
        };
        self.len += range.len();
        self.parts[0].push((of, range.start..border));
        self.parts[1].push((of, border..range.end));
    }

    /// The pass, with those tiles behind all others: the last layer makes no results but theirs.
    fn end(self, sequences: &[SequenceRows]) -> RowPass {
        let mut pass = RowPass { prompt: true, ..RowPass::default() };
        for part in self.parts {
            pass.results = Results { row: pass.len(), tile: pass.tiles.len() };
            for (of, range) in part {
                pass.push(of, &sequences[of], range, Self::TILE);
            }
            // The last are begun first: those with the most keys belong there.
            pass.tiles[pass.results.tile..].sort_by_key(|tile| tile[3]);
        }
        pass
    }
}

/// Cuts the rows of `sequences` into passes, to be run in this order.
pub fn cut(sequences: &[SequenceRows], widths: Widths) -> Vec<RowPass> {
    let mut passes = Vec::new();
    let prompt_rows = |rows: &SequenceRows| rows.prompt.saturating_sub(rows.start).min(rows.tokens.len());
    let mut pass = Prompts::default();
    for (of, rows) in sequences.iter().enumerate() {
        let mut at = 0;
        while at < prompt_rows(rows) {
            let take = (prompt_rows(rows) - at).min(widths.prompt - pass.len);
            pass.push(of, rows, at..at + take);
            at += take;
            if pass.len == widths.prompt {
                passes.push(std::mem::take(&mut pass).end(sequences));
            }
        }
    }
    passes.push(pass.end(sequences));

    // Rows without a choice first: then the head skips them.
    let mut order: Vec<usize> = (0..sequences.len()).collect();
    order.sort_by_key(|&of| sequences[of].chosen_from < sequences[of].tokens.len());
    let mut pass = RowPass::default();
    for of in order {
        let rows = &sequences[of];
        let (mut at, count) = (prompt_rows(rows), rows.tokens.len());
        while at < count {
            let room = widths.decode - pass.len();
            // Rows with a choice stay together: later ones need the drafts before them.
            let take = if count - at <= room { count - at } else { room.min(rows.chosen_from.saturating_sub(at)) };
            pass.push(of, rows, at..at + take, widths.tile);
            at += take;
            if at < count {
                passes.push(std::mem::take(&mut pass));
            }
        }
    }
    passes.push(pass);
    passes.retain(|pass| pass.len() > 0);
    passes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The passes of random steps hold every row once, in order, in tiles that fit, and choices know their drafts.
    #[test]
    fn every_row_runs_once_after_those_before_it() {
        for seed in 0..2000u64 {
            let mut count = 0;
            let mut random = |n: usize| {
                count += 1;
                (model::sampling::random(seed, count) % n as u64) as usize
            };
            let widths = Widths { prompt: 8 + random(200), decode: 16 + random(20), tile: 1 + random(4) };
            let sequences: Vec<SequenceRows> = (0..1 + random(9))
                .map(|slot| {
                    let (start, known, apart) = (random(100), 1 + random(60), random(3) > 0);
                    let prompt = if apart { 1 + random(150) } else { 0 };
                    // Drafts follow a token that was generated.
                    let generated = start + known > prompt;
                    let drafts = if generated { random(10) } else { 0 };
                    let chosen_from = if random(4) > 0 { known - 1 } else { known };
                    let drafts = if chosen_from < known { drafts } else { 0 };
                    let tokens = (0..known + drafts).map(|i| (slot * 1000 + i) as u32).collect();
                    SequenceRows { slot: slot as u32, start, tokens, chosen_from, prompt }
                })
                .collect();
            let passes = cut(&sequences, widths);
            let mut next: Vec<usize> = vec![0; sequences.len()];
            let mut chosen = vec![0; sequences.len()];
            for pass in &passes {
                assert!(pass.len() <= if pass.prompt { widths.prompt } else { widths.decode });
                for ((&token, &position), &slot) in pass.tokens.iter().zip(&pass.positions).zip(&pass.slots) {
                    let rows = &sequences[slot as usize];
                    let i = &mut next[slot as usize];
                    assert_eq!((token, position as usize), (rows.tokens[*i], rows.start + *i), "seed {seed}");
                    assert_eq!(pass.prompt, (position as usize) < rows.prompt, "seed {seed}");
                    *i += 1;
                }
                let mut covered = vec![0; pass.len()];
                for tile in &pass.tiles {
                    let (first, rows) = (tile[0] as usize, tile[1] as usize);
                    assert!(rows > 0 && (pass.prompt || rows <= widths.tile));
                    assert!(pass.slots[first..first + rows].iter().all(|slot| *slot == pass.slots[first]));
                    assert!(pass.positions[first..first + rows].windows(2).all(|two| two[0] + 1 == two[1]));
                    if pass.prompt {
                        assert_eq!(tile[2..], [pass.slots[first], pass.positions[first]]);
                    }
                    covered[first..first + rows].iter_mut().for_each(|c| *c += 1);
                }
                assert!(covered.iter().all(|c| *c == 1), "seed {seed}");
                if pass.prompt {
                    let Results { row, tile } = pass.results;
                    assert!(pass.chosen.iter().all(|choice| choice.row >= row), "seed {seed}");
                    assert!(pass.tiles.iter().enumerate().all(|(i, t)| (i >= tile) == (t[0] as usize >= row)));
                }
                for choice in &pass.chosen {
                    let rows = &sequences[choice.of];
                    let at = rows.chosen_from + chosen[choice.of];
                    assert_eq!(pass.tokens[choice.row], rows.tokens[at]);
                    assert_eq!(choice.row + 1 - choice.drafts, at - rows.chosen_from);
                    chosen[choice.of] += 1;
                }
            }
            for (rows, (next, chosen)) in sequences.iter().zip(next.into_iter().zip(chosen)) {
                assert_eq!((next, chosen), (rows.tokens.len(), rows.tokens.len() - rows.chosen_from), "seed {seed}");
            }
        }
    }
}
