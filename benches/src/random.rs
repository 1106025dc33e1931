//! Random data, the same for the same seed.

use half::bf16;

/// Numbers that follow from a seed (splitmix64): fast, and without a pattern that a memory system could exploit.
pub struct Random(pub u64);

impl Random {
    /// The next number, of 64 bits.
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

    /// True once in `n` times.
    pub fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// One of `choices`.
    ///
    /// # Panics
    /// If there is none.
    pub fn of<C: Copy>(&mut self, choices: &[C]) -> C {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// `len` random numbers between −1 and 1.
pub fn random(len: usize, seed: u64) -> Vec<bf16> {
    let mut random = Random(seed << 40);
    (0..len).map(|_| bf16::from_f32((random.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0)).collect()
}
