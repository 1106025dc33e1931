//! Rows that the host knows, in lists that were checked. Passes over such lists are safe to enqueue.

use std::collections::HashSet;

use cuda_std::Global;
use gpu_kernels::attention::Attend;

use super::{Capacity, Forward, Pass, RowOutput, RowsOf, Tiles};
use crate::Error;
use crate::device::Buffer;
use crate::row_buffers::RowBuffers;

/// A row of a pass: one token of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The token's id.
    pub token: u32,
    /// The token's position in the sequence, from 0 on.
    pub position: u32,
    /// The number of the sequence, which is the index of its [page table](Forward::page_tables).
    pub sequence: u32,
}

/// Lists of rows on the device, with their tiles of attention. The rows of such lists were checked when they were made,
/// and nothing writes to the lists afterwards.
pub struct ListedRows {
    rows: RowBuffers,
    tiles: Buffer<u32>,
    end: u32,
    /// Whether rows of the same sequence are adjacent and at consecutive positions.
    in_order: bool,
    /// The room that the rows were checked for.
    room: Capacity,
    /// The most rows of a tile that they were cut for.
    tile_rows: usize,
}

impl ListedRows {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.tokens.len()
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.tokens.is_empty()
    }
}

impl Forward {
    /// Checks rows and copies them to the device, for passes over all of them. Adjacent rows of a sequence at
    /// consecutive positions share a tile of attention.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    ///
    /// # Panics
    /// If `rows` is empty or more than there is [room](Self::room) for, or a row has a token, position or sequence that
    /// does not exist: a bug of the caller.
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
            rows: RowBuffers {
                count: device.upload(&[rows.len() as u32])?,
                tokens: column(|row| row.token)?,
                positions: column(|row| row.position)?,
                sequences: column(|row| row.sequence)?,
            },
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

    /// [`enqueue_rows`](Self::enqueue_rows) for rows that were [listed](Self::list_rows).
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// If they were listed on another device, for another room or for a model with other heads, or `output` names other
    /// rows: a bug of the caller.
    pub fn enqueue_listed(&self, listed: &ListedRows, output: RowOutput) -> Result<Option<Global<u64>>, Error> {
        let pass = self.listed_pass(listed, output);
        // SAFETY: the lists were checked for this room, and nothing wrote to them since; freeing them waits for the
        // device.
        unsafe { self.enqueue_rows(&pass) }
    }

    /// [`enqueue_quickest`](Self::enqueue_quickest) for rows of several sequences that were [listed](Self::list_rows).
    ///
    /// # Errors
    /// A refused launch.
    ///
    /// # Panics
    /// As [`enqueue_listed`](Self::enqueue_listed), and if rows of a sequence are not adjacent and at consecutive
    /// positions.
    pub fn enqueue_sequences(&mut self, listed: &ListedRows, output: RowOutput) -> Result<Option<Global<u64>>, Error> {
        assert!(listed.in_order, "rows of a sequence that do not follow each other");
        let pass = self.listed_pass(listed, output);
        // SAFETY: as in `enqueue_listed`; the rows relate to each other as was just asserted.
        unsafe { self.enqueue_quickest(&pass, RowsOf::Sequences) }
    }

    /// The pass over listed rows.
    fn listed_pass(&self, listed: &ListedRows, output: RowOutput) -> Pass {
        let is_here = listed.rows.count.device().is_same_card(&self.device);
        let fits = listed.room == self.room && listed.tile_rows == self.tile_rows() && is_here;
        assert!(fits, "rows that were listed for {:?}", listed.room);
        Pass {
            rows: listed.rows.rows(),
            most_rows: listed.len() as u32,
            end: listed.end,
            tiles: Some(Tiles { list: listed.tiles.ptr(), count: (listed.tiles.len() / 2) as u32 }),
            output,
        }
    }
}

/// Whether rows of the same sequence are adjacent and at consecutive positions.
fn are_in_order(rows: &[Row]) -> bool {
    let mut met = HashSet::new();
    let follows = |two: &[Row]| two[1].sequence == two[0].sequence && two[1].position == two[0].position + 1;
    let begins: Vec<u32> =
        (0..rows.len()).filter(|&i| i == 0 || !follows(&rows[i - 1..=i])).map(|i| rows[i].sequence).collect();
    begins.into_iter().all(|sequence| met.insert(sequence))
}

/// Cuts rows into tiles, `[first, count]` each. The rows of a tile are of one sequence, at consecutive positions, and
/// at most `most`.
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
