//! Which nodes of a drafter's tree are planned, against a plan that sorts a list; and what is accepted of a tree.

use crate::common::{Random, run};
use cuda_std::emulator::Buffer;
use gpu_kernels::draft_model::DraftWords;
use gpu_kernels::drafting::{Cost, ONE, UNTRIED};
use gpu_kernels::logprobs::Note;
use gpu_kernels::sample::UNIT_MASS;
use gpu_kernels::step::{
    self, Accept, Counters, DraftState, MAX_DECODE_ROWS, MAX_ROWS, Report, Rows, STATE_WORDS, SequenceState,
};
use gpu_kernels::tree::{self, DraftReport, Likeliest, MOST_BRANCHES, Path, PlanTree};

const MOST: usize = MAX_DECODE_ROWS as usize;
const VOCAB: u32 = 40;
const BRANCHES: usize = MOST_BRANCHES as usize;

/// A proposal: the likeliest tokens after each pass with their probabilities, and the tokens that follow the last pass.
struct Drafted {
    passes: Vec<[(u32, f32); BRANCHES]>,
    rest: Vec<u32>,
    /// The acceptance of the model's drafts, how sure the model was of them, and the acceptance of matches.
    words: [u32; 3],
}

impl Drafted {
    fn random(random: &mut Random) -> Self {
        let pass = |random: &mut Random| {
            let first = random.below(VOCAB as usize) as u32;
            let mut left = 0.9;
            // Now and then a token that the model lacks.
            std::array::from_fn(|i| {
                left *= 0.2 + 0.5 * random.uniform().abs();
                ((first + i as u32 * 13) % VOCAB + if i > 0 && random.below(9) == 0 { VOCAB } else { 0 }, left)
            })
        };
        let (passes, rest) = (random.below(12), random.below(4));
        Self {
            passes: (0..passes).map(|_| pass(random)).collect(),
            rest: (0..rest).map(|_| random.below(VOCAB as usize) as u32).collect(),
            words: [random.below(ONE as usize) as u32, 1 + random.below(ONE as usize) as u32, UNTRIED],
        }
    }

    fn trunk(&self) -> Vec<u32> {
        self.passes.iter().map(|pass| pass[0].0).chain(self.rest.iter().copied()).collect()
    }

    /// Every node: its token, the probability of its path, and the index of its parent in the list.
    fn nodes(&self, branches: usize) -> Vec<(u32, f64, Option<usize>)> {
        let [was, said, by_match] = self.words.map(f64::from);
        let (mut nodes, mut trunk, mut worth) = (Vec::new(), None, 1.0);
        for pass in &self.passes {
            let mut next = None;
            for (i, &(token, share)) in pass.iter().enumerate().take(branches) {
                if token < VOCAB {
                    let node = worth * (f64::from(share) * was / said).min(1.0);
                    nodes.push((token, node, trunk));
                    next = next.or((i == 0).then_some((nodes.len() - 1, node)));
                }
            }
            let (node, share) = next.unwrap();
            (trunk, worth) = (Some(node), share);
        }
        for &token in &self.rest {
            worth *= by_match / f64::from(ONE);
            nodes.push((token, worth, trunk));
            trunk = Some(nodes.len() - 1);
        }
        nodes
    }
}

/// A device's memory of one sequence.
struct World {
    history: Buffer<i32>,
    words: Buffer<u32>,
    columns: [Buffer<u32>; 4],
    paths: Buffer<u64>,
    told: Buffer<u32>,
    ring: Buffer<u32>,
}

impl World {
    fn new(length: usize) -> Self {
        let mut words = [0; STATE_WORDS];
        words[SequenceState::LENGTH] = length as u32;
        Self {
            history: Buffer::from_slice(&vec![7; length + 64]),
            words: Buffer::from_slice(&words),
            columns: std::array::from_fn(|_| Buffer::from_slice(&[99; MAX_ROWS as usize])),
            paths: Buffer::from_slice(&[!0; MOST]),
            told: Buffer::from_slice(&[0; 4]),
            ring: Buffer::from_slice(&[0; Report::WORDS]),
        }
    }

    fn rows(&self, is_tree: bool) -> Rows {
        let [count, tokens, positions, sequences] = self.columns.each_ref().map(Buffer::ptr_mut);
        let paths = if is_tree { self.paths.ptr_mut() } else { Default::default() };
        Rows { count, tokens, positions, sequences, paths }
    }

    fn state(&self) -> SequenceState {
        SequenceState { history: self.history.ptr_mut(), words: self.words.ptr_mut() }
    }

    fn plan(&self, drafted: &Drafted, (most, branches): (u32, u32), cost: Cost, max_length: u32, is_tree: bool) {
        let mut words = [0; DraftWords::COUNT];
        words[DraftWords::CHAINED] = drafted.passes.len() as u32;
        [words[DraftWords::WANTED], words[DraftWords::BEHIND], words[DraftWords::AGREED]] = [5, 300, 3];
        [words[DraftWords::MODEL], words[DraftWords::CONFIDENCE], words[DraftWords::NGRAM]] = drafted.words;
        let mut notes = vec![0; MOST * Note::WORDS];
        for (pass, note) in drafted.passes.iter().zip(notes.chunks_mut(Note::WORDS)) {
            let total = (UNIT_MASS as f64 / f64::from(pass[0].1)) as u64;
            [note[Note::TOTAL], note[Note::TOTAL + 1]] = [total as u32, (total >> 32) as u32];
            note[Note::MAX] = 2f32.to_bits();
            for (i, (token, share)) in pass.iter().enumerate() {
                note[Note::TOP + 2 * i] = *token;
                note[Note::TOP + 2 * i + 1] = (2.0 + (share / pass[0].1).ln()).to_bits();
            }
        }
        let mut drafts = vec![0];
        drafts.extend(drafted.trunk().iter().map(|&token| token as i32));
        let trunk = Buffer::from_slice(&[drafts.len() as i32]);
        drafts.resize(MOST, -1);
        let (drafts, words) = (Buffer::from_slice(&drafts), Buffer::from_slice(&words));
        let (notes, counters) = (Buffer::from_slice(&notes), Buffer::from_slice(&[3u32; 40]));
        let plan = PlanTree {
            rows: self.rows(is_tree),
            state: self.state(),
            words: words.ptr(),
            drafts: drafts.ptr(),
            draft_rows: trunk.ptr(),
            likeliest: Likeliest { notes: notes.ptr(), targets: Default::default(), target_count: 0, vocab: VOCAB },
            counters: Counters { words: counters.ptr_mut(), count: 40 },
            told: self.told.ptr_mut(),
            told_reports: 4,
            cost,
            most,
            branches,
            max_length,
        };
        run::<tree::plan_tree>([1, 1, 1], 0, 0, plan);
        assert_eq!(counters.to_vec(), [0; 40]);
    }

    fn planned(&self) -> Vec<(u32, u32)> {
        let [count, tokens, positions, _] = self.columns.each_ref().map(Buffer::to_vec);
        (0..count[0] as usize).map(|row| (tokens[row], positions[row])).collect()
    }

    fn paths(&self) -> Vec<Path> {
        let count = self.columns[0].to_vec()[0] as usize;
        self.paths.to_vec()[..count].iter().map(|&word| Path::from_word(word)).collect()
    }

    /// Accepts what comes after each row; returns the tokens that are reported.
    fn accept(&self, after: &[u32], stop: u32, max_length: u32) -> Vec<u32> {
        let mut sampled = after.to_vec();
        sampled.resize(MAX_ROWS as usize, 99);
        let (sampled, stops) = (Buffer::from_slice(&sampled), Buffer::from_slice(&[stop]));
        let uses = Buffer::from_slice(&[0u32; 2 * VOCAB as usize]);
        let accept = Accept {
            rows: self.rows(true),
            state: self.state(),
            sampled: sampled.ptr(),
            best: Default::default(),
            stop_tokens: stops.ptr(),
            uses: uses.ptr_mut(),
            draft: DraftState { step_idx: Default::default(), rows: Default::default(), proposed: Default::default() },
            ring: self.ring.ptr_mut(),
            ring_reports: 1,
            stop_count: 1,
            max_length,
            first_row: 0,
        };
        run::<step::accept>([1, 1, 1], 0, 0, accept);
        let report = self.ring.to_vec();
        report[Report::TOKENS..][..report[Report::COUNT] as usize].to_vec()
    }
}

#[test]
fn the_best_nodes_are_planned() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let drafted = Drafted::random(&mut random);
        let (most, branches) = (1 + random.below(MOST - 1) as u32, 1 + random.below(BRANCHES) as u32);
        let length = 1 + random.below(300);
        let max_length = (length + 1 + random.below(40)) as u32;
        let (world, is_tree) = (World::new(length), random.below(4) > 0);
        world.plan(&drafted, (most, branches), Cost::default(), max_length, is_tree);

        let newest = length as u32 - 1;
        let room = (most as usize).min(max_length as usize - length - 1);
        // The end of a split must not cut a tree, so near it there is only a chain.
        let branching = is_tree && newest % 256 + (room as u32) < 256;
        let nodes = drafted.nodes(if branching { branches as usize } else { 1 });
        let mut order: Vec<usize> = (0..nodes.len()).collect();
        order.sort_by(|&a, &b| nodes[b].1.total_cmp(&nodes[a].1));
        let planned = world.planned();
        assert_eq!(planned.len(), 1 + room.min(nodes.len()), "seed {seed}");
        assert_eq!(planned[0], (7, newest));
        // The nodes are as good as the best, whichever of equal ones they are, and each comes after its parent.
        let mut found = vec![None; planned.len()];
        let mut sum = 0.0;
        for (row, &(token, position)) in planned.iter().enumerate().skip(1) {
            let path = if is_tree { world.paths()[row] } else { Path::of_chain(row as u32) };
            assert_eq!(position, newest + path.depth());
            let parent = if path.depth() == 1 { None } else { found[path.parent() as usize] };
            let is_this = |&i: &usize| nodes[i].0 == token && nodes[i].2 == parent && !found.contains(&Some(i));
            let node = (0..nodes.len()).find(is_this).unwrap_or_else(|| panic!("seed {seed}: row {row} is no node"));
            found[row] = Some(node);
            sum += nodes[node].1;
        }
        let best: f64 = order.iter().take(room).map(|&i| nodes[i].1).sum();
        assert!((sum - best).abs() <= 1e-3 * best, "seed {seed}: {sum} of {best}");
        let by_model = found.iter().flatten().filter(|&&i| i < nodes.len() - drafted.rest.len()).count();
        let chained = drafted.passes.len() as u32;
        let told = DraftReport { by_model: by_model as u32, chained, wanted: 5, agreed: 3, behind: 300 };
        assert_eq!(DraftReport::from_word(world.told.to_vec()[0]), told, "seed {seed}");
    }
}

#[test]
fn a_node_is_worth_its_row_or_is_not_run() {
    let passes = vec![[(1, 0.6), (2, 0.2), (3, 0.1), (4, 0.001)], [(5, 0.5), (6, 0.3), (7, 0.1), (8, 0.05)]];
    let run_at = |was: u32, any: u32| {
        let drafted = Drafted { passes: passes.clone(), rest: Vec::new(), words: [was, ONE * 55 / 100, 0] };
        let world = World::new(9);
        world.plan(&drafted, (15, 4), Cost { any, each: ONE / 64 }, 100, true);
        world.planned().iter().map(|row| row.0).collect::<Vec<_>>()
    };
    // The model is as sure as it says. All nodes run but the token of one in a thousand, and those that hardly come
    // behind another.
    assert_eq!(run_at(ONE * 55 / 100, 0), [7, 1, 5, 2, 6, 3, 7]);
    // Where any draft costs half a step, those that are worth it at all are worth more rows.
    assert!(run_at(ONE * 55 / 100, ONE / 2).len() >= 7);
    // Where any draft costs two steps, none is worth it.
    assert_eq!(run_at(ONE * 55 / 100, 2 * ONE), [7]);
    // The model's drafts are hopeless.
    assert_eq!(run_at(ONE / 100, 0), [7]);
}

/// After each row of a tree the model says something. The path of nodes that agree is accepted.
#[test]
fn the_path_that_is_right_is_accepted() {
    for seed in 0..200 {
        let mut random = Random::new(seed);
        let drafted = Drafted::random(&mut random);
        let world = World::new(10);
        world.plan(&drafted, (15, 4), Cost::default(), 60, true);
        let (rows, paths) = (world.planned(), world.paths());
        // After each row the model says one of its children, or something else.
        let children = |row: usize| {
            let is_child = |&child: &usize| child > 0 && paths[child].parent() as usize == row;
            (0..rows.len()).filter(is_child).collect::<Vec<_>>()
        };
        let after: Vec<u32> = (0..rows.len())
            .map(|row| {
                let children = children(row);
                if children.is_empty() || random.below(5) == 0 {
                    77
                } else {
                    rows[children[random.below(children.len())]].0
                }
            })
            .collect();
        let (mut row, mut expected) = (0, Vec::new());
        let (stop, max_length) = (after[random.below(after.len())], 11 + random.below(8));
        let stop = if random.below(2) == 0 { stop } else { 99 };
        let path = loop {
            expected.push(after[row]);
            let next = children(row).into_iter().find(|&child| rows[child].0 == after[row]);
            if after[row] == stop || 10 + expected.len() >= max_length || next.is_none() {
                break paths[row];
            }
            row = next.unwrap();
        };
        assert_eq!(world.accept(&after, stop, max_length as u32), expected, "seed {seed}");
        let words = world.words.to_vec();
        assert_eq!(words[SequenceState::LENGTH] as usize, 10 + expected.len());
        let word = u64::from(words[SequenceState::PATH]) | u64::from(words[SequenceState::PATH + 1]) << 32;
        assert_eq!(Path::from_word(word), path, "seed {seed}");
    }
}

#[test]
fn a_path_knows_its_rows() {
    // Rows 1 and 2 are children of the root, 5 and 9 of 2 and of 5.
    let path = Path::ROOT.child(2).child(5).child(9);
    assert_eq!(path.depth(), 3);
    assert_eq!([0, 1, 2, 3].map(|depth| path.row_at(depth)), [0, 2, 5, 9]);
    assert_eq!((path.parent(), Path::ROOT.child(7).parent()), (5, 0));
    assert_eq!(path.rows(), 1 << 2 | 1 << 5 | 1 << 9);
    assert_eq!([0, 1, 2, 3].map(|depth| path.until(depth).rows()), [0, 1 << 2, 1 << 2 | 1 << 5, path.rows()]);
    assert_eq!(path.until(1), Path::ROOT.child(2));
}

#[test]
fn a_chain_is_a_tree_of_only_children() {
    let mut path = Path::ROOT;
    for row in 0..16 {
        assert_eq!(path, Path::of_chain(row));
        assert_eq!(path.rows(), (1 << row << 1) - 2);
        if row < 15 {
            path = path.child(row + 1);
        }
    }
}
