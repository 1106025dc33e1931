//! Cuts the rows of a step into passes: which rows run together, in which tiles of attention, and after which rows a
//! token is chosen.
//!
//! If the device has separate passes for prompts (docs/reference/batching.md), rows of prompts and generated rows
//! are cut apart. Passes over prompts come first, since a sequence may have both in one step. Every cut gives the same
//! bits.

use std::ops::Range;

use gpu_kernels::prefill_attention;

use crate::batch::plan::Slot;
use crate::forward::RowsOf;
use crate::prefill::Results;

/// The rows of a sequence in a step.
#[derive(Clone, Debug)]
pub struct SequenceRows {
    /// The slot of the sequence.
    pub slot: Slot,
    /// Position of the first row.
    pub start: usize,
    /// Known tokens, then drafts.
    pub tokens: Vec<u32>,
    /// A token is chosen after each row from this one on. The number of rows, if none is chosen.
    pub chosen_from: usize,
    /// Positions below this are the prompt's and run in passes over prompts. 0 if there are no such passes.
    pub prompt: usize,
}

/// The sizes of passes.
#[derive(Clone, Copy, Debug)]
pub struct Widths {
    /// Most rows of a pass over prompts.
    pub prompt: usize,
    /// Most rows of any other pass.
    pub decode: usize,
    /// Most rows of a tile of attention in such other pass.
    pub tile: usize,
}

/// The rows of a pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowPass {
    /// Whether this is a pass over prompts.
    pub prompt: bool,
    /// The rows' tokens.
    pub tokens: Vec<u32>,
    /// The rows' positions.
    pub positions: Vec<u32>,
    /// The rows' slots.
    pub slots: Vec<u32>,
    /// Tiles of attention, in the form that the pass's kernel takes.
    pub tiles: Vec<Vec<u32>>,
    /// Rows after which a token is chosen.
    pub chosen: Vec<Chosen>,
    /// In a pass over prompts: where the tiles begin that have rows after which a token is chosen.
    pub results: Results,
}

/// A row after which a token is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// Its sequence, as an index into the [`SequenceRows`] of the step.
    pub of: usize,
    /// The row in the pass.
    pub row: usize,
    /// The first row in the pass of the drafts up to this row; `row + 1` if this row is no draft.
    pub drafts: usize,
}

impl RowPass {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// How the rows relate to each other. Rows of the same sequence are adjacent.
    pub fn rows_of(&self) -> RowsOf {
        RowsOf::of(&self.slots)
    }

    /// The positions of each sequence's rows, by slot.
    pub fn runs(&self) -> impl Iterator<Item = (Slot, Range<usize>)> {
        let rows: Vec<(Slot, u32)> = self.slots.iter().copied().zip(self.positions.iter().copied()).collect();
        let runs: Vec<_> = rows.chunk_by(|a, b| a.0 == b.0).map(|run| (run[0].0, run[0].1, run.len())).collect();
        runs.into_iter().map(|(slot, first, count)| (slot, first as usize..first as usize + count))
    }

    /// One more than the largest position.
    pub fn end(&self) -> u32 {
        self.positions.iter().max().map_or(0, |last| last + 1)
    }

    /// Appends the rows `range` of a sequence.
    fn push(&mut self, of: usize, rows: &SequenceRows, range: Range<usize>, tile: usize) {
        let (first, start) = (self.len(), rows.start + range.start);
        let tiles = prefill_attention::tiles(first as u32, range.len() as u32, rows.slot, start as u32, tile as u32);
        // Tiles of other passes take sequence and position from their rows, so these have two words only.
        let words = if self.prompt { 4 } else { 2 };
        self.tiles.extend(tiles.iter().map(|tile| tile[..words].to_vec()));
        let chosen = range.start.max(rows.chosen_from)..range.end;
        self.chosen.extend(chosen.map(|i| {
            let row = |i: usize| first + i - range.start;
            // The first row with a choice is the newest token's. The rows after it are drafts.
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

/// A pass over prompts in the making.
#[derive(Default)]
struct Prompts {
    /// The index of a sequence and a range of its rows. First the tiles after which no token is chosen; then, for each
    /// sequence, the tiles from its first choice on.
    parts: [Vec<(usize, Range<usize>)>; 2],
    len: usize,
}

impl Prompts {
    const TILE: usize = prefill_attention::TILE_ROWS as usize;

    /// Adds the rows `range` of a sequence.
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

    /// Ends the pass. The tiles with choices come last, because the last layer makes results only for these.
    fn end(self, sequences: &[SequenceRows]) -> RowPass {
        let mut pass = RowPass { prompt: true, ..RowPass::default() };
        for part in self.parts {
            pass.results = Results { row: pass.len(), tile: pass.tiles.len() };
            for (of, range) in part {
                pass.push(of, &sequences[of], range, Self::TILE);
            }
            // The kernel begins with the last tiles. So those with the most keys, which take longest, come last.
            pass.tiles[pass.results.tile..].sort_by_key(|tile| tile[3]);
        }
        pass
    }
}

/// Cuts the rows of `sequences` into passes, which must run in this order.
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

    // Rows without a choice come first, so that the head can skip them.
    let mut order: Vec<usize> = (0..sequences.len()).collect();
    order.sort_by_key(|&of| sequences[of].chosen_from < sequences[of].tokens.len());
    let mut pass = RowPass::default();
    for of in order {
        let rows = &sequences[of];
        let (mut at, count) = (prompt_rows(rows), rows.tokens.len());
        while at < count {
            let room = widths.decode - pass.len();
            // The rows with choices stay in one pass, because a later one needs the drafts before it.
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

    /// In random steps, the passes hold every row once and in order, the tiles fit, and choices know their drafts.
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
                    // Drafts follow only a generated token.
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
