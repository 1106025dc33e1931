//! What `warpdraft bench` measures, a file each: sizes, and the run that checks and times them.

pub mod attention;
pub mod ceilings;
pub mod decode;
pub mod linear;
pub mod ngram;
pub mod token_copy;
