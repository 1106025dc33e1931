//! Tensor maps: descriptions of matrices in device memory, encoded by the driver for TMA.

use std::ffi::c_void;

use cuda_std::Global;
use cuda_std::tensor::{Array, Matrix, ROW, TensorMap};
use cust::sys;

use super::cuda::check;
use super::{Buffer, Device, DeviceKind};
use crate::Error;

// Values of the driver's enumerations, which `cust` does not have.
const BF16: u32 = 9;
const WORDS_OF_8: u32 = 4;
const NOT_INTERLEAVED: u32 = 0;
const NOT_SWIZZLED: u32 = 0;
const SWIZZLE_128_BYTES: u32 = 3;
/// Lines that a copy draws into L2 together: 8 % of a large GEMM.
const PROMOTE_TO_256_BYTES: u32 = 3;
const ZEROS_BEYOND_EDGES: u32 = 0;

// `driver_link` forwards it.
unsafe extern "C" {
    #[allow(clippy::too_many_arguments)]
    fn cuTensorMapEncodeTiled(
        map: *mut TensorMap,
        kind: u32,
        rank: u32,
        address: *mut c_void,
        sizes: *const u64,
        strides: *const u64,
        tile: *const u32,
        steps: *const u32,
        interleave: u32,
        swizzle: u32,
        promotion: u32,
        fill: u32,
    ) -> sys::CUresult;
}

/// Tensor maps in device memory, where kernels read them.
pub struct TensorMaps(Buffer<u64>);

/// Words of a map.
const WORDS: usize = size_of::<TensorMap>() / 8;

impl TensorMaps {
    /// The address of map `i`.
    ///
    /// # Panics
    /// If there is none: a bug of the caller.
    pub fn ptr(&self, i: usize) -> Global<TensorMap> {
        assert!((i + 1) * WORDS <= self.0.len(), "there are {} maps", self.0.len() / WORDS);
        // SAFETY: one of them.
        unsafe { self.0.ptr().cast().at(i) }
    }
}

impl Device {
    /// Encodes maps of `matrices` and copies them to the device. A map says where a matrix is; it keeps nothing alive.
    ///
    /// # Errors
    /// A matrix that TMA cannot address (the driver's refusal), too little memory, or a driver error.
    pub fn tensor_maps(&self, matrices: &[Matrix]) -> Result<TensorMaps, Error> {
        self.maps(matrices, encode, TensorMap::emulated)
    }

    /// Encodes maps of `arrays`, likewise.
    ///
    /// # Errors
    /// As [`tensor_maps`](Self::tensor_maps).
    pub fn array_maps(&self, arrays: &[Array]) -> Result<TensorMaps, Error> {
        self.maps(arrays, encode_array, TensorMap::emulated_array)
    }

    fn maps<D>(
        &self,
        described: &[D],
        encode: fn(&D) -> Result<TensorMap, Error>,
        emulated: fn(&D) -> TensorMap,
    ) -> Result<TensorMaps, Error> {
        let mut words = Vec::with_capacity(described.len() * WORDS);
        for one in described {
            let map = match &*self.0 {
                DeviceKind::Cuda(cuda) => {
                    cuda.enter()?;
                    encode(one)?
                }
                DeviceKind::Emulator(_) => emulated(one),
            };
            words.extend_from_slice(&map.0);
        }
        self.upload(&words).map(TensorMaps)
    }
}

fn encode_array(array: &Array) -> Result<TensorMap, Error> {
    let mut map = TensorMap([0; WORDS]);
    // SAFETY: every array has an element for each of the four dimensions (strides: for the outer ones), and the map is
    // aligned as the driver wants it.
    let code = unsafe {
        cuTensorMapEncodeTiled(
            &mut map,
            WORDS_OF_8,
            4,
            array.address as *mut c_void,
            array.sizes.as_ptr(),
            array.strides.as_ptr(),
            array.extent.as_ptr(),
            [1, 1, 1, 1].as_ptr(),
            NOT_INTERLEAVED,
            NOT_SWIZZLED,
            PROMOTE_TO_256_BYTES,
            ZEROS_BEYOND_EDGES,
        )
    };
    check("describing an array", code)?;
    Ok(map)
}

fn encode(matrix: &Matrix) -> Result<TensorMap, Error> {
    let Matrix { address, rows, columns, tile_rows, swizzled } = *matrix;
    let mut map = TensorMap([0; WORDS]);
    // SAFETY: every array has an element for each of the two dimensions (strides: for the outer one), and the map is
    // aligned as the driver wants it.
    let code = unsafe {
        cuTensorMapEncodeTiled(
            &mut map,
            BF16,
            2,
            address as *mut c_void,
            [columns, rows].as_ptr(),
            [columns * 2].as_ptr(),
            [ROW, tile_rows].as_ptr(),
            [1, 1].as_ptr(),
            NOT_INTERLEAVED,
            if swizzled { SWIZZLE_128_BYTES } else { NOT_SWIZZLED },
            PROMOTE_TO_256_BYTES,
            ZEROS_BEYOND_EDGES,
        )
    };
    check("describing a matrix", code)?;
    Ok(map)
}
