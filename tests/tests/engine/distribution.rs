//! Sampled output has the model's distribution with drafting on: chi-square tests, with fixed seeds.

use host::{DeviceChoice, NgramDraft};
use integration_tests::distribution::{Answers, check_demo};
use integration_tests::{demo, engine, golden_cases};
use model::{Checkpoint, Sampling};

#[test]
fn of_the_demo_model_on_the_cpu() {
    check_demo(&mut engine(&demo(), DeviceChoice::Cpu, 128), 300).unwrap();
}

#[test]
fn of_a_small_model_on_the_gpu_path() {
    let case = golden_cases().remove(0);
    let checkpoint = Checkpoint::open(&case.dir).unwrap();
    let mut engine = engine(&checkpoint, DeviceChoice::Emulator, 256);
    // Most tokens are in the prompt, so that there is nearly always something to propose.
    let prompt: Vec<u32> = (0..190).collect();
    let draft = NgramDraft { tokens: 3, max: 3, min: 1, adaptive: false };
    let sampling = Sampling { temperature: 0.2, top_k: 3, ..Sampling::default() };
    let answers = Answers::new(&mut engine, &prompt, sampling, Some(draft), 60);
    answers.check(&mut engine).unwrap();
    assert!(answers.drafts.0 > 24, "{:?}", answers.drafts);
}
