//! FP8 as weights use it: a sign, four bits of exponent (bias 7), three of mantissa, no infinities. `0x7f` and `0xff`
//! are NaN; the largest number is 448.

/// The largest number.
pub const LARGEST: f32 = 448.0;

/// The number that each code stands for.
pub static VALUES: [f32; 256] = values();

const fn values() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = (code >> 3 & 15, (code & 7) as f32);
        // Numbers below 2^-6 are subnormal: they have no leading one.
        let (steps, exponent) = if exponent == 0 { (mantissa, 1) } else { (8.0 + mantissa, exponent) };
        // A step is 2^(exponent - 10).
        let step = f32::from_bits((127 + exponent as u32 - 10) << 23);
        let value = if is_nan(code as u8) { f32::NAN } else { steps * step };
        values[code] = if code < 128 { value } else { -value };
        code += 1;
    }
    values
}

/// The number that a code stands for, in steps that vectorise. As [`VALUES`], except for NaN.
#[inline(always)]
pub fn value(code: u8) -> f32 {
    let bits = u32::from(code & 0x7f) << 20;
    let normal = f32::from_bits(bits + (120 << 23));
    // Subnormals have no leading one: the exponent brings one in, and the subtraction takes it away again.
    let small = f32::from_bits(bits + (121 << 23)) - f32::from_bits(121 << 23);
    let magnitude = if bits < 8 << 20 { small } else { normal };
    f32::from_bits(magnitude.to_bits() | u32::from(code & 0x80) << 24)
}

/// Whether a code is NaN.
#[inline]
pub const fn is_nan(code: u8) -> bool {
    code & 0x7f == 0x7f
}

/// The code of the number nearest to `x`: of two equally near, the even code; beyond the largest number, the code of
/// that. `x` must not be NaN.
#[inline]
pub fn nearest(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let magnitude = x.abs().min(LARGEST);
    // From 2^-6 on, the code is a part of the float's bits, rounded to three bits of mantissa, with another bias.
    let bits = magnitude.to_bits();
    let normal = ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    // Below 2^-6, the code counts steps of 2^-9. Adding 2^23 rounds to whole steps.
    let steps = (magnitude * 512.0 + 8_388_608.0).to_bits() & 0xff;
    let code = if magnitude < 1.0 / 64.0 { steps } else { normal };
    sign | code as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_values_are_those_of_the_format() {
        for (code, value) in [(0, 0.0), (1, 1.0 / 512.0), (7, 7.0 / 512.0), (8, 1.0 / 64.0), (0x38, 1.0), (0x3c, 1.5)] {
            assert_eq!(VALUES[code], value);
            assert_eq!(VALUES[code + 128], -value);
        }
        assert_eq!(VALUES[0x7e], LARGEST);
        let finite = (0..=255).filter(|&code| !is_nan(code));
        assert!(finite.into_iter().all(|code| value(code).to_bits() == VALUES[code as usize].to_bits()));
        assert!(VALUES[0x7f].is_nan() && VALUES[0xff].is_nan());
    }

    #[test]
    fn the_nearest_code_is_the_nearest() {
        let finite: Vec<u8> = (0..=255).filter(|&code| !is_nan(code)).collect();
        for &code in &finite {
            assert_eq!(nearest(VALUES[code as usize]), code, "{code:#x}");
        }
        // Between neighbours: just below the middle, the middle (to the even code), just above.
        for code in 0..0x7e_u8 {
            let (low, high) = (VALUES[code as usize], VALUES[code as usize + 1]);
            let middle = (low + high) / 2.0;
            assert_eq!(nearest(middle.next_down()), code);
            assert_eq!(nearest(middle.next_up()), code + 1);
            assert_eq!(nearest(middle), code + (code & 1), "between {low} and {high}");
            assert_eq!(nearest(-middle), 128 + code + (code & 1));
        }
        assert_eq!((nearest(1e30), nearest(-460.0)), (0x7e, 0xfe));
    }
}
