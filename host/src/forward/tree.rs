//! Steps whose rows are a tree of drafts.

use cuda_std::Global;
use gpu_kernels::step::{MAX_DECODE_ROWS, Rows, SequenceState};
use gpu_kernels::tree::{self, KeepPath};

use super::Forward;
use crate::Error;
use crate::device::Buffer;

/// The memory of the rows' paths, and whether rows have paths at present.
pub(super) struct Tree {
    /// `[MAX_DECODE_ROWS]` the paths, as words.
    paths: Buffer<u64>,
    wanted: bool,
}

impl Forward {
    /// Allocates what tree steps need, if there is a [decode kernel](Self::decode). No other kernel runs trees.
    ///
    /// # Errors
    /// Too little memory, or a driver error.
    pub fn prepare_tree(&mut self) -> Result<(), Error> {
        if self.decode.is_some() {
            self.tree = Some(Tree { paths: self.device.zeroed(MAX_DECODE_ROWS as usize)?, wanted: false });
        }
        Ok(())
    }

    /// Sets whether the rows of steps have paths from now on. Without paths, they are at consecutive positions. Returns
    /// whether they have paths: never, if tree steps were not prepared.
    pub fn want_tree(&mut self, wanted: bool) -> bool {
        self.tree.as_mut().is_some_and(|tree| {
            tree.wanted = wanted;
            wanted
        })
    }

    /// The rows that the next step runs, with their paths if those are wanted.
    pub fn step_rows(&self) -> Rows {
        let paths = self.tree.as_ref().filter(|tree| tree.wanted).map(|tree| tree.paths.ptr_mut());
        Rows { paths: paths.unwrap_or_default(), ..self.rows() }
    }

    /// Enqueues the move of the keys, values and hidden states of the accepted path to their positions, if rows have
    /// paths.
    ///
    /// # Errors
    /// A refused launch.
    pub(crate) fn enqueue_keep_path(&self, state: SequenceState) -> Result<(), Error> {
        let rows = self.step_rows();
        if rows.paths.is_null() {
            return Ok(());
        }
        let layers = self.cache.layers() as u32;
        let tables: Global<u32> = self.page_table.ptr();
        let keep = KeepPath {
            rows,
            state,
            cache: self.cache.params(0, tables, self.table_stride()),
            layer_len: self.cache.layer_len() as u64,
            states: self.states().unwrap_or_default(),
            layer_count: layers,
        };
        let with_states = layers + u32::from(self.states().is_some());
        // SAFETY: buffers of self, sized as the parameter block says; the accepted path is of the step that these rows
        // ran.
        unsafe { self.device.launch::<tree::keep_path>((with_states, 2), 0, keep) }
    }
}

#[cfg(test)]
mod tests {
    use gpu_kernels::step::{MAX_DECODE_ROWS, STATE_WORDS, SequenceState};
    use gpu_kernels::tree::Path;
    use half::bf16;
    use model::Config;

    use super::Forward;
    use crate::device::Device;
    use crate::weights::DeviceWeights;

    const VOCAB: u32 = 64;

    /// Runs `tokens` as rows from position `root` on, as a tree if they have paths. Returns the bits of each row's
    /// logits.
    fn step(forward: &mut Forward, root: u32, tokens: &[u32], paths: Option<&[Path]>) -> Vec<Vec<u32>> {
        let count = tokens.len() as u32;
        let depth = |row: usize| paths.map_or(row as u32, |paths| paths[row].depth());
        let positions: Vec<u32> = (0..tokens.len()).map(|row| root + depth(row)).collect();
        forward.rows.count.write(0, &[count]).unwrap();
        forward.rows.tokens.write(0, tokens).unwrap();
        forward.rows.positions.write(0, &positions).unwrap();
        forward.want_tree(paths.is_some());
        if let (Some(tree), Some(paths)) = (&mut forward.tree, paths) {
            tree.paths.write(0, &paths.iter().map(|path| path.word()).collect::<Vec<_>>()).unwrap();
        }
        forward.decode.as_mut().unwrap().begin().unwrap();
        // SAFETY: the counters were just cleared.
        unsafe { forward.enqueue_decode(count, root + count).unwrap() };
        let mut logits = vec![0f32; tokens.len() * VOCAB as usize];
        forward.logits().read(0, &mut logits).unwrap();
        logits.chunks(VOCAB as usize).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
    }

    fn tokens_on(path: Path, tokens: &[u32]) -> Vec<u32> {
        (0..=path.depth()).map(|depth| tokens[path.row_at(depth) as usize]).collect()
    }

    /// Each row of a tree has the logits that it would have at the end of its path alone. After a path is accepted,
    /// everything is as if it had been run alone.
    #[test]
    fn rows_of_a_tree_have_the_bits_of_their_paths() {
        // The roots are such that the tree crosses the keys of a warp, a page or a split.
        for (root, heads, rows) in [(60, (2, 1), 8), (350, (8, 2), MAX_DECODE_ROWS)] {
            let shape = Config::published("0.6B").unwrap();
            let mut config = Config { vocab_size: VOCAB as usize, num_hidden_layers: 2, ..shape };
            config.plan.resize(128, 256, heads);
            let device = Device::emulator(root as u64);
            let weights = DeviceWeights::random(&config, &device).unwrap();
            let mut forward = Forward::new(&device, &config, weights, 384).unwrap();
            assert!(forward.prepare_decode().unwrap());
            forward.prepare_tree().unwrap();
            forward.keep_states([0, 1, 2]).unwrap();
            forward.want_states(true);

            let random = |i: u32| gpu_kernels::sample::random(u64::from(root * 7 + rows), u64::from(i)) as u32;
            let before: Vec<bf16> = (0..4101).map(|i| bf16::from_f32((random(i) % 2003) as f32 / 1e3 - 1.0)).collect();
            let tokens: Vec<u32> = (0..rows).map(|row| random(1000 + row) % VOCAB).collect();
            let mut paths = vec![Path::ROOT];
            for row in 1..rows {
                // The parent is near the row, so that some paths become deep.
                let parent = row - 1 - random(2000 + row) % row.min(4);
                paths.push(paths[parent as usize].child(row));
            }
            forward.fill_cache(&before).unwrap();
            let of_tree = step(&mut forward, root, &tokens, Some(&paths));
            let deepest = *paths.iter().max_by_key(|path| path.depth()).unwrap();
            for (row, path) in paths.iter().enumerate() {
                let alone = step(&mut forward, root, &tokens_on(*path, &tokens), None);
                assert!(of_tree[row] == *alone.last().unwrap(), "row {row} of {rows} from {root} on: {path:?}");
            }

            // Now the deepest path is accepted.
            step(&mut forward, root, &tokens_on(deepest, &tokens), None);
            let next_root = root + deepest.depth() + 1;
            let left = |forward: &mut Forward| {
                let next = step(forward, next_root, &[7, 9], None);
                let states = forward.states.as_ref().unwrap().read();
                let slots: Vec<_> = states.chunks(3 * 128).collect();
                let of_path = (root..next_root).flat_map(|position| slots[position as usize % slots.len()]);
                (next, of_path.copied().collect::<Vec<_>>())
            };
            let expected = left(&mut forward);
            step(&mut forward, root, &tokens, Some(&paths));
            let (mut words, history) = (device.zeroed(STATE_WORDS).unwrap(), device.zeroed::<i32>(1).unwrap());
            let word = deepest.word();
            words.write(SequenceState::PATH, &[word as u32, (word >> 32) as u32]).unwrap();
            let state = SequenceState { history: history.ptr_mut(), words: words.ptr_mut() };
            forward.enqueue_keep_path(state).unwrap();
            assert!(left(&mut forward) == expected, "{deepest:?} of {rows} rows from {root} on was kept");
        }
    }
}
