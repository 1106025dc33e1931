//! A tokenizer, as the grammar engine wants it.

use llguidance::toktrie::{TokRxInfo, TokTrie, TokenizerEnv};

use crate::Tokenizer;

/// A vocabulary as a trie of bytes, with the tokenizer that encodes forced text.
pub struct Vocabulary {
    tokenizer: Tokenizer,
    trie: TokTrie,
}

impl Vocabulary {
    /// The vocabulary of a tokenizer. Each of `end_tokens`, of which there must be one or more, ends an answer.
    pub fn new(tokenizer: &Tokenizer, end_tokens: &[u32]) -> Self {
        let words = (0..tokenizer.vocab_size() as u32).map(|id| {
            let bytes = tokenizer.token_bytes(id);
            // The trie's marker says that no text becomes this token. Ids without a token have no bytes.
            if tokenizer.is_special(id) && !bytes.is_empty() {
                [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
            } else {
                bytes.to_vec()
            }
        });
        let words: Vec<Vec<u8>> = words.collect();
        let info = TokRxInfo::new(words.len() as u32, end_tokens[0]);
        Self { tokenizer: tokenizer.clone(), trie: TokTrie::from(&info, &words).with_eos_tokens(end_tokens) }
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| match self.tokenizer.encode(text) {
            // Text that looks like a special token must stay text.
            Ok(tokens) if tokens.iter().all(|&token| !self.tokenizer.is_special(token)) => tokens,
            _ => self.trie.greedy_tokenize(text.as_bytes()),
        })
    }
}
