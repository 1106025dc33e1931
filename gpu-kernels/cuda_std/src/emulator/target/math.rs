//! Arithmetic, rounded as the device rounds.

use crate::emulator::e4m3;

/// Flushes subnormals to zero, as `.ftz` does.
fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

macro_rules! unary {
    ($($name:ident |$x:ident| $value:expr;)*) => {
        $(
            pub fn $name($x: f32) -> f32 {
                $value
            }
        )*
    };
}

unary! {
    exp2 |x| flush(flush(x).exp2());
    log2 |x| flush(flush(x).log2());
    rcp |x| flush(flush(x).recip());
    rsqrt |x| flush(flush(x).sqrt().recip());
    sqrt |x| x.sqrt();
    abs |x| x.abs();
}

pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

pub fn fma_bf16x2(a: u32, b: u32, c: u32) -> u32 {
    let half = |at: u32| {
        let wide = |word: u32| f64::from(f32::from_bits(word >> at << 16));
        // The product of two bf16 is exact in f64. The sum and its conversion to f32 are rounded to odd, so that the
        // last rounding gives the same as if it were the only one.
        let (product, c) = (wide(a) * wide(b), wide(c));
        let sum = product + c;
        let of_product = sum - c;
        let rest = (product - of_product) + (c - (sum - of_product));
        let odd = |even: bool, rest: f64, up: bool| {
            if even && rest != 0.0 { if (rest > 0.0) == up { 1 } else { -1 } } else { 0 }
        };
        if !sum.is_finite() {
            return sum as f32;
        }
        let sum =
            f64::from_bits(sum.to_bits().wrapping_add_signed(odd(sum.to_bits().is_multiple_of(2), rest, sum > 0.0)));
        let single = sum as f32;
        let rest = sum - f64::from(single);
        let step = odd(single.to_bits().is_multiple_of(2) && single.is_finite(), rest, sum > 0.0);
        f32::from_bits(single.to_bits().wrapping_add_signed(step as i32))
    };
    pack_bf16(half(0), half(16))
}

pub fn broadcast_halves(word: u32) -> [u32; 2] {
    [word & 0xffff, word >> 16].map(|half| half << 16 | half)
}

pub fn permute(low: u32, high: u32, which: u32) -> u32 {
    let bytes = u64::from(high) << 32 | u64::from(low);
    (0..4).fold(0, |word, i| word | ((bytes >> (8 * (which >> (4 * i) & 7))) as u32 & 0xff) << (8 * i))
}

pub fn pack_e4m3(x: [f32; 4]) -> u32 {
    u32::from_le_bytes(x.map(e4m3::nearest))
}

pub fn pack_bf16(low: f32, high: f32) -> u32 {
    let round = |x: f32| {
        let bits = x.to_bits();
        // Adds half of the last place that stays, less one if that place is even, so that ties go to even.
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        if x.is_nan() { 0x7fff } else { rounded }
    };
    round(high) << 16 | round(low)
}
