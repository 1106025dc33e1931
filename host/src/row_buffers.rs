//! Memory for the rows of a pass.

use gpu_kernels::step::Rows;

use crate::Error;
use crate::device::{Buffer, Device};

/// The lists that say which rows a pass runs.
pub(crate) struct RowBuffers {
    /// `[1]`, the number of rows.
    pub count: Buffer<u32>,
    /// `[rows]`, their token ids.
    pub tokens: Buffer<u32>,
    /// `[rows]`, their positions.
    pub positions: Buffer<u32>,
    /// `[rows]`, the numbers of their sequences.
    pub sequences: Buffer<u32>,
}

impl RowBuffers {
    /// Lists with room for so many rows, and none in them.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device, rows: usize) -> Result<Self, Error> {
        Ok(Self {
            count: device.zeroed(1)?,
            tokens: device.zeroed(rows)?,
            positions: device.zeroed(rows)?,
            sequences: device.zeroed(rows)?,
        })
    }

    /// Their addresses, as kernels take them.
    pub fn rows(&self) -> Rows {
        Rows {
            count: self.count.ptr_mut(),
            tokens: self.tokens.ptr_mut(),
            positions: self.positions.ptr_mut(),
            sequences: self.sequences.ptr_mut(),
            paths: Default::default(),
        }
    }
}
