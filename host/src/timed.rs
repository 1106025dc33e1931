//! How long the parts of a start take, for `--verbose`.

use std::time::Instant;

/// Does `work`, and says in the log how long that took. What it enqueues on a device may not be done by then.
pub(crate) fn timed<T>(what: &str, work: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let done = work();
    tracing::debug!("{what}: {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
    done
}
