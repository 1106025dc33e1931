//! The CPU reference against Hugging Face transformers, both in f32 from the same stored weights.

use integration_tests::{golden_cases, relative_error};
use model::sampling::argmax;
use model::{Checkpoint, CpuModel};

/// Both sides round in f32 and differ in the order of sums only. Measured: below 2e-6.
const TOLERANCE: f32 = 1e-5;

#[test]
fn logits_match_transformers() {
    let cases = golden_cases();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let checkpoint = Checkpoint::open(&case.dir).unwrap();
        let model = CpuModel::new(&checkpoint).unwrap();
        let mut cache = model.new_cache(case.prompt.len());
        let mut logits = vec![f32::NAN; case.logits.len()];
        model.forward(&case.prompt, &mut cache, case.prompt.len(), &mut logits).unwrap();
        for (row, (found, expected)) in logits.chunks(case.vocab).zip(case.logits.chunks(case.vocab)).enumerate() {
            let error = relative_error(found, expected);
            println!("{} row {row}: {error:.1e}", case.name);
            assert!(error < TOLERANCE, "{} row {row}: {error:.1e}", case.name);
            assert_eq!(argmax(found), argmax(expected), "{} row {row}", case.name);
        }
    }
}
