//! FP8 (e4m3) weights in blocks of 128 × 128, and the activations that they are multiplied with (see
//! `gpu_kernels::e4m3`). On Hopper, FP8 checkpoints with such blocks are multiplied this way.
//!
//! While a checkpoint is loaded, every weight becomes the bf16 that it stands for, and [`Collector`] keeps the scales.
//! From the two the device recovers a matrix's codes, and checks that codes and scales give exactly these weights. Of
//! the layers' matrices, only the codes and scales are kept.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use cuda_std::Global;
use gpu_kernels::e4m3::{
    self, CodedRows, EncodeE4m3, GROUP, Inputs, QuantizeRows, encode_e4m3, quantize_rows, scales_len,
};
use gpu_kernels::gemm::{self as gemm_kernels, Gemm, GemmE4m3, TILE_ROWS};
use gpu_kernels::linear::N_TILE;
use gpu_kernels::stream::{CHUNK_BYTES, CHUNK_FEATURES, StreamMatrix};
use half::bf16;
use model::format::Codes;
use model::plan::{self, Input, Matrix};
use model::{Config, Weight, Weights};

use crate::Error;
use crate::device::{Buffer, Device, TensorMaps};
use crate::gemm::{self, Epilogue};
use crate::quantized::{RowPlacement, places};
use crate::stream::{Stream, chunks, n_tiles};
use crate::weights::check_size;

/// Outputs, and inputs, of a block of weights.
pub const BLOCK: usize = GROUP as usize;
/// Words per block in the table of scales: see [`e4m3::Weights::scales`].
const WORDS: usize = 4;

/// The number of N-tiles and of inputs of each of the layers' matrices.
fn layers(config: &Config) -> impl Iterator<Item = (u32, u32)> {
    config.gemms().filter(|gemm| gemm.matrix != Matrix::Head).map(|gemm| n_tiles(&gemm))
}

/// As [`layers`], with two inputs counted as one: a pair of codes takes the place of a bf16.
fn pairs(config: &Config) -> impl Iterator<Item = (u32, u32)> {
    layers(config).map(|(n_tiles, k)| (n_tiles, k / 2))
}

/// The codes and scales of a model's layers, on a device.
pub struct E4m3 {
    codes: Stream,
    scales: Mutex<Buffer<f32>>,
    /// The address of `scales`, which can be read without the lock.
    scales_at: Global<f32>,
    /// Where the scales of each matrix begin, and where the last ones end.
    offsets: Vec<usize>,
    /// How many warps found a weight that no code gives with its scale.
    strange: Buffer<u32>,
}

impl E4m3 {
    /// Allocates the memory for the codes of a model's layers.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device, config: &Config) -> Result<Self, Error> {
        let mut offsets = vec![0];
        for (n_tiles, k) in layers(config) {
            offsets.push(offsets[offsets.len() - 1] + scales_len(n_tiles, k) as usize);
        }
        let scales = device.zeroed(offsets[offsets.len() - 1])?;
        Ok(Self {
            codes: Stream::new(device, pairs(config))?,
            scales_at: scales.ptr(),
            scales: Mutex::new(scales),
            offsets,
            strange: device.zeroed(1)?,
        })
    }

    /// Enqueues the kernel that recovers the codes of matrix `number`. `from` holds the matrix in bf16 when the kernel
    /// runs, and `scales` are its [scales](e4m3::Weights::scales).
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Panics
    /// If there is no such matrix, or its shape or number of scales differs: a bug of the caller.
    pub(crate) fn find(&self, device: &Device, number: usize, from: StreamMatrix, scales: &[f32]) -> Result<(), Error> {
        let (to, at) = (self.codes.matrices()[number], self.offsets[number]);
        assert_eq!(scales.len(), self.offsets[number + 1] - at, "scales of matrix {number}");
        assert_eq!((from.n_tiles, from.k), (to.n_tiles, 2 * to.k), "matrix {number}");
        self.scales.lock().unwrap_or_else(PoisonError::into_inner).write(at, scales)?;
        let (codes, strange) = (self.codes.weights().ptr_mut(), self.strange.ptr_mut());
        let encode = EncodeE4m3 { from, to, codes, scales: self.scales_of(number), strange };
        // SAFETY: the stream holds the matrix, there are scales for it, and the codes have room for its chunks.
        unsafe { device.launch::<encode_e4m3>((from.n_tiles, to.k.div_ceil(CHUNK_FEATURES)), 0, encode) }
    }

    /// Whether the recovered codes give exactly the weights, in all matrices so far. Waits for the device.
    ///
    /// # Errors
    /// A driver error.
    pub fn is_exact(&self) -> Result<bool, Error> {
        let mut found = [0];
        self.strange.read(0, &mut found)?;
        Ok(found == [0])
    }

    /// The address of a matrix's scales.
    fn scales_of(&self, number: usize) -> Global<f32> {
        // SAFETY: within the buffer.
        unsafe { self.scales_at.at(self.offsets[number]) }
    }

    /// The addresses of all matrices, as kernels take them.
    pub fn weights(&self) -> e4m3::Weights {
        e4m3::Weights { codes: self.codes.weights().ptr(), scales: self.scales_at }
    }

    /// Checks that the codes are on `device`, and of the layers of a model of this config.
    ///
    /// # Errors
    /// [`Error::Weights`], [`Error::WeightShape`].
    pub(crate) fn check(&self, device: &Device, config: &Config) -> Result<(), Error> {
        let is_here = self.codes.weights().device().is_same_card(device);
        let found: Vec<_> = self.codes.matrices().iter().filter(|_| is_here).map(|of| (of.n_tiles, of.k)).collect();
        let expected: Vec<_> = pairs(config).collect();
        check_size("matrices of codes in e4m3", (device, device), found.len(), expected.len())?;
        let inputs = |(n_tiles, pairs): (u32, u32)| [n_tiles as usize, 2 * pairs as usize];
        match found.into_iter().zip(expected).find(|(found, expected)| found != expected) {
            Some((found, expected)) => {
                let (found, expected) = (inputs(found), inputs(expected));
                Err(Error::WeightShape { what: "matrix of codes in e4m3", found, expected })
            }
            None => Ok(()),
        }
    }

    /// Bytes of codes and scales.
    pub fn bytes(&self) -> u64 {
        2 * self.codes.weights().len() as u64 + 4 * self.offsets[self.offsets.len() - 1] as u64
    }

    /// Bytes that the codes and scales of a model take, laid out for `blocks` CTAs.
    pub fn bytes_of(config: &Config, blocks: u32) -> u64 {
        let scales: u64 = layers(config).map(|(n_tiles, k)| 4 * u64::from(scales_len(n_tiles, k))).sum();
        chunks(pairs(config), blocks) * u64::from(CHUNK_BYTES) + scales
    }
}

/// The table of scales of a matrix of `rows` weight rows and `k` inputs, with the same `scale` for every block.
pub fn uniform_scales([rows, k]: [usize; 2], scale: f32) -> Vec<f32> {
    let groups = e4m3::groups(k as u32) as usize;
    let of_group = |group: usize| if group < k / BLOCK { [scale, scale, 0.0, 0.0] } else { [0.0; WORDS] };
    (0..rows.div_ceil(BLOCK) * groups).flat_map(|i| of_group(i % groups)).collect()
}

/// Collects the scales of a checkpoint while its weights are read.
pub struct Collector {
    /// For each matrix, the bits of its scales in the order of [`e4m3::Weights::scales`].
    matrices: Vec<Vec<AtomicU32>>,
    /// The place of each weight, by the address of the [`Weight`].
    places: HashMap<usize, RowPlacement>,
}

impl Collector {
    /// A collector for these weights of a checkpoint, which are in such blocks.
    pub fn new(weights: &Weights<Weight<'_>>) -> Self {
        let (places, shapes) = places(weights);
        let matrix = |[rows, inputs]: [usize; 2]| {
            let words = scales_len((rows as u32).div_ceil(N_TILE), inputs as u32);
            (0..words).map(|_| AtomicU32::new(0)).collect()
        };
        let matrices = shapes.into_iter().map(matrix).collect();
        Self { matrices, places }
    }

    /// Stores the scales of some rows of a weight. Weights outside the layers' matrices are ignored.
    pub fn take(&self, weight: &Weight<'_>, rows: Range<usize>, codes: &Codes) {
        let Some(place) = self.places.get(&std::ptr::from_ref(weight).addr()) else { return };
        let (groups, words) = (place.inputs / BLOCK, WORDS * e4m3::groups(place.inputs as u32) as usize);
        let matrix = &self.matrices[place.matrix];
        let start = rows.start;
        // All rows of a block have the same scales, so its first row is enough.
        for row in rows.filter(|row| *row == start || row.is_multiple_of(BLOCK)) {
            let scales = &codes.scales[(row - start) * groups..][..groups];
            let block = row / BLOCK;
            let put = |block: usize, which: Range<usize>| {
                for (to, scale) in matrix[block * words..].chunks_exact(WORDS).zip(scales) {
                    to[which.clone()].iter().for_each(|word| word.store(scale.to_bits(), Ordering::Relaxed));
                }
            };
            match place.half {
                None => put(place.first / BLOCK + block, 0..2),
                // Rows of gate and up alternate, eight by eight. So 128 rows of the matrix hold 64 of each.
                Some(half) => [2 * block, 2 * block + 1].into_iter().for_each(|block| put(block, half..half + 1)),
            }
        }
    }

    /// The scales of matrix `number`, once all of its rows were read.
    pub fn scales(&self, number: usize) -> Vec<f32> {
        self.matrices[number].iter().map(|word| f32::from_bits(word.load(Ordering::Relaxed))).collect()
    }
}

/// The FP8 activations of several rows in the decode kernel: codes and scales.
pub(crate) struct StepInputs {
    codes: Buffer<u8>,
    scales: Buffer<f32>,
}

impl StepInputs {
    /// Chunks of the longest input of a GEMM.
    fn chunks(config: &Config) -> usize {
        let most = Activations::sizes(config).into_iter().max().unwrap_or(0);
        most.div_ceil(e4m3::CHUNK_INPUTS as usize)
    }

    /// Bytes that they take for a model of this config.
    pub fn bytes(config: &Config) -> u64 {
        Self::chunks(config) as u64 * u64::from(Inputs::CHUNK_CODES + 4 * Inputs::CHUNK_SCALES)
    }

    /// Allocates the memory for them.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device, config: &Config) -> Result<Self, Error> {
        let chunks = Self::chunks(config);
        Ok(Self {
            codes: device.zeroed(chunks * Inputs::CHUNK_CODES as usize)?,
            scales: device.zeroed(chunks * Inputs::CHUNK_SCALES as usize)?,
        })
    }

    /// The addresses, as the kernel takes them.
    pub fn parts(&self) -> Inputs {
        Inputs { codes: self.codes.ptr_mut(), scales: self.scales.ptr_mut() }
    }
}

/// The codes and scales of rows of activations.
struct RowCodes {
    codes: Buffer<u8>,
    scales: Buffer<f32>,
}

impl RowCodes {
    /// Room for `rows` rows of up to `most` elements.
    fn new(device: &Device, rows: usize, most: usize) -> Result<Self, Error> {
        let groups = e4m3::groups(most as u32) as usize;
        Ok(Self { codes: device.zeroed(rows * most)?, scales: device.zeroed(rows * groups)? })
    }

    fn bytes(rows: usize, most: usize) -> u64 {
        (rows * (most + 4 * e4m3::groups(most as u32) as usize)) as u64
    }
}

/// The activations that GEMMs of e4m3 read, as codes with scales.
pub(crate) struct Activations {
    /// One for each kind of input, since a GEMM writes another kind than it reads. Scales beyond a kind's last group
    /// stay zero.
    kinds: [RowCodes; 3],
    /// The tensor maps of each kind's codes.
    maps: TensorMaps,
    /// Elements of a row, by kind.
    sizes: [usize; 3],
    /// Rows that there is room for, in whole tiles.
    rows: usize,
    layers: usize,
}

impl Activations {
    /// Elements of a row of each kind of input, in the order of [`Input`].
    fn sizes(config: &Config) -> [usize; 3] {
        [config.plan.hidden, config.plan.attention.query_size(), config.plan.activation_size()]
    }

    /// Bytes of memory for passes over up to `rows` rows.
    pub fn bytes(config: &Config, rows: usize) -> u64 {
        let rows = rows.next_multiple_of(TILE_ROWS as usize);
        Self::sizes(config).into_iter().map(|size| RowCodes::bytes(rows, size)).sum()
    }

    /// Allocates the memory for passes over up to `rows` rows.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device, config: &Config, rows: usize) -> Result<Self, Error> {
        let (rows, sizes) = (rows.next_multiple_of(TILE_ROWS as usize), Self::sizes(config));
        let [normed, attended, activation] = sizes.map(|size| RowCodes::new(device, rows, size));
        let kinds = [normed?, attended?, activation?];
        let map = |i: usize| gemm::rows(kinds[i].codes.ptr().cast(), rows, sizes[i] / 2);
        let maps = device.tensor_maps(&[map(0), map(1), map(2)])?;
        Ok(Self { kinds, maps, sizes, rows, layers: config.num_hidden_layers })
    }

    fn of(&self, input: Input) -> CodedRows {
        let RowCodes { codes, scales } = &self.kinds[input as usize];
        CodedRows { codes: codes.ptr_mut(), scales: scales.ptr_mut(), x_rows: self.rows as u32 }
    }

    /// Where attention writes the codes of its output.
    pub fn attended(&self) -> CodedRows {
        self.of(Input::Attended)
    }

    /// Enqueues the kernel that quantises rows `first_row` to `m` of `x` for a layer's GEMM. The elements of `x` are in
    /// the order of [`slot`](gpu_kernels::linear::slot), or in their own order if `in_order`. Nothing is enqueued if an
    /// earlier kernel left the codes already.
    ///
    /// # Safety
    /// As [`Device::launch_early`]. `x` has `m` rows of the GEMM's input.
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn quantize(
        &self,
        device: &Device,
        (layer, gemm): (usize, &plan::Gemm),
        x: Global<bf16>,
        [first_row, m]: [u32; 2],
        in_order: bool,
    ) -> Result<(), Error> {
        debug_assert!(m as usize <= self.rows, "{m} rows, and room for {}", self.rows);
        let k = self.sizes[gemm.input as usize] as u32;
        let params = QuantizeRows { x, to: self.of(gemm.input), first_row, m, k, in_order: in_order.into() };
        let rows = m.saturating_sub(first_row);
        let are_there = match gemm.input {
            // In all layers but the first, the GEMM before leaves the codes. The embedding leaves none.
            Input::Normed => (layer, gemm.matrix) != (0, Matrix::Qkv),
            Input::Attended => false,
            Input::Activation => gemm::leaves_codes(device, rows, k),
        };
        if rows == 0 || are_there {
            return Ok(());
        }
        let blocks = rows.div_ceil(QuantizeRows::ROWS);
        // SAFETY: the caller's word; there is room for `m` rows.
        unsafe { device.launch_early::<quantize_rows>((e4m3::groups(k), blocks), 0, params) }
    }

    /// Enqueues a GEMM over the codes of its input. `p` holds everything but the operands.
    ///
    /// # Safety
    /// As [`gemm::enqueue_e4m3`].
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue(
        &self,
        device: &Device,
        epilogue: Epilogue,
        weights: &E4m3,
        (layer, gemm): (usize, &plan::Gemm),
        p: Gemm,
    ) -> Result<(), Error> {
        let StreamMatrix { stream, base, blocks, n_tiles, .. } = weights.codes.matrix(layer, gemm.matrix);
        let groups = e4m3::groups(gemm.k as u32);
        let x = self.maps.ptr(gemm.input as usize);
        let w_scales = weights.scales_of(gemm.matrix.number(layer));
        let is_last = (layer + 1, gemm.matrix) == (self.layers, Matrix::Down);
        let codes = match epilogue {
            // After the last layer comes the head, which reads bf16.
            Epilogue::Add if !is_last => self.of(Input::Normed),
            Epilogue::SwiGlu if gemm::leaves_codes(device, p.m - p.first_row, p.n) => self.of(Input::Activation),
            _ => CodedRows::default(),
        };
        let CodedRows { scales, x_rows, .. } = self.of(gemm.input);
        let gemm = Gemm { x, stream, base, blocks, n_tiles, codes, k: groups * (GROUP / 2), ..p };
        let scales = gemm_kernels::E4m3 { x_scales: scales.read(), w_scales, x_rows, groups };
        // SAFETY: the caller's word.
        unsafe { gemm::enqueue_e4m3(device, epilogue, GemmE4m3 { gemm, scales }) }
    }
}
