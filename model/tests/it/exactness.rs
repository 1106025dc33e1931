//! The logits of a token depend on its own history alone.

use std::sync::LazyLock;

use model::{CpuModel, KvCache, KvPages, Row};
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
    fn pages_and_company_change_no_bit(
        sequences in prop::collection::vec(prop::collection::vec(0..VOCAB as u32, 1..70), 1..5),
        page_tokens in 1..20usize,
        chunks in prop::collection::vec(1..30usize, 1..8),
        seed in any::<u64>(),
    ) {
        let model = &MODELS[0];
        let pages_of = |tokens: &Vec<u32>| tokens.len().div_ceil(page_tokens);
        let total: usize = sequences.iter().map(pages_of).sum();
        let mut pages = KvPages::new(model.config(), total, page_tokens);
        // Pages are dealt out in a random order.
        let mut order: Vec<u32> = (0..total as u32).collect();
        order.sort_by_key(|&page| model::sampling::random(seed, page as u64));
        let mut order = order.into_iter();
        let tables: Vec<Vec<u32>> = sequences.iter().map(|s| order.by_ref().take(pages_of(s)).collect()).collect();

        let mut found = vec![Vec::new(); sequences.len()];
        let mut done = vec![0; sequences.len()];
        for chunk in chunks.iter().cycle() {
            let mut rows = Vec::new();
            let mut owners = Vec::new();
            for (s, tokens) in sequences.iter().enumerate() {
                let from = done[s];
                let to = tokens.len().min(from + chunk + s);
                done[s] = to;
                for (position, &token) in tokens.iter().enumerate().take(to).skip(from) {
                    rows.push(Row { token, position, pages: &tables[s], logits: true });
                    owners.push(s);
                }
            }
            if rows.is_empty() {
                break;
            }
            let mut logits = vec![f32::NAN; rows.len() * VOCAB];
            model.forward_rows(&rows, &mut pages, &mut logits, None).unwrap();
            for (s, row) in owners.iter().zip(logits.chunks_exact(VOCAB)) {
                found[*s].extend(row.iter().map(|l| l.to_bits()));
            }
        }
        for (tokens, found) in sequences.iter().zip(&found) {
            prop_assert!(*found == run(model, tokens, &mut model.new_cache(tokens.len())), "in pages, in company, it differs");
        }
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
