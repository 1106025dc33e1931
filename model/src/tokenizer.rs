//! Text to token ids and back, and the streaming detokeniser.
//!
//! The tokenizers of these models are byte-level BPEs: a token stands for a run of bytes, and a character may be split
//! over tokens. So decoding works on bytes, from a table made once: append the tokens' bytes, then read them as UTF-8,
//! with U+FFFD for what is not UTF-8. [`TokenStream`] does the same, one token at a time.

use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use tokenizers::models::bpe::BPE;
use tokenizers::{DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl};

use crate::text::shown;
use crate::{Error, quiet};

mod bound;

pub use bound::Encoded;

/// A byte-level BPE tokenizer, as `tokenizer.json` describes it. Cloning shares it.
#[derive(Debug, Clone)]
pub struct Tokenizer(Arc<Inner>);

/// What is put around the tokens of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Around {
    /// Nothing: a chat template has written all of the prompt, its begin-of-text token included.
    Nothing,
    /// The special tokens that `tokenizer.json` has around every text: Llama 3's begin-of-text token, and nothing with
    /// Qwen's.
    Special,
}

/// What a file says about its model, read before its vocabulary.
#[derive(Deserialize)]
struct Outline {
    model: Option<OutlineModel>,
}

#[derive(Deserialize)]
struct OutlineModel {
    #[serde(rename = "type")]
    kind: Option<String>,
}

/// An encoder whose model is BPE. The library's type for any model reads the file into a tree first, which takes twice
/// as long.
type Encoder = TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

#[derive(Debug)]
struct Inner {
    encoder: Encoder,
    table: ByteTable,
    /// Most bytes of a text that become one token; `None` if there is no known bound.
    most_bytes: Option<usize>,
}

/// The bytes of every token, back to back.
#[derive(Debug)]
struct ByteTable {
    /// Token `id` is `bytes[starts[id]..starts[id + 1]]`; ids that name no token are empty.
    starts: Vec<u32>,
    bytes: Vec<u8>,
    /// Whether a token is special (control text such as `<|im_end|>`, not part of a reply).
    special: Vec<bool>,
}

impl Tokenizer {
    /// Reads the text of a `tokenizer.json`; `path` is for error messages.
    ///
    /// # Errors
    /// [`Error::Tokenizer`], also for a tokenizer that is not byte-level.
    pub fn parse(json: &[u8], path: &Path) -> Result<Self, Error> {
        let broken = |reason: String| Error::Tokenizer { path: path.to_owned(), reason };
        // The library panics on some files that are not valid JSON, so that is checked first. Other panics become
        // errors too.
        let text = std::str::from_utf8(json).map_err(|e| broken(e.to_string()))?;
        let outline: Outline = serde_json::from_str(text).map_err(|e| broken(e.to_string()))?;
        if let Some(kind) = outline.model.and_then(|model| model.kind).filter(|kind| kind != "BPE") {
            return Err(broken(format!("its model is {kind}, and warpdraft reads byte-level BPE alone")));
        }
        let mut encoder = quiet::catch(|| serde_json::from_str::<Encoder>(text))
            .ok_or_else(|| broken("its parts contradict each other".to_owned()))?
            .map_err(|e| broken(e.to_string()))?;
        if !matches!(encoder.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err(broken("its decoder is not byte-level, and warpdraft reads byte-level BPE alone".to_owned()));
        }
        // The caller decides what is in a prompt: it is never truncated and never padded.
        encoder.with_padding(None);
        encoder.with_truncation(None).map_err(|e| broken(e.to_string()))?;
        without_dropout(&mut encoder);
        let table = ByteTable::new(&encoder).map_err(broken)?;
        let most_bytes = bound::most_bytes(&encoder, &table);
        Ok(Tokenizer(Arc::new(Inner { encoder, table, most_bytes })))
    }

    /// Token ids of a text. Special tokens written in the text (`<|im_start|>`) become their ids; nothing is added
    /// around it.
    ///
    /// # Errors
    /// [`Error::Encode`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.encode_with(text, Around::Nothing)
    }

    /// Token ids of a text as [`encode`](Self::encode) gives them, with `around` put around it.
    ///
    /// # Errors
    /// [`Error::Encode`].
    pub fn encode_with(&self, text: &str, around: Around) -> Result<Vec<u32>, Error> {
        let failed = |reason: String| Error::Encode { reason };
        let encoding = quiet::catch(|| self.0.encoder.encode_fast(text, around == Around::Special))
            .ok_or_else(|| failed("the tokenizer was not made for it".into()))?;
        Ok(encoding.map_err(|e| failed(shown(&e.to_string())))?.get_ids().to_vec())
    }

    /// Text of token ids, special tokens left out. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.decode_where(ids, false)
    }

    /// Text of token ids, special tokens written out.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        self.decode_where(ids, true)
    }

    fn decode_where(&self, ids: &[u32], special: bool) -> String {
        let table = &self.0.table;
        let kept = ids.iter().filter(|id| special || !table.is_special(**id));
        let bytes: Vec<u8> = kept.flat_map(|id| table.get(*id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes that a token stands for; empty for an id without a token.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.0.table.get(id)
    }

    /// Whether a token is special: control text such as `<|im_end|>`, not part of a reply.
    pub fn is_special(&self, id: u32) -> bool {
        self.0.table.is_special(id)
    }

    /// Number of ids: one more than the largest. At most the embedding's rows, and often fewer.
    pub fn vocab_size(&self) -> usize {
        self.0.table.special.len()
    }

    /// The first id that stands for different bytes in the two tokenizers, or is special in only one of them. `None` if
    /// they agree.
    pub fn first_difference(&self, other: &Self) -> Option<u32> {
        let ids = self.vocab_size().max(other.vocab_size()) as u32;
        (0..ids)
            .find(|&id| self.token_bytes(id) != other.token_bytes(id) || self.is_special(id) != other.is_special(id))
    }

    /// Id of a token by its text in `tokenizer.json`.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.encoder.token_to_id(token)
    }

    /// A detokeniser for one reply; it leaves special tokens out, as [`decode`](Self::decode) does.
    pub fn stream(&self) -> TokenStream {
        TokenStream { tokenizer: self.clone(), pending: Vec::new() }
    }

    /// Fails if a token has no row in an embedding of `vocab_size` rows.
    pub(crate) fn check_fits(&self, vocab_size: usize, path: &Path) -> Result<(), Error> {
        if self.vocab_size() <= vocab_size {
            return Ok(());
        }
        let id = (self.vocab_size() - 1) as u32;
        let token = self.0.encoder.id_to_token(id).unwrap_or_default();
        Err(Error::TokenizerDoesNotFit { path: path.to_owned(), token, id, vocab_size })
    }
}

/// Switches dropout off. It is for training: it makes different tokens of the same text each time.
fn without_dropout(encoder: &mut Encoder) {
    if encoder.get_model().dropout.is_some() {
        let mut bpe = encoder.get_model().clone();
        bpe.dropout = None;
        encoder.with_model(bpe);
    }
}

impl ByteTable {
    fn new(encoder: &Encoder) -> Result<Self, String> {
        // Ids are dense in any sane file. The bound keeps a broken file from filling memory.
        const LARGEST: u32 = 1 << 24;
        let by_char = byte_of_char();
        let mut tokens: Vec<(u32, String)> =
            encoder.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
        tokens.sort_unstable();
        let Some(&(last, _)) = tokens.last() else {
            return Err("it has no tokens".to_owned());
        };
        if last > LARGEST {
            return Err(format!("it gives a token the id {last}"));
        }
        let mut table = ByteTable { starts: vec![0], bytes: Vec::new(), special: Vec::new() };
        let added = encoder.get_added_tokens_decoder();
        let mut tokens = tokens.into_iter().peekable();
        for id in 0..=last {
            let mut first = true;
            while let Some((_, token)) = tokens.next_if(|(i, _)| *i == id) {
                // The added vocabulary wins where two tokens share an id, as it does in the library.
                let token = added.get(&id).map_or(token, |t| t.content.clone());
                if std::mem::take(&mut first) {
                    append_bytes(&token, &by_char, &mut table.bytes);
                }
            }
            table.starts.push(table.bytes.len() as u32);
            table.special.push(added.get(&id).is_some_and(|t| t.special));
        }
        Ok(table)
    }

    fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.starts.get(id), self.starts.get(id + 1)) {
            (Some(&start), Some(&end)) => &self.bytes[start as usize..end as usize],
            _ => &[],
        }
    }

    fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

/// Appends the bytes of a token. Each character stands for a byte; if one does not, all characters stand for
/// themselves.
fn append_bytes(token: &str, by_char: &[Option<u8>], bytes: &mut Vec<u8>) {
    let start = bytes.len();
    for c in token.chars() {
        match by_char.get(c as usize).copied().flatten() {
            Some(byte) => bytes.push(byte),
            None => {
                bytes.truncate(start);
                bytes.extend_from_slice(token.as_bytes());
                return;
            }
        }
    }
}

/// GPT-2's alphabet: printable bytes stand for themselves, the other 68 for the characters from U+0100 on.
fn byte_of_char() -> Vec<Option<u8>> {
    let mut table = vec![None; 0x144];
    let mut next = 0x100;
    for byte in 0..=255u8 {
        if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
            table[byte as usize] = Some(byte);
        } else {
            table[next] = Some(byte);
            next += 1;
        }
    }
    table
}

/// Turns token ids into text as they come, never splitting a character.
///
/// The pieces of [`push`](Self::push) and [`flush`](Self::flush), joined, equal [`Tokenizer::decode`] of all ids.
#[derive(Debug, Clone)]
pub struct TokenStream {
    tokenizer: Tokenizer,
    /// The first bytes of a character whose others have not come yet; at most three between calls.
    pending: Vec<u8>,
}

impl TokenStream {
    /// Takes the next token. Returns the text that it makes certain, if any.
    pub fn push(&mut self, id: u32) -> Option<String> {
        let table = &self.tokenizer.0.table;
        if table.is_special(id) {
            return None;
        }
        self.pending.extend_from_slice(table.get(id));
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(e) => {
                    let (valid, after) = rest.split_at(e.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    // Without a length, the bytes may still become a character. With one, they never will.
                    let Some(wrong) = e.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[wrong..];
                }
            }
        }
        let kept = rest.len();
        self.pending.drain(..self.pending.len() - kept);
        (!text.is_empty()).then_some(text)
    }

    /// Ends the reply. Returns U+FFFD for an unfinished character, if there is one. The stream can then take another
    /// reply.
    pub fn flush(&mut self) -> Option<String> {
        let pending = std::mem::take(&mut self.pending);
        (!pending.is_empty()).then(|| String::from_utf8_lossy(&pending).into_owned())
    }
}
