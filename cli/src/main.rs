//! The warpdraft command.
fn main() {}
