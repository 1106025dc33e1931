//! Rows that the host knows, in lists that were checked: passes over them are safe to enqueue.

use std::collections::HashSet;

use cuda_std::Global;
use gpu_kernels::attention::Attend;
use gpu_kernels::step::Rows;

use super::{Capacity, Forward, Pass, RowOutput, RowsOf, Tiles};
use crate::Error;
use crate::device::Buffer;

/// A row: a token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its id.
    pub token: u32,
    /// Its position in the sequence.
    pub position: u32,
    /// The sequence's number: its row of the [page tables](Forward::page_tables).
    pub sequence: u32,
}

/// Rows on the device, with their tiles of attention. That there are some says that they were checked: nobody else
/// writes to the lists.
pub struct ListedRows {
    count: Buffer<u32>,
    tokens: Buffer<u32>,
    positions: Buffer<u32>,
    sequences: Buffer<u32>,
    tiles: Buffer<u32>,
    end: u32,
    /// Whether the rows of each sequence lie together, and follow each other.
    in_order: bool,
    /// What they were checked for: this room,
    room: Capacity,
    /// and tiles of at most so many rows.
    tile_rows: usize,
}

impl ListedRows {
    /// Rows.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

impl Forward {
    /// Copies rows to the device, for passes over all of them. Rows of a sequence that follow each other meet in
    /// attention.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    ///
    /// # Panics
    /// If there are none, or a row is of a token, position or sequence that there is no [room](Self::room) for: a bug
    /// of the caller.
    pub fn list_rows(&self, rows: &[Row]) -> Result<ListedRows, Error> {
        let (room, config, device) = (self.room, &self.config, &self.device);
        assert!(!rows.is_empty(), "no rows");
        self.check_room(rows.len(), 0);
        for row in rows {
            let fits = (row.token as usize) < config.vocab_size
                && (row.position as usize) < room.context
                && (row.sequence as usize) < room.sequences;
            assert!(fits, "{row:?}, of {} tokens, and {room:?}", config.vocab_size);
        }
        let column = |of: fn(&Row) -> u32| device.upload(&rows.iter().map(of).collect::<Vec<_>>());
        let tile_rows = self.tile_rows();
        Ok(ListedRows {
            count: device.upload(&[rows.len() as u32])?,
            tokens: column(|row| row.token)?,
            positions: column(|row| row.position)?,
            sequences: column(|row| row.sequence)?,
            tiles: device.upload(&tiles(rows, tile_rows).concat())?,
            end: rows.iter().map(|row| row.position + 1).max().unwrap_or(0),
            in_order: are_in_order(rows),
            room,
            tile_rows,
        })
    }

    /// Most rows of a tile of attention.
    pub(crate) fn tile_rows(&self) -> usize {
        Attend::tile_rows(self.config.plan.attention.group() as u32) as usize
    }

    /// [`enqueue_rows`](Self::enqueue_rows), of rows that were [listed](Self::list_rows).
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If they were listed on another device, for another room or for a model with other heads, or `output` is of other
    /// rows: a bug of the caller.
    pub fn enqueue_listed(&self, listed: &ListedRows, output: RowOutput) -> Result<Option<Global<u64>>, Error> {
        let pass = self.listed_pass(listed, output);
        // SAFETY: the lists were checked for this room, and nobody could write to them since; what frees them waits for
        // the device.
        unsafe { self.enqueue_rows(&pass) }
    }

    /// [`enqueue_quickest`](Self::enqueue_quickest), of rows that were [listed](Self::list_rows), of several sequences.
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// As [`enqueue_listed`](Self::enqueue_listed), and if rows of a sequence do not follow each other.
    pub fn enqueue_sequences(&mut self, listed: &ListedRows, output: RowOutput) -> Result<Option<Global<u64>>, Error> {
        assert!(listed.in_order, "rows of a sequence that do not follow each other");
        let pass = self.listed_pass(listed, output);
        // SAFETY: likewise; they are to each other what was asked.
        unsafe { self.enqueue_quickest(&pass, RowsOf::Sequences) }
    }

    /// The pass over rows that were listed.
    fn listed_pass(&self, listed: &ListedRows, output: RowOutput) -> Pass {
        let is_here = listed.count.device().is_same_card(&self.device);
        let fits = listed.room == self.room && listed.tile_rows == self.tile_rows() && is_here;
        assert!(fits, "rows that were listed for {:?}", listed.room);
        Pass {
            rows: Rows {
                count: listed.count.ptr_mut(),
                tokens: listed.tokens.ptr_mut(),
                positions: listed.positions.ptr_mut(),
                sequences: listed.sequences.ptr_mut(),
                paths: Default::default(),
            },
            most_rows: listed.len() as u32,
            end: listed.end,
            tiles: Some(Tiles { list: listed.tiles.ptr(), count: (listed.tiles.len() / 2) as u32 }),
            output,
        }
    }
}

/// Whether the rows of each sequence lie together, and follow each other.
fn are_in_order(rows: &[Row]) -> bool {
    let mut met = HashSet::new();
    let follows = |two: &[Row]| two[1].sequence == two[0].sequence && two[1].position == two[0].position + 1;
    let begins: Vec<u32> =
        (0..rows.len()).filter(|&i| i == 0 || !follows(&rows[i - 1..=i])).map(|i| rows[i].sequence).collect();
    begins.into_iter().all(|sequence| met.insert(sequence))
}

/// Cuts rows into tiles, `[first, count]` each: rows of a sequence that follow each other, at most `most`.
fn tiles(rows: &[Row], most: usize) -> Vec<[u32; 2]> {
    let mut tiles: Vec<[u32; 2]> = Vec::new();
    for (i, row) in rows.iter().enumerate() {
        match tiles.last_mut() {
            Some([_, count])
                if (*count as usize) < most
                    && rows[i - 1].sequence == row.sequence
                    && rows[i - 1].position + 1 == row.position =>
            {
                *count += 1;
            }
            _ => tiles.push([i as u32, 1]),
        }
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_of_one_sequence_and_hold_every_row_once() {
        let row = |sequence, position| Row { token: 0, position, sequence };
        let rows = [row(0, 4), row(0, 5), row(0, 6), row(1, 7), row(1, 9), row(2, 10), row(2, 11), row(2, 12)];
        assert_eq!(tiles(&rows, 2), [[0, 2], [2, 1], [3, 1], [4, 1], [5, 2], [7, 1]]);
        assert_eq!(tiles(&rows, 4), [[0, 3], [3, 1], [4, 1], [5, 3]]);
    }
}
