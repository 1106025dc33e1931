//! Hidden states of a model, which a pass leaves for a head that drafts from them.

use cuda_std::Global;
use gpu_kernels::eagle::{self, STATES, States, TakeStates, Taps};
use gpu_kernels::step::{MAX_ROWS, Rows};
use half::bf16;

use super::Forward;
use crate::Error;
use crate::device::{Buffer, Device};

/// The memory of hidden states, and which they are.
pub(crate) struct HiddenStates {
    /// After how many layers the residual stream is one, in the order of the three.
    after: [usize; 3],
    states: Buffer<bf16>,
    slots: u32,
    dim: u32,
    sequences: u32,
    /// Whether passes leave theirs.
    wanted: bool,
}

impl HiddenStates {
    fn states(&self) -> States {
        States { states: self.states.ptr_mut(), slots: self.slots, dim: self.dim, sequences: self.sequences }
    }

    /// All of them, slot by slot.
    #[cfg(test)]
    pub(super) fn read(&self) -> Vec<bf16> {
        let mut found = vec![bf16::ZERO; self.states.len()];
        self.states.read(0, &mut found).unwrap();
        found
    }

    /// As a pass in one launch takes them.
    pub(super) fn taps(&self) -> Taps {
        Taps { to: self.states(), after: self.after.map(|layers| layers as u32) }
    }

    /// Enqueues the copy of the residual stream `x` after so many `layers`, if it is one of them.
    ///
    /// # Safety
    /// `x` holds the residual stream of at most `most_rows` `rows`, of which those of a sequence lie together, at
    /// consecutive positions.
    pub(crate) unsafe fn take(
        &self,
        device: &Device,
        rows: Rows,
        most_rows: u32,
        layers: usize,
        x: Global<f32>,
    ) -> Result<(), Error> {
        if !self.wanted {
            return Ok(());
        }
        for (place, _) in self.after.iter().enumerate().filter(|(_, after)| **after == layers) {
            let take = TakeStates { rows, x, to: self.states(), place: place as u32 };
            // SAFETY: the caller's word for the rows; the states are a buffer of self, of so many slots.
            unsafe { device.launch::<eagle::take_states>((1, most_rows), 0, take)? };
        }
        Ok(())
    }
}

impl Forward {
    /// Slots of hidden states beside those of the rows of a pass: more than a head may be behind.
    const SPARE_SLOTS: usize = MAX_ROWS as usize;

    /// Bytes of hidden states beside passes over up to `rows` rows of a prompt, for a model of this hidden size.
    pub(crate) const fn states_bytes(rows: usize, hidden: usize) -> u64 {
        ((rows + Self::SPARE_SLOTS) * STATES as usize * hidden * size_of::<bf16>()) as u64
    }

    /// Allocates memory for the residual stream after so many layers, three times, of the last positions of a sequence.
    /// Passes over prompts are [prepared](Self::prepare_prefill) by then, if they are at all.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub(crate) fn keep_states(&mut self, after: [usize; 3]) -> Result<(), Error> {
        let rows = self.prefill().map_or(MAX_ROWS as usize, crate::prefill::Prefill::capacity);
        self.keep_states_of(after, [1, rows + Self::SPARE_SLOTS])
    }

    /// The same of so many sequences, those with the lowest numbers, and so many of their last positions.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub(crate) fn keep_states_of(&mut self, after: [usize; 3], [sequences, slots]: [usize; 2]) -> Result<(), Error> {
        let hidden = self.config.plan.hidden;
        let states = self.device.zeroed(sequences * slots * STATES as usize * hidden)?;
        let [slots, dim, sequences] = [slots, hidden, sequences].map(|count| count as u32);
        self.states = Some(HiddenStates { after, states, slots, dim, sequences, wanted: false });
        Ok(())
    }

    /// From now on, passes leave their hidden states, if there is memory for them, or leave none.
    pub(crate) fn want_states(&mut self, wanted: bool) {
        if let Some(states) = &mut self.states {
            states.wanted = wanted;
        }
    }

    /// Where hidden states are kept, wanted now or not.
    pub(crate) fn kept_states(&self) -> Option<States> {
        self.states.as_ref().map(HiddenStates::states)
    }

    /// Whether a pass over so many rows of what is generated leaves its hidden states, where they are wanted.
    pub(crate) fn leaves_states(&self, rows: u32) -> bool {
        self.batched.is_none() || super::is_for_few(rows) && self.decode().is_some()
    }

    /// The hidden states of the last positions that passes have run, where they leave them.
    pub(crate) fn states(&self) -> Option<States> {
        self.wanted_states().map(HiddenStates::states)
    }

    pub(super) fn wanted_states(&self) -> Option<&HiddenStates> {
        self.states.as_ref().filter(|states| states.wanted)
    }

    /// Whether a hidden state is the residual stream after the last layer.
    pub(crate) fn wants_last_layer(&self) -> bool {
        self.wanted_states().is_some_and(|states| states.after.contains(&self.config.num_hidden_layers))
    }
}

#[cfg(test)]
mod tests {
    use gpu_kernels::step::MAX_DECODE_ROWS;
    use half::bf16;
    use model::Config;

    use super::Forward;
    use crate::device::Device;
    use crate::forward::RowOutput;
    use crate::weights::DeviceWeights;

    /// Rows of tokens at positions from `start` on: a pass over them, in one launch or many, and what it leaves.
    fn left_by(forward: &mut Forward, (start, count): (u32, u32), in_one: bool) -> Vec<bf16> {
        let column = |of: fn(u32) -> u32| (start..start + count).map(of).collect::<Vec<_>>();
        forward.row_count.write(0, &[count]).unwrap();
        forward.row_tokens.write(0, &column(|i| i * 7 % 64)).unwrap();
        forward.row_positions.write(0, &column(|i| i)).unwrap();
        forward.states.as_mut().unwrap().states.clear().unwrap();
        if in_one {
            forward.decode.as_mut().unwrap().begin().unwrap();
            // SAFETY: the counters were just cleared.
            unsafe { forward.enqueue_decode(count, start + count).unwrap() };
        } else {
            forward.enqueue(count, start + count, RowOutput::LogitsFrom(0)).unwrap();
        }
        forward.states.as_ref().unwrap().read()
    }

    #[test]
    fn one_launch_and_many_leave_the_same() {
        let shape = Config::published("0.6B").unwrap();
        let mut config = Config { vocab_size: 64, num_hidden_layers: 3, ..shape };
        config.plan.resize(128, 256, (2, 1));
        let device = Device::emulator(0);
        let weights = DeviceWeights::random(&config, &device).unwrap();
        let mut forward = Forward::new(&device, &config, weights, 192).unwrap();
        assert!(forward.prepare_decode().unwrap());
        // One row is exchanged in another way than several, and more than 8 are another kernel's; the last rows are
        // round the end of the ring.
        for (after, rows) in
            [([0, 1, 3], (0, 12)), ([0, 1, 3], (12, 1)), ([2, 2, 1], (13, 5)), ([2, 2, 1], (120, MAX_DECODE_ROWS))]
        {
            forward.keep_states(after).unwrap();
            forward.want_states(true);
            let [many, one] = [false, true].map(|in_one| left_by(&mut forward, rows, in_one));
            assert!(many == one, "{after:?} of {rows:?}");
            assert_eq!(many.iter().filter(|x| x.to_f32() != 0.0).count(), 3 * 128 * rows.1 as usize);
        }
        forward.want_states(false);
        assert!(left_by(&mut forward, (3, 4), true).iter().all(|x| x.to_f32() == 0.0));
    }
}
