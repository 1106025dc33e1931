//! Prompts, from text to tokens.

use model::Tokenizer;
use model::tokenizer::{Around, Encoded};

use crate::Error;

/// Encodes a prompt, with what is to be `around` it, for a context of `context` tokens, one of which is left for the
/// answer. `most` is the longest context that the model allows, for messages. A text that is far too long is refused
/// before all of its tokens are made.
///
/// # Errors
/// [`Error::PromptTooLong`] or [`Error::PromptFarTooLong`], or a text that the tokenizer cannot encode.
pub fn encode_prompt(
    tokenizer: &Tokenizer,
    text: &str,
    around: Around,
    context: usize,
    most: usize,
) -> Result<Vec<u32>, Error> {
    // The number of tokens of a text that is only somewhat too long is known exactly.
    match tokenizer.encode_within(text, around, 2 * context)? {
        Encoded::Tokens(tokens) if tokens.len() < context => Ok(tokens),
        Encoded::Tokens(tokens) => Err(Error::PromptTooLong { prompt: tokens.len(), context, most }),
        Encoded::AtLeast(least) => Err(Error::PromptFarTooLong { least, context, most }),
    }
}
