//! The product of `m16n8k16`, for the whole warp at once.

use super::collective::Table;

/// Replaces C by C + A B, from the words that the lanes brought: C is words 0 to 3, A is words 4 to 7, B is words 8 and
/// 9.
///
/// The products of two bf16 are exact in f32. They are added to C one after another, in the order of k.
pub fn multiply(table: &mut Table) {
    let low = |word: u32| f32::from_bits(word << 16);
    let high = |word: u32| f32::from_bits(word & 0xffff_0000);
    let (mut a, mut b) = ([[0.0; 16]; 16], [[0.0; 8]; 16]);
    let mut c = [[0.0; 8]; 16];
    for (lane, words) in table.iter().enumerate() {
        let (group, pair) = (lane / 4, lane % 4 * 2);
        for half in 0..2 {
            for row in 0..2 {
                let word = words[4 + half * 2 + row];
                a[group + row * 8][pair + half * 8] = low(word);
                a[group + row * 8][pair + half * 8 + 1] = high(word);
                c[group + row * 8][pair + half] = f32::from_bits(words[row * 2 + half]);
            }
            let word = words[8 + half];
            b[pair + half * 8][group] = low(word);
            b[pair + half * 8 + 1][group] = high(word);
        }
    }
    for (a, c) in a.iter().zip(&mut c) {
        for (a, b) in a.iter().zip(&b) {
            for (c, b) in c.iter_mut().zip(b) {
                *c += a * b;
            }
        }
    }
    for (lane, words) in table.iter_mut().enumerate() {
        let (group, pair) = (lane / 4, lane % 4 * 2);
        for row in 0..2 {
            for column in 0..2 {
                words[row * 2 + column] = c[group + row * 8][pair + column].to_bits();
            }
        }
    }
}
