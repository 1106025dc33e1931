//! Random device memory whose content the host knows.

use half::bf16;

use host::device::{Buffer, Device};

use crate::BenchError;
use crate::random::random;

/// Elements of the pattern: 32 MiB of it.
const PATTERN: usize = 16 << 20;

/// Device memory filled with random numbers between −1 and 1. It repeats one pattern, so that the host can say what is
/// at any place without keeping all of it.
pub struct Pool {
    buffer: Buffer<bf16>,
    pattern: Vec<bf16>,
}

impl Pool {
    /// A pool of `len` elements.
    ///
    /// # Errors
    /// If there is too little memory, or the driver fails.
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

    /// The exclusive or of all 32-bit words. The length must be even.
    pub fn exclusive_or(&self) -> u32 {
        let words = |elements: &[bf16]| {
            elements
                .as_chunks::<2>()
                .0
                .iter()
                .fold(0, |sum, [low, high]| sum ^ (u32::from(high.to_bits()) << 16 | u32::from(low.to_bits())))
        };
        let (whole, rest) = (self.buffer.len() / PATTERN, self.buffer.len() % PATTERN);
        // Patterns cancel out in pairs.
        (if whole % 2 == 1 { words(&self.pattern) } else { 0 }) ^ words(&self.pattern[..rest])
    }

    /// The elements from `start` on, without end.
    pub fn from(&self, start: usize) -> impl Iterator<Item = f64> + '_ {
        (start..).map(|i| self.at(i))
    }
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
