//! Numbers in e4m3, one byte each: a sign, four bits of exponent, three of mantissa, no infinities (OCP 8-bit floating
//! point).

/// The largest number.
const LARGEST: f32 = 448.0;

/// The value of each code.
static VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = (code as u32 >> 3 & 15, code as u32 & 7);
        let magnitude = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa as f32 / 512.0,
            _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
        };
        values[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    values
};

/// The value of a code.
pub fn value(code: u8) -> f32 {
    VALUES[usize::from(code)]
}

/// The code of the number nearest to `x`; of two equally near ones the even code. Beyond the largest number it is that
/// number's code.
pub fn nearest(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let magnitude = x.abs().min(LARGEST);
    // Numbers of one exponent are 2^(exponent - 3) apart; those below 2^-6 are as far apart as those just above. Codes
    // are in the order of their numbers, eight for each exponent.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
    let steps = (magnitude * f32::from_bits(((130 - exponent) as u32) << 23)).round_ties_even() as i32;
    let code = (exponent + 6) * 8 + steps;
    code as u8 | if x.is_sign_negative() { 0x80 } else { 0 }
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
