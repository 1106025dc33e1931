//! Texts that are too long, told without making tokens of all of them.

use serde_json::Value;

use super::{Around, ByteTable, Encoder, Tokenizer, byte_of_char};
use crate::Error;

/// What became of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoded {
    /// Its tokens.
    Tokens(Vec<u32>),
    /// It has more than were allowed: at least so many.
    AtLeast(usize),
}

/// Bytes of a text that is counted part by part.
const PART: usize = 64 << 10;
/// Texts of so many bytes are encoded at once, whatever they are.
const SHORT: usize = 256 << 10;
/// Tokens that a cut may add to those of a text: those of a run of blanks, or of a special token that it goes through.
const CUT: usize = 32;
/// A normaliser that composes characters makes at most a third of their bytes (U+0390, syllables of Hangul).
const COMPOSED: usize = 3;

impl Tokenizer {
    /// Token ids of a text, as [`encode_with`](Self::encode_with) gives them, if they are `most` or fewer.
    ///
    /// What is far too long costs no more than what is just too long: a text with more bytes than `most` tokens can
    /// stand for is not looked at, and tokens of a long one are counted part by part before all are made.
    ///
    /// # Errors
    /// [`Error::Encode`].
    pub fn encode_within(&self, text: &str, around: Around, most: usize) -> Result<Encoded, Error> {
        let least = self.fewest_tokens(text);
        if least > most {
            return Ok(Encoded::AtLeast(least));
        }
        if text.len() > SHORT.max(8 * most) {
            let (mut rest, mut least) = (text, 0);
            while !rest.is_empty() && least <= most {
                let (part, after) = rest.split_at(rest.floor_char_boundary(PART));
                least = (least + self.encode(part)?.len()).saturating_sub(CUT);
                rest = after;
            }
            if least > most {
                return Ok(Encoded::AtLeast(least));
            }
        }
        let tokens = self.encode_with(text, around)?;
        Ok(if tokens.len() > most { Encoded::AtLeast(tokens.len()) } else { Encoded::Tokens(tokens) })
    }

    /// So many tokens a text has at least, by its bytes.
    fn fewest_tokens(&self, text: &str) -> usize {
        let shrinks = if self.0.encoder.get_normalizer().is_some() && !text.is_ascii() { COMPOSED } else { 1 };
        self.0.most_bytes.map_or(0, |bytes| text.len().div_ceil(shrinks * bytes))
    }
}

/// The bytes of the longest token, if every byte of a text comes to be in one: nothing is left out, replaced or
/// swallowed.
pub(super) fn most_bytes(encoder: &Encoder, table: &ByteTable) -> Option<usize> {
    let json = |part: serde_json::Result<Value>| part.unwrap_or_default();
    let keeps_all = (0..).zip(byte_of_char()).all(|(c, byte): (u32, _)| {
        let text = char::from_u32(c).unwrap_or_default().to_string();
        byte.is_none() || encoder.token_to_id(&text).is_some()
    }) && encoder.get_normalizer().is_none_or(|n| json(serde_json::to_value(n))["type"] == "NFC")
        && encoder.get_pre_tokenizer().is_some_and(|p| makes_bytes(&json(serde_json::to_value(p))))
        && !encoder.get_added_tokens_decoder().values().any(|token| token.lstrip || token.rstrip);
    let longest = table.starts.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max();
    longest.filter(|longest| keeps_all && *longest > 0)
}

/// Whether the steps before the tokens make bytes of a text, and otherwise cut it alone.
fn makes_bytes(step: &Value) -> bool {
    let one = [step.clone()];
    let steps = step["pretokenizers"].as_array().map_or(&one[..], Vec::as_slice);
    let cuts = |step: &Value| match step["type"].as_str() {
        Some("ByteLevel" | "Digits") => true,
        Some("Split") => step["behavior"] != "Removed",
        _ => false,
    };
    steps.iter().all(cuts) && steps.iter().any(|step| step["type"] == "ByteLevel")
}
