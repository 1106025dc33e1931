//! The inner loops: dot products in a fixed order, with and without AVX2.
//!
//! A dot product keeps [`LANES`] partial sums. Element `i` goes to partial sum `i % LANES`, in rising order of `i`, and
//! [`tree`] adds up the partial sums. So the order does not depend on how many rows are worked on at once, and a vector
//! unit of any width up to `LANES` can follow it.
//!
//! A closure would not be compiled for the target features of the function around it, so there are only plain inlined
//! functions here.
//!
//! Each loop is written once and inlined into two functions: a plain one, and one compiled for AVX2 and FMA. Which of
//! them runs is decided at start-up. The two round differently (a fused multiply-add rounds once), so results are the
//! same from run to run on one machine, but may differ between machines.

/// Partial sums of a dot product: four 8-lane registers, enough to hide the latency of fused multiply-adds.
pub(super) const LANES: usize = 32;

/// Which instructions the loops may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Simd {
    /// What every machine of this architecture has.
    Portable,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
}

impl Simd {
    /// The best that this machine has.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            return Simd::Avx2;
        }
        Simd::Portable
    }
}

/// Defines `pub(super) fn $name(simd, …)`, which runs `$body::<FUSED>(…)` compiled for the instructions of `simd`.
macro_rules! dispatch {
    ($(#[$doc:meta])* $name:ident = $body:ident ( $($arg:ident : $type:ty),* ) $(-> $ret:ty)?) => {
        $(#[$doc])*
        #[inline]
        pub(super) fn $name(simd: Simd, $($arg: $type),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            fn avx2($($arg: $type),*) $(-> $ret)? {
                $body::<true>($($arg),*)
            }
            match simd {
                // aarch64 always has fused multiply-add, and there it is the faster choice.
                Simd::Portable => $body::<{ cfg!(target_arch = "aarch64") }>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Simd::detect` makes `Avx2` only where both features are there, and nothing else makes it.
                Simd::Avx2 => unsafe { avx2($($arg),*) },
            }
        }
    };
}

dispatch! {
    /// Dot product of two vectors of equal length.
    dot_f32 = dot_f32_body(a: &[f32], b: &[f32]) -> f32
}

dispatch! {
    /// Dot products of `w` with two vectors, each exactly what [`dot_f32`] gives. Not with more: two take eight
    /// accumulator registers and four of weights, which is what sixteen registers hold.
    dot2_f32 = dot2_f32_body(w: &[f32], a: &[f32], b: &[f32]) -> (f32, f32)
}

dispatch! {
    /// Dot product of bf16 bytes with a vector; exactly what [`dot_f32`] gives on the widened bytes.
    dot_bf16 = dot_bf16_body(w: &[u8], x: &[f32]) -> f32
}

dispatch! {
    /// As [`dot_bf16`], of f16 bytes.
    dot_f16 = dot_f16_body(w: &[u8], x: &[f32]) -> f32
}

dispatch! {
    /// As [`dot_bf16`], of f32 bytes at any address.
    dot_f32_bytes = dot_f32_bytes_body(w: &[u8], x: &[f32]) -> f32
}

dispatch! {
    /// Widens bf16 bytes.
    widen_bf16 = widen_bf16_body(w: &[u8], out: &mut [f32])
}

dispatch! {
    /// Widens f16 bytes.
    widen_f16 = widen_f16_body(w: &[u8], out: &mut [f32])
}

dispatch! {
    /// Appends `scale × (q · keys[j])` for each `j` to `scores`; `keys` is `[n, q.len()]`.
    scores = scores_body(q: &[f32], keys: &[f32], scale: f32, scores: &mut Vec<f32>)
}

dispatch! {
    /// `out += weights[j] × rows[j]` for each `j`, from first to last; `rows` is `[weights.len(), out.len()]`.
    add_weighted = add_weighted_body(weights: &[f32], rows: &[f32], out: &mut [f32])
}

/// `a × b + c`, rounded once if `FUSED`, else twice.
#[inline(always)]
fn mul_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Sum of the partial sums: halves added on halves, 32 → 16 → 8 → 4 → 2 → 1.
///
/// Kept out of line: if it is inlined, its access pattern leads the compiler to keep the partial sums of the loop
/// before it in another order than that of the vectors that are loaded.
#[inline(never)]
fn tree(sums: &[f32; LANES]) -> f32 {
    let mut sums = *sums;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

/// Adds the products of a whole chunk to the partial sums; `rest` adds those of a shorter last one.
#[inline(always)]
fn accumulate<const FUSED: bool>(sums: &mut [f32; LANES], a: &[f32; LANES], b: &[f32; LANES]) {
    for i in 0..LANES {
        sums[i] = mul_add::<FUSED>(a[i], b[i], sums[i]);
    }
}

#[inline(always)]
fn dot_f32_body<const FUSED: bool>(a: &[f32], b: &[f32]) -> f32 {
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        accumulate::<FUSED>(&mut sums, a, b);
    }
    rest::<FUSED>(&mut sums, a_rest, b_rest);
    tree(&sums)
}

#[inline(always)]
fn rest<const FUSED: bool>(sums: &mut [f32; LANES], a: &[f32], b: &[f32]) {
    for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
        *sum = mul_add::<FUSED>(a, b, *sum);
    }
}

#[inline(always)]
fn dot2_f32_body<const FUSED: bool>(w: &[f32], a: &[f32], b: &[f32]) -> (f32, f32) {
    let (w_chunks, w_rest) = w.as_chunks::<LANES>();
    let ((a_chunks, a_rest), (b_chunks, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let (mut a_sums, mut b_sums) = ([0.0; LANES], [0.0; LANES]);
    for ((w, a), b) in w_chunks.iter().zip(a_chunks).zip(b_chunks) {
        accumulate::<FUSED>(&mut a_sums, w, a);
        accumulate::<FUSED>(&mut b_sums, w, b);
    }
    rest::<FUSED>(&mut a_sums, w_rest, a_rest);
    rest::<FUSED>(&mut b_sums, w_rest, b_rest);
    (tree(&a_sums), tree(&b_sums))
}

/// Dot product of stored elements of `SIZE` bytes, widened on the way, with a vector.
#[inline(always)]
fn dot_stored<const FUSED: bool, const SIZE: usize>(w: &[u8], x: &[f32], widen: impl Fn([u8; SIZE]) -> f32) -> f32 {
    let (w, _) = w.as_chunks::<SIZE>();
    let (w_chunks, w_rest) = w.as_chunks::<LANES>();
    let (x_chunks, x_rest) = x.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (w, x) in w_chunks.iter().zip(x_chunks) {
        let mut wide = [0.0; LANES];
        for i in 0..LANES {
            wide[i] = widen(w[i]);
        }
        accumulate::<FUSED>(&mut sums, &wide, x);
    }
    for ((sum, &w), &x) in sums.iter_mut().zip(w_rest).zip(x_rest) {
        *sum = mul_add::<FUSED>(widen(w), x, *sum);
    }
    tree(&sums)
}

#[inline(always)]
fn dot_bf16_body<const FUSED: bool>(w: &[u8], x: &[f32]) -> f32 {
    dot_stored::<FUSED, 2>(w, x, bf16_to_f32)
}

#[inline(always)]
fn dot_f16_body<const FUSED: bool>(w: &[u8], x: &[f32]) -> f32 {
    dot_stored::<FUSED, 2>(w, x, f16_to_f32)
}

#[inline(always)]
fn dot_f32_bytes_body<const FUSED: bool>(w: &[u8], x: &[f32]) -> f32 {
    dot_stored::<FUSED, 4>(w, x, f32::from_le_bytes)
}

#[inline(always)]
fn widen_bf16_body<const FUSED: bool>(w: &[u8], out: &mut [f32]) {
    for (out, &w) in out.iter_mut().zip(w.as_chunks::<2>().0) {
        *out = bf16_to_f32(w);
    }
}

#[inline(always)]
fn widen_f16_body<const FUSED: bool>(w: &[u8], out: &mut [f32]) {
    for (out, &w) in out.iter_mut().zip(w.as_chunks::<2>().0) {
        *out = f16_to_f32(w);
    }
}

#[inline(always)]
fn bf16_to_f32(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Exact for every f16, in steps that vectorise. The bits, moved into place, make a float 2^112 times too small, which
/// the multiplication corrects.
#[inline(always)]
fn f16_to_f32(bytes: [u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(bytes));
    let scaled = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    // An exponent of all ones means infinity or NaN. Moved and scaled, it would become a mere 65,536 or more.
    let special = if bits & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(scaled.to_bits() | special | (bits & 0x8000) << 16)
}

#[inline(always)]
fn scores_body<const FUSED: bool>(q: &[f32], keys: &[f32], scale: f32, scores: &mut Vec<f32>) {
    for key in keys.chunks_exact(q.len()) {
        scores.push(dot_f32_body::<FUSED>(q, key) * scale);
    }
}

#[inline(always)]
fn add_weighted_body<const FUSED: bool>(weights: &[f32], rows: &[f32], out: &mut [f32]) {
    for (&weight, row) in weights.iter().zip(rows.chunks_exact(out.len())) {
        for (out, &x) in out.iter_mut().zip(row) {
            *out = mul_add::<FUSED>(weight, x, *out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kinds() -> Vec<Simd> {
        let mut kinds = vec![Simd::Portable, Simd::detect()];
        kinds.dedup();
        kinds
    }

    #[test]
    fn every_f16_widens_as_the_crate_half_widens_it() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits.to_le_bytes()), half::f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan()), "{bits:#06x}");
        }
    }

    proptest! {
        #[test]
        fn every_way_to_a_dot_product_gives_the_same_bits(
            elements in prop::collection::vec((any::<u16>(), -2f32..2.0, -2f32..2.0), 0..200),
        ) {
            // Finite bf16 and f16: the exponent's top bit is clear.
            let w: Vec<u8> = elements.iter().flat_map(|e| (e.0 & 0xbfff).to_le_bytes()).collect();
            let (a, b): (Vec<f32>, Vec<f32>) = elements.iter().map(|e| (e.1, e.2)).unzip();
            for simd in kinds() {
                let mut wide = vec![0.0; a.len()];
                widen_bf16(simd, &w, &mut wide);
                let expected = dot_f32(simd, &wide, &a);
                prop_assert_eq!(dot_bf16(simd, &w, &a).to_bits(), expected.to_bits());
                prop_assert_eq!(dot2_f32(simd, &wide, &a, &b).0.to_bits(), expected.to_bits());
                prop_assert_eq!(dot2_f32(simd, &wide, &b, &a).1.to_bits(), expected.to_bits());
                let bytes: Vec<u8> = wide.iter().flat_map(|x| x.to_le_bytes()).collect();
                // Also at an odd address.
                let shifted = [&[0], bytes.as_slice()].concat();
                prop_assert_eq!(dot_f32_bytes(simd, &shifted[1..], &a).to_bits(), expected.to_bits());
                widen_f16(simd, &w, &mut wide);
                prop_assert_eq!(dot_f16(simd, &w, &a).to_bits(), dot_f32(simd, &wide, &a).to_bits());

                let exact: f64 = wide.iter().zip(&a).map(|(w, a)| *w as f64 * *a as f64).sum();
                let size: f64 = wide.iter().zip(&a).map(|(w, a)| (*w as f64 * *a as f64).abs()).sum();
                prop_assert!((dot_f32(simd, &wide, &a) as f64 - exact).abs() <= 1e-6 * size);
            }
        }
    }
}
