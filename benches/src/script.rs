//! Drafts with an acceptance that is known beforehand.

use bench_kernels::script::draft_script;
use host::{Error, Gpu};

/// From now on, `gpu` drafts by a script. The script proposes `answer` after `prompt`, with a wrong token at the end of
/// each of `lengths`, over and over (each at least 1). So a step that runs all drafts confirms as many tokens as each
/// length says. The device must be [opened](crate::options) with the kernels for measuring.
///
/// # Errors
/// If there is too little memory, or the driver fails.
pub fn draft_by_script(gpu: &mut Gpu, prompt: &[u32], answer: &[u32], lengths: &[usize]) -> Result<(), Error> {
    // SAFETY: the kernel is written for these parameters.
    unsafe { gpu.set_script::<draft_script>(&script(prompt, answer, lengths)) }
}

fn script(prompt: &[u32], answer: &[u32], lengths: &[usize]) -> Vec<u32> {
    let mut script = [prompt, answer].concat();
    // The first token of the answer comes with the prompt.
    let mut at = prompt.len();
    for length in lengths.iter().cycle() {
        at += length;
        match script.get_mut(at) {
            Some(token) => *token ^= 1,
            None => break,
        }
    }
    script
}

#[cfg(test)]
mod tests {
    use super::script;

    #[test]
    fn the_token_at_the_end_of_each_length_is_wrong() {
        let (prompt, answer) = ([2, 4], [10, 20, 30, 40, 50, 60]);
        assert_eq!(script(&prompt, &answer, &[1, 3]), [2, 4, 10, 20 ^ 1, 30, 40, 50 ^ 1, 60 ^ 1]);
    }
}
