//! The logits of a token depend on its own history alone.

use std::sync::LazyLock;

use model::{CpuModel, KvCache};
use proptest::prelude::*;

use crate::fixture::{DTYPES, Fixture};

static MODELS: LazyLock<Vec<CpuModel>> =
    LazyLock::new(|| DTYPES.iter().map(|d| CpuModel::new(&Fixture::new(d, *d == "F16").open()).unwrap()).collect());

const VOCAB: usize = 270;
const CAPACITY: usize = 160;

fn run(model: &CpuModel, tokens: &[u32], cache: &mut KvCache) -> Vec<u32> {
    let mut logits = vec![f32::NAN; tokens.len() * VOCAB];
    model.forward(tokens, cache, tokens.len(), &mut logits).unwrap();
    logits.iter().map(|l| l.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..Default::default() })]

    #[test]
    fn chunks_and_threads_change_no_bit(
        which in 0..3usize,
        tokens in prop::collection::vec(0..VOCAB as u32, 1..140),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        threads in 1..4usize,
    ) {
        let model = &MODELS[which];
        let together = run(model, &tokens, &mut model.new_cache(tokens.len()));
        prop_assert!(together.iter().all(|l| f32::from_bits(*l).is_finite()));

        let mut cache = model.new_cache(CAPACITY);
        let one_by_one: Vec<u32> = tokens.iter().flat_map(|&t| run(model, &[t], &mut cache)).collect();
        prop_assert!(together == one_by_one, "one by one differs");

        let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(tokens.len())).chain([0, tokens.len()]).collect();
        cuts.sort_unstable();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut cache = model.new_cache(CAPACITY);
        let in_chunks: Vec<u32> =
            pool.install(|| cuts.windows(2).flat_map(|w| run(model, &tokens[w[0]..w[1]], &mut cache)).collect());
        prop_assert!(together == in_chunks, "chunks differ");
    }

    #[test]
    fn rejected_drafts_leave_no_trace(
        which in 0..3usize,
        tokens in prop::collection::vec(0..VOCAB as u32, 2..40),
        drafts in prop::collection::vec(0..VOCAB as u32, 1..16),
    ) {
        let model = &MODELS[which];
        let (last, first) = tokens.split_last().unwrap();
        let mut plain = model.new_cache(CAPACITY);
        run(model, first, &mut plain);
        let mut drafted = plain.clone();
        run(model, &drafts, &mut drafted);
        drafted.truncate(first.len());
        prop_assert_eq!(drafted.len(), plain.len());
        prop_assert_eq!(run(model, &[*last], &mut plain), run(model, &[*last], &mut drafted));
    }

    #[test]
    fn asking_for_fewer_logits_gives_the_last_ones(tokens in prop::collection::vec(0..VOCAB as u32, 1..150), rows in any::<prop::sample::Index>()) {
        let model = &MODELS[0];
        let rows = rows.index(tokens.len() + 1);
        let all = run(model, &tokens, &mut model.new_cache(CAPACITY));
        let mut some = vec![f32::NAN; rows * VOCAB];
        model.forward(&tokens, &mut model.new_cache(CAPACITY), rows, &mut some).unwrap();
        let some: Vec<u32> = some.iter().map(|l| l.to_bits()).collect();
        prop_assert!(all[(tokens.len() - rows) * VOCAB..] == some[..]);
    }
}
