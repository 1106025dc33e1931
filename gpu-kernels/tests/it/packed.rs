//! Packing pages and unpacking them gives the same bits back, whatever they are.

use crate::common::{Random, run};
use cuda_std::bf16;
use cuda_std::emulator::Buffer;
use gpu_kernels::kv;
use gpu_kernels::packed::{self, Form, PACKED_BYTES, PackPages};
use proptest::prelude::*;

const HEADS: usize = 2;
const LAYERS: usize = 2;
const PAGES: usize = 3;
/// Elements of a page's keys for one head; its values have as many.
const KIND: usize = kv::page_elements(1) / 2;

/// The blocks of all layers: keys and values of each page and head. `kind` makes the bits of each element.
fn blocks(random: &mut Random, kind: impl Fn(&mut Random, usize) -> u16) -> Vec<bf16> {
    (0..LAYERS * PAGES * HEADS * 2 * KIND).map(|i| bf16::from_bits(kind(random, i))).collect()
}

/// Packs pages 0 and 2, and unpacks them again. Says for each of their blocks whether it was packed.
fn check(elements: &[bf16], seed: u64) -> Vec<bool> {
    let memory = Buffer::from_slice(elements);
    let forms = Buffer::<u32>::new_poisoned(LAYERS * PAGES * HEADS);
    let list = Buffer::from_slice(&[2u32, 0]);
    let pages =
        PackPages { list: list.ptr(), pages: memory.ptr_mut(), forms: forms.ptr_mut(), page_count: PAGES as u32 };
    let grid = [HEADS as u32, LAYERS as u32, 2];
    run::<packed::pack_pages>(grid, PackPages::SHARED_BYTES, seed, pages);
    let bits = |elements: &[bf16]| elements.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let (before, packed) = (bits(elements), bits(&memory.to_vec()));
    let forms = forms.to_vec();
    let mut were_packed = Vec::new();
    for layer in 0..LAYERS {
        for block in 0..PAGES * HEADS {
            let at = (layer * PAGES * HEADS + block) * 2 * KIND;
            let same = |range: std::ops::Range<usize>| before[at..][range.clone()] == packed[at..][range];
            if block / HEADS == 1 {
                assert!(same(0..2 * KIND), "a page that was not named");
                continue;
            }
            let is_packed = Form(forms[layer * PAGES * HEADS + block]).is_packed();
            assert!(is_packed || same(0..2 * KIND), "what could not be packed stays");
            // The packed form leaves the rest of a block as it was.
            let rest = PACKED_BYTES as usize / 2..KIND;
            assert!(same(rest.clone()) && same(KIND + rest.start..KIND + rest.end));
            were_packed.push(is_packed);
        }
    }
    run::<packed::unpack_pages>(grid, PackPages::SHARED_BYTES, seed + 1, pages);
    assert!(before == bits(&memory.to_vec()));
    were_packed
}

#[test]
fn elements_of_a_model_are_packed() {
    let mut random = Random::new(3);
    // Sums of several numbers, with very different scales from block to block.
    let elements = blocks(&mut random, |random, i| {
        let sum: f32 = (0..6).map(|_| random.uniform()).sum();
        bf16::from_f32(sum * 2f32.powi((i / KIND % 7) as i32 * 15 - 60)).to_bits()
    });
    assert!(check(&elements, 1).into_iter().all(|packed| packed));
}

#[test]
fn zeros_and_what_is_no_number_come_back_too() {
    let mut random = Random::new(4);
    // First nothing but zeros of both signs and the smallest subnormals; then the largest numbers, infinities and NaN.
    let small = blocks(&mut random, |random, _| (random.below(2) << 15 | random.below(64)) as u16);
    let large = blocks(&mut random, |random, _| (random.below(2) << 15 | 0x7f00 | random.below(256)) as u16);
    assert!(check(&small, 2).into_iter().all(|packed| packed));
    assert!(check(&large, 3).into_iter().all(|packed| packed));
}

/// In one block, one element of the keys or of the values lies more than 15 steps of the exponent's upper bits below
/// the largest.
#[test]
fn what_spans_too_much_stays() {
    let mut random = Random::new(5);
    for (span, fits) in [(31, true), (32, false)] {
        for kind in 0..2 {
            // With an odd exponent, 31 below is still only 15 steps of the upper bits below.
            let (largest, smallest) = (0x80u16 * 201, 0x80u16 * (201 - span));
            let mut elements = blocks(&mut random, |_, _| largest);
            let at = (2 * HEADS + 1) * 2 * KIND + kind * KIND + random.below(KIND);
            elements[at] = bf16::from_bits(smallest);
            let packed = check(&elements, 7);
            assert_eq!(packed.iter().filter(|packed| !**packed).count(), usize::from(!fits), "{span} in {kind}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn any_bits_come_back(seed: u64, span in 1u32..80, base in 0u32..255) {
        let mut random = Random::new(seed);
        let elements = blocks(&mut random, |random, _| {
            let exponent = (base + random.below(span as usize) as u32).min(255);
            ((random.below(2) as u32) << 15 | exponent << 7 | random.below(128) as u32) as u16
        });
        check(&elements, seed);
    }
}
