//! The hidden states of a model that a head drafts from. Passes over the model leave them in a ring.

use cuda_std::Global;
use gpu_kernels::eagle::{self, STATES, States, TakeStates, Taps};
use gpu_kernels::step::{MAX_ROWS, Rows};
use half::bf16;

use super::Forward;
use crate::Error;
use crate::device::{Buffer, Device};

/// The ring of hidden states, and after which layers they are taken.
pub(crate) struct HiddenStates {
    /// After how many layers each of the three hidden states is taken.
    after: [usize; 3],
    states: Buffer<bf16>,
    slots: u32,
    dim: u32,
    sequences: u32,
    /// Whether passes write their hidden states.
    wanted: bool,
}

impl HiddenStates {
    fn states(&self) -> States {
        States { states: self.states.ptr_mut(), slots: self.slots, dim: self.dim, sequences: self.sequences }
    }

    /// All hidden states, slot by slot.
    #[cfg(test)]
    pub(super) fn read(&self) -> Vec<bf16> {
        let mut found = vec![bf16::ZERO; self.states.len()];
        self.states.read(0, &mut found).unwrap();
        found
    }

    /// The ring, as the decode kernel takes it.
    pub(super) fn taps(&self) -> Taps {
        Taps { to: self.states(), after: self.after.map(|layers| layers as u32) }
    }

    /// Enqueues the copy of the residual stream `x` after `layers` layers, if that is one of the three hidden states.
    ///
    /// # Safety
    /// `x` holds the residual stream of at most `most_rows` `rows`. Rows of the same sequence are adjacent, at
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
    /// Slots in addition to those for the rows of a pass. A head is never this many tokens behind.
    const SPARE_SLOTS: usize = MAX_ROWS as usize;

    /// Bytes of the hidden states of one sequence, with passes over up to `rows` rows of a prompt, for this hidden
    /// size.
    pub(crate) const fn states_bytes(rows: usize, hidden: usize) -> u64 {
        ((rows + Self::SPARE_SLOTS) * STATES as usize * hidden * size_of::<bf16>()) as u64
    }

    /// Allocates the ring for the hidden states of the last positions of one sequence, taken after each of these three
    /// numbers of layers. Passes over prompts must be [prepared](Self::prepare_prefill) before, if there are any.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub(crate) fn keep_states(&mut self, after: [usize; 3]) -> Result<(), Error> {
        let rows = self.prefill().map_or(MAX_ROWS as usize, crate::prefill::Prefill::capacity);
        self.keep_states_of(after, 1, rows + Self::SPARE_SLOTS)
    }

    /// As [`keep_states`](Self::keep_states), for the `sequences` sequences with the lowest numbers, and `slots` last
    /// positions of each.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub(crate) fn keep_states_of(&mut self, after: [usize; 3], sequences: usize, slots: usize) -> Result<(), Error> {
        let hidden = self.config.plan.hidden;
        let states = self.device.zeroed_array("the hidden states", &[sequences, slots, STATES as usize, hidden])?;
        let [slots, dim, sequences] = [slots, hidden, sequences].map(|count| count as u32);
        self.states = Some(HiddenStates { after, states, slots, dim, sequences, wanted: false });
        Ok(())
    }

    /// Sets whether passes write their hidden states from now on. Without a ring for them, they never do.
    pub(crate) fn want_states(&mut self, wanted: bool) {
        if let Some(states) = &mut self.states {
            states.wanted = wanted;
        }
    }

    /// The ring of hidden states, whether passes write to it at present or not.
    pub(crate) fn kept_states(&self) -> Option<States> {
        self.states.as_ref().map(HiddenStates::states)
    }

    /// Whether a pass over `rows` generated rows would write hidden states, if they are wanted.
    pub(crate) fn leaves_states(&self, rows: u32) -> bool {
        self.batched.is_none() || super::is_for_few(rows) && self.decode().is_some()
    }

    /// The ring of hidden states, if passes write to it at present.
    pub(crate) fn states(&self) -> Option<States> {
        self.wanted_states().map(HiddenStates::states)
    }

    pub(super) fn wanted_states(&self) -> Option<&HiddenStates> {
        self.states.as_ref().filter(|states| states.wanted)
    }

    /// Whether one of the wanted hidden states is taken after the last layer.
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

    /// Runs a pass over rows from position `start` on, in one launch or in many, and returns the ring that it leaves.
    fn left_by(forward: &mut Forward, (start, count): (u32, u32), in_one: bool) -> Vec<bf16> {
        let column = |of: fn(u32) -> u32| (start..start + count).map(of).collect::<Vec<_>>();
        forward.rows.count.write(0, &[count]).unwrap();
        forward.rows.tokens.write(0, &column(|i| i * 7 % 64)).unwrap();
        forward.rows.positions.write(0, &column(|i| i)).unwrap();
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
        // One row is exchanged in another way than several rows, and more than 8 rows take another kernel. The last
        // case wraps around the end of the ring.
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
