//! Random device memory that the host knows too.

use half::bf16;

use super::BenchError;
use crate::device::{Buffer, Device};

/// Elements of the pattern: 32 MiB of it.
const PATTERN: usize = 16 << 20;

/// Device memory filled with random numbers between −1 and 1: a pattern, over and over, so that the host can say what is at any
/// place and keeps little of it.
pub struct Pool {
    buffer: Buffer<bf16>,
    pattern: Vec<bf16>,
}

impl Pool {
    /// `len` elements.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn new(device: &Device, len: usize) -> Result<Self, BenchError> {
        let pattern = random(len.min(PATTERN), 1);
        let mut buffer = device.zeroed(len)?;
        buffer.repeat(&pattern, 0)?;
        Ok(Self { buffer, pattern })
    }

    /// The device's memory.
    pub fn buffer(&self) -> &Buffer<bf16> {
        &self.buffer
    }

    /// Element `i`.
    pub fn at(&self, i: usize) -> f64 {
        self.pattern[i % PATTERN].to_f64()
    }

    /// All of it, in words of 32 bits, exclusive-ored. The length is even.
    pub fn exclusive_or(&self) -> u32 {
        let words = |elements: &[bf16]| {
            elements
                .as_chunks::<2>()
                .0
                .iter()
                .fold(0, |sum, [low, high]| sum ^ (u32::from(high.to_bits()) << 16 | u32::from(low.to_bits())))
        };
        let (whole, rest) = (self.buffer.len() / PATTERN, self.buffer.len() % PATTERN);
        // Twice the same leaves nothing.
        (if whole % 2 == 1 { words(&self.pattern) } else { 0 }) ^ words(&self.pattern[..rest])
    }

    /// The elements from `start` on.
    pub fn from(&self, start: usize) -> impl Iterator<Item = f64> + '_ {
        (start..).map(|i| self.at(i))
    }
}

/// Numbers that follow from a seed (splitmix64): fast, and without a pattern that a memory system would like.
pub(super) struct Random(pub u64);

impl Random {
    /// The next, of 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let bits = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(end)) >> 64) as u64
    }
}

/// `len` random numbers between −1 and 1.
pub(super) fn random(len: usize, seed: u64) -> Vec<bf16> {
    let mut random = Random(seed << 40);
    (0..len).map(|_| bf16::from_f32((random.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_knows_what_the_device_has() {
        let pool = Pool::new(&Device::emulator(0), 1000).unwrap();
        let mut data = vec![bf16::ZERO; 1000];
        pool.buffer().read(0, &mut data).unwrap();
        assert!(data.iter().zip(pool.from(0)).all(|(a, b)| a.to_f64() == b));
        let mean: f64 = pool.from(0).take(1000).sum::<f64>() / 1000.0;
        assert!(mean.abs() < 0.1, "{mean}");
        assert!(pool.from(0).take(1000).all(|v| (-1.0..=1.0).contains(&v)));
    }
}
