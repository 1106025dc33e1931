//! The tokenizer and its streaming detokeniser.

use model::tokenizer::{Around, Encoded};
use model::{Checkpoint, Tokenizer};
use proptest::prelude::*;

use crate::fixture::{Fixture, tokenizer_json};

fn tokenizer() -> Tokenizer {
    Tokenizer::parse(tokenizer_json().to_string().as_bytes(), "tokenizer.json".as_ref()).unwrap()
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut stream = tokenizer.stream();
    let mut text: String = ids.iter().filter_map(|&id| stream.push(id)).collect();
    text.extend(stream.flush());
    assert_eq!(stream.flush(), None);
    text
}

#[test]
fn control_tokens_are_ids_and_are_left_out_of_text() {
    let t = tokenizer();
    let ids = t.encode("<|im_start|>user\nthe<|im_end|>").unwrap();
    assert_eq!((ids[0], ids[ids.len() - 1]), (266, 267));
    assert_eq!(t.decode(&ids), "user\nthe");
    assert_eq!(t.decode_with_special(&ids), "<|im_start|>user\nthe<|im_end|>");
    assert_eq!(t.decode(&t.encode("<think>\n").unwrap()), "<think>\n");
    assert!(t.is_special(267) && !t.is_special(268) && !t.is_special(u32::MAX));
    assert_eq!((t.token_to_id("<|im_end|>"), t.token_to_id("none"), t.vocab_size()), (Some(267), None, 270));
}

/// Dropout is for training: it would make different tokens of a text each time.
#[test]
fn dropout_is_switched_off() {
    let mut json = tokenizer_json();
    let text = "the inner thé the theater in the air";
    let expected = tokenizer().encode(text).unwrap();
    json["model"]["dropout"] = 0.9.into();
    let t = Tokenizer::parse(json.to_string().as_bytes(), "tokenizer.json".as_ref()).unwrap();
    for _ in 0..8 {
        assert_eq!(t.encode(text).unwrap(), expected);
    }
}

#[test]
fn a_character_over_several_tokens_comes_whole() {
    let t = tokenizer();
    let ids = t.encode("a🦀é").unwrap();
    let mut stream = t.stream();
    let pieces: Vec<_> = ids.iter().map(|&id| stream.push(id)).collect();
    // The crab is four bytes in three tokens, the last two of which are single bytes.
    assert_eq!(pieces, [Some("a".into()), None, None, Some("🦀".into()), Some("é".into())]);
}

#[test]
fn an_unfinished_character_comes_at_the_end_as_a_replacement() {
    let t = tokenizer();
    let ids = t.encode("🦀").unwrap();
    assert_eq!(streamed(&t, &ids[..ids.len() - 1]), "\u{fffd}");
    assert_eq!(streamed(&t, &[ids[0], ids[0], 0]), "\u{fffd}\u{fffd}!");
    // An id beyond the vocabulary gives no text.
    assert_eq!(streamed(&t, &[0, 9999, 0]), "!!");
}

proptest! {
    /// Random ids split characters everywhere, and are often not UTF-8 at all.
    #[test]
    fn stream_equals_decode_and_the_library(ids in prop::collection::vec(0..272u32, 0..60)) {
        let t = tokenizer();
        let library: tokenizers::Tokenizer = tokenizer_json().to_string().parse().unwrap();
        prop_assert_eq!(streamed(&t, &ids), t.decode(&ids));
        prop_assert_eq!(t.decode(&ids), library.decode(&ids, true).unwrap());
        prop_assert_eq!(t.decode_with_special(&ids), library.decode(&ids, false).unwrap());
    }

    /// No piece ends inside a character: the text so far is always a prefix of the final text.
    #[test]
    fn text_comes_back_and_grows_by_whole_characters(text in "\\PC{0,40}|(<think>|é|🦀|€|the )*") {
        let t = tokenizer();
        let ids = t.encode(&text).unwrap();
        prop_assert_eq!(&t.decode(&ids), &text);
        let mut stream = t.stream();
        let mut so_far = String::new();
        for id in ids {
            so_far.extend(stream.push(id));
            prop_assert!(text.starts_with(&so_far));
        }
        prop_assert_eq!(stream.flush(), None);
        prop_assert_eq!(so_far, text);
    }
}

#[cfg(feature = "bundled-demo")]
#[test]
fn the_demos_tokenizer_agrees_with_the_library() {
    let t = Checkpoint::demo().unwrap().tokenizer;
    let json = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/tokenizer.json")).unwrap();
    let library = tokenizers::Tokenizer::from_bytes(json).unwrap();
    for id in 0..t.vocab_size() as u32 + 3 {
        assert_eq!(t.decode(&[id]), library.decode(&[id], true).unwrap(), "{id}");
        assert_eq!(t.decode_with_special(&[id]), library.decode(&[id], false).unwrap(), "{id}");
    }
}

#[test]
fn a_checkpoint_shares_its_tokenizer() {
    let checkpoint: Checkpoint = Fixture::new("F32", true).open();
    assert_eq!(checkpoint.clone().tokenizer.encode("the").unwrap(), checkpoint.tokenizer.encode("the").unwrap());
}

/// A limit never changes the tokens, and no text within it is refused.
#[test]
fn a_limit_refuses_what_is_longer_and_nothing_else() {
    let words = "the int a\u{301} é 🦀, 日本\n  ".repeat(100);
    let long = |text: &str| text.repeat((600 << 10) / text.len());
    for t in [tokenizer(), Checkpoint::demo().unwrap().tokenizer] {
        for text in [&words, &long("word "), &long(" "), &long("é日🦀!\n"), &long("<|im_end|>"), &long("aaab")] {
            let tokens = t.encode(text).unwrap();
            for most in [0, 1, 10, tokens.len() / 2, tokens.len() - 1, tokens.len(), 2 * tokens.len()] {
                match t.encode_within(text, Around::Nothing, most).unwrap() {
                    Encoded::Tokens(found) => assert!(found == tokens && tokens.len() <= most),
                    Encoded::AtLeast(least) => {
                        assert!(most < least && least <= tokens.len(), "{least} of {}", tokens.len())
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_far_too_long_takes_no_time() {
    let t = Checkpoint::demo().unwrap().tokenizer;
    for text in ["a".repeat(50 << 20), " é".repeat(20 << 20), "x1 ".repeat(20 << 20)] {
        let start = std::time::Instant::now();
        assert!(matches!(t.encode_within(&text, Around::Nothing, 8192).unwrap(), Encoded::AtLeast(8193..)));
        assert!(start.elapsed().as_secs_f64() < 2.0, "{:?}", start.elapsed());
    }
}

/// If a token may stand for any number of bytes, the number of bytes gives no bound.
#[test]
fn tokens_that_swallow_blanks_are_not_counted_by_bytes() {
    let text = format!("<|im_end|>{}", " ".repeat(200 << 10));
    let mut json = tokenizer_json();
    let parse =
        |json: &serde_json::Value| Tokenizer::parse(json.to_string().as_bytes(), "tokenizer.json".as_ref()).unwrap();
    assert!(matches!(parse(&json).encode_within(&text, Around::Nothing, 5).unwrap(), Encoded::AtLeast(_)));
    for token in json["added_tokens"].as_array_mut().unwrap() {
        token["rstrip"] = true.into();
    }
    assert_eq!(parse(&json).encode_within(&text, Around::Nothing, 5).unwrap(), Encoded::Tokens(vec![267]));
    let mut json = tokenizer_json();
    json["normalizer"] = serde_json::json!({"type": "Strip", "strip_left": true, "strip_right": true});
    assert!(matches!(parse(&json).encode_within(&text, Around::Nothing, 5).unwrap(), Encoded::Tokens(_)));
}
