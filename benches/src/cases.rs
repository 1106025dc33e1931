//! What `warpdraft bench` measures, each in a file: its sizes, and the run that checks and times it.

pub mod attention;
pub mod ceilings;
pub mod decode;
pub mod linear;
pub mod ngram;
pub mod token_copy;
