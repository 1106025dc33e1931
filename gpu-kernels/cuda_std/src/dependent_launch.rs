//! Programmatic dependent launch (sm_90 on): a launch may begin before the launch ahead of it in the queue is done.
//! Meanwhile it does what needs nothing of that launch.
//!
//! A launch that was enqueued to begin early begins once every block of the launch ahead has called [`allow_next`] or
//! has ended, as far as SMs have room. Each of its blocks must call [`wait`] before it touches anything that other
//! launches write, or writes anything that they touch. Since every block waits, the end of a launch is also the end of
//! all launches before it.
//!
//! In an ordinary launch both functions do nothing. They do nothing under the emulator either, which runs launches one
//! after another.

use crate::target;

/// Waits until all launches ahead are done and their writes can be read (`griddepcontrol.wait`).
#[inline(always)]
pub fn wait() {
    target::wait_for_launches();
}

/// Declares that, as far as this block is concerned, the next launch may begin (`griddepcontrol.launch_dependents`).
#[inline(always)]
pub fn allow_next() {
    target::allow_next_launch();
}
