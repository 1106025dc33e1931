//! Forward passes that are small enough for Miri (docs/reference/toolchain.md#miri).

use model::{Checkpoint, CpuModel, KvPages, OpenOptions, Row, WeightsMode};

use crate::fixture::{DTYPES, Fixture, SMALL};

/// Logits after the last of these tokens, run one by one.
fn steps(model: &CpuModel, tokens: &[u32]) -> Vec<f32> {
    let mut cache = model.new_cache(tokens.len());
    let mut logits = vec![f32::NAN; SMALL.vocab];
    for &token in tokens {
        model.forward(&[token], &mut cache, 1, &mut logits).unwrap();
    }
    logits
}

/// Two sequences in one call, with their pages interleaved, and each by itself in steps. The weights are read from a
/// file, and rounded or not.
#[test]
fn neither_company_nor_steps_change_a_bit() {
    // Under Miri each format takes two minutes.
    let dtypes = if cfg!(miri) { &DTYPES[..1] } else { &DTYPES };
    let check = || {
        for dtype in dtypes {
            let dir = Fixture::of(dtype, false, SMALL).write();
            let found = [WeightsMode::Plain, WeightsMode::Fp8, WeightsMode::Int4].map(|weights| {
                let options = OpenOptions { weights, ..OpenOptions::default() };
                let model = CpuModel::new(&Checkpoint::open_with(dir.path(), options).unwrap()).unwrap();
                let mut pages = KvPages::new(model.config(), 3, 1);
                let row = |token, position, pages, logits| Row { token, position, pages, logits };
                let rows = [row(3, 0, &[2, 0][..], false), row(9, 0, &[1], true), row(15, 1, &[2, 0], true)];
                let mut logits = vec![f32::NAN; 2 * SMALL.vocab];
                model.forward_rows(&rows, &mut pages, &mut logits, None).unwrap();
                assert_eq!(logits, [steps(&model, &[9]), steps(&model, &[3, 15])].concat(), "{dtype}, {weights}");
                logits
            });
            assert!(found[0] != found[1] && found[1] != found[2] && found[0] != found[2], "{dtype}");
        }
    };
    // Miri reports one processor, so rayon would use only one thread.
    rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap().install(check);
}
