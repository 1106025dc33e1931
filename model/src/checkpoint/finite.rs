//! The search for weights that are NaN or infinite, or become infinite in bf16.

use std::sync::atomic::{AtomicU64, Ordering};

use rayon::prelude::*;

use half::bf16;

use super::{Checkpoint, Dtype, Store, Tensor};
use crate::Error;
use crate::format::e4m3;

/// Bytes that one task scans; a multiple of every element size.
const TASK: usize = 1 << 20;
/// Bytes that are read at a time to be rounded: few enough for a core's own cache.
const READ: usize = 256 << 10;
/// The bits, without the sign, of the smallest f32 that rounds to infinity in bf16: half a step above the largest bf16.
const ROUNDS_TO_INFINITY: u32 = 0x7f7f_8000;

impl Checkpoint {
    /// Reads every weight once, on all threads. Fails on the first weight, in file order, that is NaN or infinite, or
    /// would be infinite in bf16.
    ///
    /// `progress` is called with the number of bytes scanned so far, from any thread and in no particular order.
    ///
    /// # Errors
    /// [`Error::NotFinite`] or [`Error::TooLargeForBf16`].
    pub fn check_finite(&self, progress: &(dyn Fn(u64) + Sync)) -> Result<(), Error> {
        self.store.check_finite(progress)
    }

    /// Reads elements of a tensor of floats of this checkpoint as bf16, from element `first` on. Fills `out` with them,
    /// little-endian. Elements stored as f16 or f32 are rounded. Each element is checked as by
    /// [`check_finite`](Self::check_finite), so a loader need not call that first.
    ///
    /// # Errors
    /// [`Error::NotFinite`], [`Error::TooLargeForBf16`], or `Error::Io` if the file cannot be read or has become
    /// shorter.
    ///
    /// # Panics
    /// If the tensor has fewer elements, or does not hold floats: a bug of the caller.
    pub fn read_bf16(&self, tensor: &Tensor<'_>, first: usize, out: &mut [u8]) -> Result<(), Error> {
        let (size, count) = (tensor.dtype.size(), out.len() / 2);
        assert!((first + count) * size <= tensor.data.len(), "{count} elements of {} from {first} on", tensor.name);
        if tensor.dtype == Dtype::Bf16 {
            self.read_stored(tensor.name, first * 2, out)?;
            return self.check_elements(tensor, first, out);
        }
        let mut stored = vec![0; READ.min(count * size)];
        for (i, out) in out.chunks_mut(READ / size * 2).enumerate() {
            let first = first + i * (READ / size);
            let stored = &mut stored[..out.len() / 2 * size];
            self.read_stored(tensor.name, first * size, stored)?;
            self.check_elements(tensor, first, stored)?;
            round(tensor.dtype, stored, out);
        }
        Ok(())
    }

    /// Checks `bytes`, the stored elements of a tensor from element `first` on.
    fn check_elements(&self, tensor: &Tensor<'_>, first: usize, bytes: &[u8]) -> Result<(), Error> {
        let Some(at) = first_not_finite(tensor.dtype, bytes) else { return Ok(()) };
        let value = Tensor { data: bytes, ..*tensor }.get(at).unwrap_or(f32::NAN);
        Err(self.store.unusable(tensor.name, first + at, value))
    }
}

impl Store {
    /// As [`Checkpoint::check_finite`].
    pub(super) fn check_finite(&self, progress: &(dyn Fn(u64) + Sync)) -> Result<(), Error> {
        let scanned = AtomicU64::new(0);
        self.tensors().try_for_each(|tensor| {
            self.check_tensor_finite(&tensor, &|bytes| progress(scanned.fetch_add(bytes, Ordering::Relaxed) + bytes))
        })
    }

    /// As [`check_finite`](Self::check_finite), for one tensor. `progress` is called with the number of bytes of each
    /// step.
    fn check_tensor_finite(&self, tensor: &Tensor<'_>, progress: &(dyn Fn(u64) + Sync)) -> Result<(), Error> {
        if matches!(tensor.dtype, Dtype::I32 | Dtype::I64 | Dtype::Bool) {
            progress(tensor.data.len() as u64);
            return Ok(());
        }
        let bad = tensor.data.par_chunks(TASK).enumerate().find_map_first(|(task, bytes)| {
            let found = first_not_finite(tensor.dtype, bytes);
            progress(bytes.len() as u64);
            found.map(|at| task * (TASK / tensor.dtype.size()) + at)
        });
        let Some(index) = bad else { return Ok(()) };
        Err(self.unusable(tensor.name, index, tensor.get(index).unwrap_or(f32::NAN)))
    }

    fn unusable(&self, name: &str, index: usize, value: f32) -> Error {
        let path = self.by_name.get(name).map(|id| self.path(*id).to_owned()).unwrap_or_default();
        let tensor = name.to_owned();
        if value.is_finite() {
            Error::TooLargeForBf16 { path, tensor, index, value }
        } else {
            Error::NotFinite { path, tensor, index, value }
        }
    }
}

/// Rounds stored floats to the nearest bf16. Other number formats hold codes, which mean nothing by themselves.
fn round(dtype: Dtype, stored: &[u8], out: &mut [u8]) {
    let (out, _) = out.as_chunks_mut();
    match dtype {
        Dtype::Bf16 => out.as_flattened_mut().copy_from_slice(stored),
        Dtype::F16 => {
            for (out, word) in out.iter_mut().zip(stored.as_chunks().0) {
                *out = bf16::from_f32(half::f16::from_le_bytes(*word).to_f32()).to_le_bytes();
            }
        }
        Dtype::F32 => {
            for (out, word) in out.iter_mut().zip(stored.as_chunks().0) {
                *out = bf16::from_f32(f32::from_le_bytes(*word)).to_le_bytes();
            }
        }
        Dtype::F8E4m3 | Dtype::I32 | Dtype::I64 | Dtype::Bool => {
            unreachable!("{dtype} is no format of weights by themselves")
        }
    }
}

impl Tensor<'_> {
    /// Its elements, rounded to the nearest bf16.
    ///
    /// # Panics
    /// If the tensor does not hold floats: a bug of the caller.
    pub fn to_bf16(&self) -> Vec<bf16> {
        let mut bytes = vec![0; self.data.len() / self.dtype.size() * 2];
        round(self.dtype, self.data, &mut bytes);
        bytes.as_chunks().0.iter().map(|word| bf16::from_le_bytes(*word)).collect()
    }

    /// Element `index` in row-major order as f32 (an integer is rounded to the nearest); `None` beyond the end.
    pub fn get(&self, index: usize) -> Option<f32> {
        let size = self.dtype.size();
        let bytes = self.data.get(index.checked_mul(size)?..)?.get(..size)?;
        Some(match (self.dtype, bytes) {
            (Dtype::Bf16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f32(),
            (Dtype::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
            (Dtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Dtype::F8E4m3, &[code]) => e4m3::VALUES[code as usize],
            (Dtype::Bool, &[byte]) => f32::from(byte != 0),
            (Dtype::I32, &[a, b, c, d]) => i32::from_le_bytes([a, b, c, d]) as f32,
            (Dtype::I64, bytes) => i64::from_le_bytes(bytes.try_into().ok()?) as f32,
            _ => return None,
        })
    }
}

/// The index of the first element that is NaN or infinite, or, of f32, would be infinite in bf16.
///
/// A bf16 or f16 is finite unless its exponent bits are all ones. An f32 stays finite in bf16 if it is below a bound.
/// These tests need no conversion, and vectorise.
fn first_not_finite(dtype: Dtype, bytes: &[u8]) -> Option<usize> {
    match dtype {
        Dtype::Bf16 => first_with_exponent_16(bytes, 0x7f80),
        Dtype::F16 => first_with_exponent_16(bytes, 0x7c00),
        Dtype::F8E4m3 => {
            let block = bytes.chunks(1024).position(|b| b.iter().fold(false, |any, &code| any | e4m3::is_nan(code)))?;
            bytes[block * 1024..].iter().position(|&code| e4m3::is_nan(code)).map(|at| block * 1024 + at)
        }
        Dtype::I32 | Dtype::I64 | Dtype::Bool => None,
        Dtype::F32 => {
            let bad = |c: &[u8; 4]| u32::from_le_bytes(*c) & 0x7fff_ffff >= ROUNDS_TO_INFINITY;
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
