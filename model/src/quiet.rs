//! Catches panics of libraries where a user's input may cause them.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    /// Whether a panic of this thread is expected, and therefore not reported.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// The result of `run`, or `None` if it panics. The panic is not reported: the caller does that in its own words. What
/// `run` changes must not be used after a panic.
pub(crate) fn catch<T>(run: impl FnOnce() -> T) -> Option<T> {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(|| {
        let others = take_hook();
        set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                others(panic);
            }
        }));
    });
    let before = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(run));
    QUIET.set(before);
    result.ok()
}

#[cfg(test)]
mod tests {
    use super::catch;

    #[test]
    fn a_panic_is_none() {
        assert_eq!(catch(|| 1), Some(1));
        assert_eq!(catch(|| -> u8 { panic!("as a library does") }), None);
    }
}
