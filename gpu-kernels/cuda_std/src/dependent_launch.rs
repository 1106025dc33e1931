//! Launches that begin before the one ahead of them in the queue is done (sm_90 on): what needs nothing of it, a kernel
//! does meanwhile.
//!
//! A launch enqueued to begin early does so once every block of the launch ahead has called [`allow_next`] or has
//! ended, and where SMs have room. It calls [`wait`] before it touches anything that other launches write, or writes
//! anything that they touch; every block does, so that the end of a launch is the end of all before it. Launched in the
//! ordinary way both do nothing, as under the emulator, which runs launches one after another.

use crate::target;

/// Waits until all launches ahead are done, and what they wrote can be read (`griddepcontrol.wait`).
#[inline(always)]
pub fn wait() {
    target::wait_for_launches();
}

/// Lets the next launch begin, as far as this block is concerned (`griddepcontrol.launch_dependents`).
#[inline(always)]
pub fn allow_next() {
    target::allow_next_launch();
}
