//! Drafts by a script, to measure with an acceptance that is known beforehand.

use cuda_std::{kernel, thread};
use gpu_kernels::drafting::DraftScript;
use gpu_kernels::step::SequenceState;

/// Proposes the tokens that a script has for the next positions.
#[kernel(threads = 32, module = "bench")]
pub unsafe fn draft_script(p: DraftScript) {
    // SAFETY: the launcher's word: memory is as the parameter block says. Drafts are of positions of the
    // script, and at most `most`.
    unsafe {
        let i = thread::thread_idx_x();
        let length = p.state.words.load(SequenceState::LENGTH);
        // One token of the step comes without a draft.
        let room = p.max_length.saturating_sub(length + 1).min(p.script_len.saturating_sub(length));
        let count = p.most.min(room);
        if i < count {
            p.drafts.store(1 + i as usize, p.script.load((length + i) as usize));
        }
        if i == 0 {
            p.rows.store(0, 1 + count as i32);
        }
    }
}
