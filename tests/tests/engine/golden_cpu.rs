//! The CPU reference against Hugging Face transformers, both in f32 from the same stored weights.

use host::encode_prompt;
use integration_tests::{format_cases, golden_cases, relative_error};
use model::sampling::argmax;
use model::tokenizer::Around;
use model::{Checkpoint, CpuModel};

/// Both sides round in f32 and differ in the order of sums only. Measured: below 2e-6.
const TOLERANCE: f32 = 1e-5;

#[test]
fn logits_match_transformers() {
    let (cases, formats) = (golden_cases(), format_cases());
    assert_eq!((cases.len(), formats.len()), (6, 9));
    for case in cases.into_iter().chain(formats) {
        let checkpoint = case.open();
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

/// Token ids of texts, with the token that begins one where the model has it, and of a conversation, where the template
/// writes that token.
#[test]
fn prompts_are_those_of_transformers() {
    let mut conversations = 0;
    for case in golden_cases() {
        let checkpoint = Checkpoint::open(&case.dir).unwrap();
        for (text, ids) in &case.texts {
            let found = encode_prompt(&checkpoint.tokenizer, text, Around::Special, 64, 64).unwrap();
            assert_eq!(&found, ids, "{}: {text:?}", case.name);
        }
        if let Some(chat) = &case.chat {
            let text = checkpoint.chat_template.as_ref().unwrap().render(&chat.messages, true, true).unwrap();
            assert_eq!(text, chat.text, "{}", case.name);
            let found = encode_prompt(&checkpoint.tokenizer, &text, Around::Nothing, 64, 64).unwrap();
            assert_eq!(found, chat.ids, "{}", case.name);
            conversations += 1;
        }
    }
    assert_eq!(conversations, 1);
}
