//! What ties a result to its request: the number of the request's line and a digest of its bytes.

use std::fmt;

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::args::batch::Shard;
use crate::json;

/// What every result's `id` begins with.
pub const PREFIX: &str = "batch_req_";

/// A line of the requests. Written as `batch_req_LINE_DIGEST`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    /// The line's number, counted from 1.
    pub line: u64,
    /// XXH3 of the line's bytes, without its end.
    pub digest: u64,
}

impl Identity {
    /// The identity of a line.
    pub fn of(line: u64, bytes: &[u8]) -> Self {
        Self { line, digest: xxh3_64(bytes) }
    }

    /// Reads an identity as it is written.
    pub fn parse(text: &str) -> Option<Self> {
        let (line, digest) = text.strip_prefix(PREFIX)?.split_once('_')?;
        Some(Self { line: line.parse().ok()?, digest: u64::from_str_radix(digest, 16).ok()? })
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}_{:016x}", self.line, self.digest)
    }
}

/// What a request is known by: its `custom_id`, or the number of its line if it has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Key {
    /// The request's `custom_id`.
    Id(String),
    /// The number of the request's line.
    Line(u64),
}

impl Key {
    /// The key of a line, which may hold anything. If the line has two `custom_id`s, the last counts here; the request
    /// is refused for it later.
    pub fn of(line: u64, bytes: &[u8]) -> Self {
        json::custom_id(bytes).map_or(Key::Line(line), Key::Id)
    }

    /// A hash that is the same on every machine and in every version.
    pub fn hash(&self, seed: u64) -> u64 {
        match self {
            Key::Id(id) => xxh3_64_with_seed(id.as_bytes(), seed),
            Key::Line(line) => xxh3_64_with_seed(&line.to_le_bytes(), !seed),
        }
    }

    /// Whether the request is in `shard`.
    pub fn is_in(&self, shard: Option<Shard>) -> bool {
        shard.is_none_or(|shard| self.hash(0) % shard.count == shard.index)
    }

    /// The `custom_id`, if there is one.
    pub fn id(&self) -> Option<&str> {
        match self {
            Key::Id(id) => Some(id),
            Key::Line(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Identity, Key};

    #[test]
    fn an_identity_reads_as_it_is_written() {
        let identity = Identity::of(17, b"{}");
        assert_eq!(Identity::parse(&identity.to_string()), Some(identity));
        for wrong in ["", "batch_req_", "batch_req_1", "batch_req_x_0", "batch_req_1_zz", "chatcmpl-1"] {
            assert_eq!(Identity::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_key_is_the_custom_id_or_the_line() {
        assert_eq!(Key::of(3, br#"{"custom_id": "a\u0062"}"#), Key::Id("ab".into()));
        for line in ["{}", "not json", r#"{"custom_id": 4}"#, r#"{"custom_id": null}"#] {
            assert_eq!(Key::of(3, line.as_bytes()), Key::Line(3), "{line}");
        }
    }
}
