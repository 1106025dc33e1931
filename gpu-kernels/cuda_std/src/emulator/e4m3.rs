//! Numbers of a byte: a sign, four bits of exponent, three of mantissa, no infinities (OCP 8-bit floating point).

/// The greatest.
const LARGEST: f32 = 448.0;

/// What a code means.
pub fn value(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if code < 128 { magnitude } else { -magnitude }
}

/// The code of the nearest number, of two the even one; beyond the greatest its code.
pub fn nearest(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let magnitude = x.abs().min(LARGEST);
    // A step of the numbers around it.
    let exponent = (magnitude.to_bits() >> 23) as i32 - 127;
    let step = 2f32.powi(exponent.max(-6) - 3);
    let rounded = (magnitude / step).round_ties_even() * step;
    // Codes are in the order of their numbers.
    let code = (0..0x7f).find(|&code| value(code) == rounded).expect("a whole number of steps");
    code | if x.is_sign_negative() { 0x80 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::{nearest, value};

    #[test]
    fn every_number_has_its_code_and_halves_go_to_even_ones() {
        for code in (0..0x7f).chain(0x80..0xff) {
            assert_eq!(nearest(value(code)), code);
        }
        for code in 0..0x7e {
            let [low, high] = [code, code + 1].map(value);
            let even = if code % 2 == 0 { low } else { high };
            assert_eq!(value(nearest((low + high) / 2.0)), even, "between {low} and {high}");
        }
        assert_eq!([460.0, -1e9, f32::INFINITY].map(nearest).map(value), [448.0, -448.0, 448.0]);
    }
}
