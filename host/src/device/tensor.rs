//! Tensor maps: descriptions of tensors in device memory, encoded by the driver for the copy engine.

use std::ffi::c_void;

use cuda_std::Global;
use cuda_std::tensor::{ROW, Tensor, TensorMap};
use cust::sys;

use super::cuda::check;
use super::{Buffer, Device, Kind};
use crate::Error;

// Values of the driver's enumerations, which `cust` does not have.
const BF16: u32 = 9;
const NOT_INTERLEAVED: u32 = 0;
const SWIZZLE_128_BYTES: u32 = 3;
/// Lines that a copy draws into L2 together: 8 % of a large product.
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
        Global::from_raw(self.0.ptr().addr() + (i * size_of::<TensorMap>()) as u64)
    }
}

impl Device {
    /// Encodes maps of `tensors` and copies them to the device. A map says where a tensor is; it keeps nothing alive.
    ///
    /// # Errors
    /// A tensor that the copy engine cannot address (the driver's refusal), too little memory, or a driver error.
    pub fn tensor_maps(&self, tensors: &[Tensor]) -> Result<TensorMaps, Error> {
        let mut words = Vec::with_capacity(tensors.len() * WORDS);
        for tensor in tensors {
            let map = match &*self.0 {
                Kind::Cuda(cuda) => {
                    cuda.enter()?;
                    encode(tensor)?
                }
                Kind::Emulator(_) => TensorMap::emulated(tensor),
            };
            words.extend_from_slice(&map.0);
        }
        self.upload(&words).map(TensorMaps)
    }
}

fn encode(tensor: &Tensor) -> Result<TensorMap, Error> {
    let Tensor { address, sizes, strides, tile, rank } = *tensor;
    let mut map = TensorMap([0; WORDS]);
    let tile = [ROW, tile[0], tile[1], tile[2]];
    // SAFETY: every array has at least as many elements as the rank asks for, and the map is aligned as the driver wants it.
    let code = unsafe {
        cuTensorMapEncodeTiled(
            &mut map,
            BF16,
            rank,
            address as *mut c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            [1; 4].as_ptr(),
            NOT_INTERLEAVED,
            SWIZZLE_128_BYTES,
            PROMOTE_TO_256_BYTES,
            ZEROS_BEYOND_EDGES,
        )
    };
    check("describing a tensor", code)?;
    Ok(map)
}
