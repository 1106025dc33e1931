//! Recognises texts that are too long, without making tokens of all of them.

use serde_json::Value;

use super::{Around, ByteTable, Encoder, Tokenizer, byte_of_char};
use crate::Error;

/// The result of encoding a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoded {
    /// Its tokens.
    Tokens(Vec<u32>),
    /// The text has more tokens than allowed: at least this many.
    AtLeast(usize),
}

/// Bytes of a part, when tokens are counted part by part.
const PART: usize = 64 << 10;
/// Texts of up to this many bytes are encoded at once, whatever they are.
const SHORT: usize = 256 << 10;
/// Tokens that a cut may add to those of a text, when it goes through a run of blanks or a special token.
const CUT: usize = 32;
/// A normaliser that composes characters leaves at least one of so many bytes (U+0390, syllables of Hangul).
const COMPOSED: usize = 3;

impl Tokenizer {
    /// Token ids of a text, as [`encode_with`](Self::encode_with) gives them, if they are `most` or fewer.
    ///
    /// A text that is far too long costs no more than one that is just too long. A text with more bytes than `most`
    /// tokens can stand for is not encoded at all. The tokens of other long texts are counted part by part before all
    /// are made.
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

    /// The fewest tokens that a text can have, by its number of bytes.
    fn fewest_tokens(&self, text: &str) -> usize {
        let shrinks = if self.0.encoder.get_normalizer().is_some() && !text.is_ascii() { COMPOSED } else { 1 };
        self.0.most_bytes.map_or(0, |bytes| text.len().div_ceil(shrinks * bytes))
    }
}

/// The bytes of the longest token, if every byte of a text ends up in a token: nothing is left out, replaced or
/// swallowed. `None` if that is not certain.
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

/// Whether the steps before the model turn text into bytes, and apart from that only cut it.
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
