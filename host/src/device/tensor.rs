//! Tensor maps: descriptions of tensors in device memory for TMA, encoded by the driver.

use std::ffi::c_void;

use cuda_std::Global;
use cuda_std::tensor::{Array, Matrix, ROW, TensorMap};
use cust::sys;

use super::cuda::check;
use super::{Buffer, Device, DeviceKind};
use crate::Error;

// Values of the driver's enumerations that `cust` lacks.
const BF16: u32 = 9;
const WORDS_OF_8: u32 = 4;
const NOT_INTERLEAVED: u32 = 0;
const NOT_SWIZZLED: u32 = 0;
const SWIZZLE_128_BYTES: u32 = 3;
/// L2 promotion: a copy brings memory into L2 in units of 256 bytes.
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

/// Words of a tensor map.
const WORDS: usize = size_of::<TensorMap>() / 8;

impl TensorMaps {
    /// The address of map `i`.
    ///
    /// # Panics
    /// If there is no map `i`: a bug of the caller.
    pub fn ptr(&self, i: usize) -> Global<TensorMap> {
        assert!((i + 1) * WORDS <= self.0.len(), "there are {} maps", self.0.len() / WORDS);
        // SAFETY: it is one of the maps.
        unsafe { self.0.ptr().cast().at(i) }
    }
}

impl Device {
    /// Encodes the maps of `matrices` and copies them to the device. A map contains its matrix's address, but does not
    /// keep the memory alive.
    ///
    /// # Errors
    /// A matrix that TMA cannot address, too little memory, or a driver error.
    pub fn tensor_maps(&self, matrices: &[Matrix]) -> Result<TensorMaps, Error> {
        self.maps(matrices, Matrix::check, |matrix| encode(matrix.into()), TensorMap::emulated)
    }

    /// As [`tensor_maps`](Self::tensor_maps), for `arrays`.
    ///
    /// # Errors
    /// As [`tensor_maps`](Self::tensor_maps).
    pub fn array_maps(&self, arrays: &[Array]) -> Result<TensorMaps, Error> {
        self.maps(arrays, Array::check, |array| encode(array.into()), TensorMap::emulated_array)
    }

    fn maps<D>(
        &self,
        described: &[D],
        check: fn(&D) -> Result<(), &'static str>,
        encode: fn(&D) -> Result<TensorMap, Error>,
        emulated: fn(&D) -> TensorMap,
    ) -> Result<TensorMaps, Error> {
        let mut words = Vec::with_capacity(described.len() * WORDS);
        for one in described {
            check(one).map_err(|condition| Error::Driver {
                doing: "describing a tensor".into(),
                reason: format!("TMA needs that {condition}"),
            })?;
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

/// A tensor in the form that the driver wants: `RANK` dimensions, the innermost first.
struct Described<const RANK: usize> {
    address: u64,
    /// The driver's number for the type of its elements.
    kind: u32,
    sizes: [u64; RANK],
    /// Bytes from one element to the next in each dimension but the innermost. The last entry is not used.
    strides: [u64; RANK],
    /// Elements of a box, which is what one copy takes.
    tile: [u32; RANK],
    swizzle: u32,
}

impl From<&Array> for Described<4> {
    fn from(array: &Array) -> Self {
        let [second, third, fourth] = array.strides;
        Self {
            address: array.address,
            kind: WORDS_OF_8,
            sizes: array.sizes,
            strides: [second, third, fourth, 0],
            tile: array.extent,
            swizzle: NOT_SWIZZLED,
        }
    }
}

impl From<&Matrix> for Described<2> {
    fn from(&Matrix { address, rows, columns, tile_rows, swizzled }: &Matrix) -> Self {
        Self {
            address,
            kind: BF16,
            sizes: [columns, rows],
            strides: [columns * 2, 0],
            tile: [ROW, tile_rows],
            swizzle: if swizzled { SWIZZLE_128_BYTES } else { NOT_SWIZZLED },
        }
    }
}

/// Lets the driver encode a map.
fn encode<const RANK: usize>(described: Described<RANK>) -> Result<TensorMap, Error> {
    let Described { address, kind, sizes, strides, tile, swizzle } = described;
    let mut map = TensorMap([0; WORDS]);
    // SAFETY: every array has an element for each dimension (strides: for the outer ones, at least), and the map is
    // aligned as the driver wants it.
    let code = unsafe {
        cuTensorMapEncodeTiled(
            &mut map,
            kind,
            RANK as u32,
            address as *mut c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            [1; RANK].as_ptr(),
            NOT_INTERLEAVED,
            swizzle,
            PROMOTE_TO_256_BYTES,
            ZEROS_BEYOND_EDGES,
        )
    };
    check("describing a tensor", code)?;
    Ok(map)
}
