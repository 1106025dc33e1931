//! A look at all requests before the first is answered, if they are in a file.

use std::collections::HashMap;
use std::path::Path;

use super::identity::{Identity, Key};
use super::input::{LONGEST, Lines};
use super::{ahead, out_of_order};
use crate::args::batch::Shard;

/// How many requests there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Requests in the share.
    pub total: u64,
    /// Those of them that an earlier run has answered.
    pub done: u64,
}

/// Counts the requests of `shard`. `done` has the lines and digests that the output has results for. `None` if not all
/// requests can be read: the run then answers those that can be, and reports the error after that.
///
/// # Errors
/// If the output is not of these requests, or if it is `ordered` and has a result behind a request that has none.
pub fn survey(
    requests: &Path,
    output: &Path,
    shard: Option<Shard>,
    ordered: bool,
    done: &HashMap<u64, u64>,
) -> anyhow::Result<Option<Survey>> {
    let mut lines = Lines::open(requests, LONGEST)?;
    let (mut survey, mut found, mut is_behind) = (Survey { total: 0, done: 0 }, 0, false);
    loop {
        let line = match lines.next() {
            Ok(Some(line)) => line,
            Ok(None) => break,
            Err(_) => return Ok(None),
        };
        let bytes = line.bytes.as_deref().unwrap_or_default();
        let is_done = ahead::is_done(done, Identity::of(line.number, bytes), output)?;
        found += usize::from(is_done);
        let key = if line.bytes.is_some() { Key::of(line.number, bytes) } else { Key::Line(line.number) };
        if key.is_in(shard) {
            survey.total += 1;
            survey.done += u64::from(is_done);
            if ordered && is_done && is_behind {
                return Err(out_of_order(output));
            }
            is_behind |= !is_done;
        }
    }
    if found < done.len() {
        return Err(ahead::beyond(done.len() - found, output));
    }
    Ok(Some(survey))
}
