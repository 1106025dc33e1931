//! The search for NaN and infinity in the weights.

use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use super::{Checkpoint, Dtype, Tensor};
use crate::Error;

/// Bytes that one task scans; a multiple of every element size.
const TASK: usize = 1 << 20;

impl Checkpoint {
    /// Reads every weight once, on all threads, and fails on the first NaN or infinity in file order.
    ///
    /// `progress` hears the number of bytes scanned so far, from any thread and in no particular order.
    ///
    /// # Errors
    /// [`Error::NotFinite`].
    pub fn check_finite(&self, progress: &(dyn Fn(u64) + Sync)) -> Result<(), Error> {
        let scanned = AtomicU64::new(0);
        self.tensors().try_for_each(|tensor| {
            self.check_tensor_finite(&tensor, &|bytes| progress(scanned.fetch_add(bytes, Ordering::Relaxed) + bytes))
        })
    }

    /// As [`check_finite`](Self::check_finite), for one tensor of this checkpoint: for loaders that check each as they come
    /// to it. `progress` hears the number of bytes of each step.
    ///
    /// # Errors
    /// [`Error::NotFinite`].
    pub fn check_tensor_finite(&self, tensor: &Tensor<'_>, progress: &(dyn Fn(u64) + Sync)) -> Result<(), Error> {
        let bad = tensor.data.par_chunks(TASK).enumerate().find_map_first(|(task, bytes)| {
            let found = first_not_finite(tensor.dtype, bytes);
            progress(bytes.len() as u64);
            found.map(|at| task * (TASK / tensor.dtype.size()) + at)
        });
        let Some(index) = bad else { return Ok(()) };
        Err(Error::NotFinite {
            path: self.tensor_file(tensor.name).map(Into::into).unwrap_or_default(),
            tensor: tensor.name.to_owned(),
            index,
            value: tensor.get(index).unwrap_or(f32::NAN),
        })
    }
}

impl Tensor<'_> {
    /// Element `index` in row-major order, widened; `None` beyond the end.
    pub fn get(&self, index: usize) -> Option<f32> {
        let size = self.dtype.size();
        let bytes = self.data.get(index.checked_mul(size)?..)?.get(..size)?;
        Some(match (self.dtype, bytes) {
            (Dtype::Bf16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
            (Dtype::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
            (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            _ => return None,
        })
    }
}

/// A number is finite unless its exponent bits are all ones; that test needs no conversion and vectorises.
fn first_not_finite(dtype: Dtype, bytes: &[u8]) -> Option<usize> {
    match dtype {
        Dtype::Bf16 => first_with_exponent_16(bytes, 0x7f80),
        Dtype::F16 => first_with_exponent_16(bytes, 0x7c00),
        Dtype::F32 => {
            let bad = |c: &[u8; 4]| u32::from_le_bytes(*c) & 0x7f80_0000 == 0x7f80_0000;
            let (elements, _) = bytes.as_chunks();
            // Blocks without an early exit vectorise; only a block with a find is searched again.
            let block = elements.chunks(1024).position(|b| b.iter().fold(false, |any, c| any | bad(c)))?;
            elements[block * 1024..].iter().position(bad).map(|at| block * 1024 + at)
        }
    }
}

fn first_with_exponent_16(bytes: &[u8], exponent: u16) -> Option<usize> {
    let bad = |c: &[u8; 2]| u16::from_le_bytes(*c) & exponent == exponent;
    let (elements, _) = bytes.as_chunks();
    let block = elements.chunks(1024).position(|b| b.iter().fold(false, |any, c| any | bad(c)))?;
    elements[block * 1024..].iter().position(bad).map(|at| block * 1024 + at)
}
