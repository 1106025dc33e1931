//! Answers of a given form: JSON that follows a schema, a regular expression, a choice, a grammar, a call of a tool.
//!
//! [`Forms`] compiles a [`Shape`], what a user asked for, against a tokenizer. All sequences of that shape share the
//! resulting [`Form`]. Each of them follows it with a [`Matcher`] of its own, which says after every token which tokens
//! may come next. `llguidance` decides that; this module adds what is around its matcher: the model's own vocabulary,
//! the thought before an answer, drafts, and refusals in plain words.
//!
//! What a matcher allows is a function of the tokens since the answer began, and of nothing else. So an answer of a
//! form is the same alone, in a batch, with drafts, and in a run that was stopped and continued.
//!
//! Where the form leaves only one text, the matcher allows only one token: the one that the tokenizer would make of
//! that text. So what a form [forces](Matcher::forced) is known ahead, and models see text tokenised as usual.

mod bounds;
mod compile;
mod grammar;
mod matcher;
mod recent;
mod schema;
mod vocabulary;

pub use compile::{Form, Forms};
pub use grammar::{Shape, Tool};
pub use matcher::Matcher;

/// Words of a mask over `vocab_size` tokens: one bit a token, the lowest first.
pub const fn mask_words(vocab_size: usize) -> usize {
    vocab_size.div_ceil(u32::BITS as usize)
}

/// Whether a mask allows a token.
pub fn is_allowed(mask: &[u32], token: u32) -> bool {
    mask.get((token / u32::BITS) as usize).is_some_and(|word| word >> (token % u32::BITS) & 1 == 1)
}

/// What stands before and after the JSON of a tool call, as [`Splitter`](crate::chat::Splitter) reads it.
pub(crate) const CALL: [&str; 2] = ["<tool_call>\n", "\n</tool_call>"];
/// The tags that begin and end a thought; `BEHIND_THOUGHT` stands between the last and the answer.
const THOUGHT: [&str; 2] = ["<think>", "</think>"];
const BEHIND_THOUGHT: &str = "\n\n";
