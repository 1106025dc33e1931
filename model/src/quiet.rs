//! Keeps what a user's input may do to a library from ending the program: a panic, or recursion without bound.

use std::cell::Cell;
use std::io;
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

/// As [`catch`], in a thread of its own with `stack` bytes of stack. Stack that is never touched takes no memory.
///
/// # Errors
/// If the system has no such thread.
pub(crate) fn apart<T: Send>(name: &str, stack: usize, run: impl FnOnce() -> T + Send) -> io::Result<Option<T>> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(name.into()).stack_size(stack);
        // A panic outside of `run` cannot be.
        Ok(thread.spawn_scoped(scope, || catch(run))?.join().ok().flatten())
    })
}

#[cfg(test)]
mod tests {
    use super::{apart, catch};

    #[test]
    fn a_panic_is_none() {
        assert_eq!(catch(|| 1), Some(1));
        assert_eq!(catch(|| -> u8 { panic!("as a library does") }), None);
    }

    #[test]
    fn what_runs_apart_may_recurse_and_panic() {
        fn deep(left: usize) -> usize {
            let page = std::hint::black_box([left; 512]);
            if left == 0 { 0 } else { deep(left - 1) + usize::from(page[0] == left) }
        }
        // 40 MiB or more: no other thread has so much stack.
        assert_eq!(apart("deep", 256 << 20, || deep(10_000)).unwrap(), Some(10_000));
        assert_eq!(apart("panics", 1 << 20, || -> u8 { panic!("as a library does") }).unwrap(), None);
    }
}
