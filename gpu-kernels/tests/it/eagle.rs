//! The kernels that prepare hidden states for an EAGLE-3 head, against plain definitions.

use crate::common::{Random, RowBuffers, relative_error, run, widen};
use cuda_std::bf16;
use cuda_std::emulator::Buffer;
use gpu_kernels::eagle::{self, GatherStates, KeepState, MakePairs, STATES, States, TakeStates};
use gpu_kernels::exchange::Exchange;
use gpu_kernels::step::MAX_DECODE_ROWS;

const DIM: usize = 384;
const SLOTS: usize = 5;

/// Rows leave their hidden states in a ring for each sequence, which wraps round. Gathering finds those that are still
/// there, side by side. A sequence for which there is no ring leaves none.
#[test]
fn hidden_states_are_found_by_their_positions() {
    let mut random = Random::new(1);
    for runs in [&[(0, 0..1)][..], &[(0, 3..7)], &[(0, 14..19)], &[(1, 2..9), (2, 0..3), (0, 8..10)]] {
        let all: Vec<(u32, u32, u32)> =
            runs.iter().flat_map(|(sequence, positions)| positions.clone().map(move |p| (0, p, *sequence))).collect();
        let (rows, count) = (RowBuffers::new(&all), all.len());
        let ring: Buffer<bf16> = Buffer::from_slice(&vec![bf16::from_f32(9.0); 2 * SLOTS * 3 * DIM]);
        let states = States { states: ring.ptr_mut(), slots: SLOTS as u32, dim: DIM as u32, sequences: 2 };
        let streams: Vec<Vec<f32>> = (0..STATES).map(|_| random.floats(count * DIM)).collect();
        // The grid has one row more than there are rows, which writes nothing.
        let grid = [1, count as u32 + 1, 1];
        for (place, stream) in streams.iter().enumerate() {
            let x = Buffer::from_slice(stream);
            let take = TakeStates { rows: rows.rows(), x: x.ptr(), to: states, place: place as u32 };
            run::<eagle::take_states>(grid, 0, 1, take);
        }
        let is_left = |row: usize| {
            let (_, position, sequence) = all[row];
            let end = runs.iter().find(|run| run.0 == sequence).map_or(0, |run| run.1.end);
            sequence < 2 && position + SLOTS as u32 >= end
        };
        let (there, left): (Vec<_>, Vec<_>) = (0..count).filter(|&row| is_left(row)).map(|row| (all[row], row)).unzip();
        assert!(ring.to_vec().iter().filter(|x| x.to_f32() != 9.0).count() <= left.len() * 3 * DIM);
        let wanted = RowBuffers::new(&there);
        let to = Buffer::from_slice(&vec![bf16::from_f32(7.0); (left.len() + 1) * 3 * DIM]);
        let gather = GatherStates { rows: wanted.rows(), from: states, to: to.ptr_mut() };
        let grid = [GatherStates::blocks(DIM as u32), left.len() as u32 + 1, 1];
        run::<eagle::gather_states>(grid, 0, 2, gather);
        let found = to.to_vec();
        for (i, row) in left.iter().enumerate() {
            let expected = streams.iter().flat_map(|stream| &stream[row * DIM..][..DIM]).map(|&x| bf16::from_f32(x));
            assert!(found[i * 3 * DIM..][..3 * DIM].iter().copied().eq(expected), "row {row} of {runs:?}");
        }
        assert!(found[left.len() * 3 * DIM..].iter().all(|x| x.to_f32() == 7.0));
    }
}

fn rms_norm(x: &[f32], weight: &[bf16], eps: f32) -> Vec<f32> {
    let mean = x.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(&v, w)| (f64::from(v) * scale * f64::from(w.to_f32())) as f32).collect()
}

#[test]
fn a_pair_is_a_normed_embedding_and_a_normed_hidden_state() {
    let (vocab, eps, tokens) = (9, 1e-5, [3u32, 8, 12]);
    let mut random = Random::new(2);
    let (table, norms) = (random.bf16s(vocab * DIM), [random.bf16s(DIM), random.bf16s(DIM)]);
    let hidden: Vec<f32> = random.floats(tokens.len() * DIM).iter().map(|x| 5.0 * x).collect();
    // The head's own hidden states are found by the rows' sequences.
    let sequences = [1, 2, 0];
    let rows: Vec<(u32, u32, u32)> = tokens.iter().zip(sequences).map(|(&token, of)| (token, 0, of)).collect();
    let rows = RowBuffers::new(&rows);
    let buffers = [&table, &norms[0], &norms[1]].map(|numbers| Buffer::from_slice(numbers));
    let given = Buffer::from_slice(&hidden);
    for (norm_before_residual, own, for_decode) in [(0, 0, 0), (1, 0, 1), (0, 1, 0)] {
        let x: Buffer<f32> = Buffer::new_poisoned(tokens.len() * DIM);
        let pairs: Buffer<bf16> = Buffer::new_poisoned(MAX_DECODE_ROWS as usize * 2 * DIM);
        let make = MakePairs {
            rows: rows.rows(),
            hidden: given.ptr(),
            embed: buffers[0].ptr(),
            input_norm: buffers[1].ptr(),
            hidden_norm: buffers[2].ptr(),
            pairs: pairs.ptr_mut(),
            x: x.ptr_mut(),
            exchange: Exchange::default(),
            vocab: vocab as u32,
            dim: DIM as u32,
            eps,
            norm_before_residual,
            own,
            for_decode,
        };
        run::<eagle::make_pairs>([1, tokens.len() as u32, 1], MakePairs::SHARED_BYTES, 3, make);
        let (pairs, x) = (pairs.to_vec(), x.to_vec());
        for (row, &token) in tokens.iter().enumerate() {
            // A token beyond the table takes the table's last row.
            let embed = widen(&table[(token as usize).min(vocab - 1) * DIM..][..DIM]);
            let hidden = &hidden[if own == 1 { sequences[row] as usize } else { row } * DIM..][..DIM];
            let normed = rms_norm(hidden, &norms[1], eps);
            let expected = [rms_norm(&embed, &norms[0], eps), normed.clone()].concat();
            // For a step in one launch rows lie in pieces of 32 elements.
            let piece =
                |i: usize| pairs[(i / 2 * 2 * MAX_DECODE_ROWS as usize + i % 2 * 8 + row) * 32..][..32].to_vec();
            let found = match for_decode {
                0 => widen(&pairs[row * 2 * DIM..][..2 * DIM]),
                _ => widen(&(0..2 * DIM / 32).flat_map(piece).collect::<Vec<_>>()),
            };
            assert!(relative_error(found, &expected) < 1.0 / 256.0, "row {row}");
            let stream = &x[row * DIM..][..DIM];
            let expected = if norm_before_residual == 1 { &normed } else { hidden };
            assert!(relative_error(stream.iter().copied(), expected) < 1e-6, "row {row}");
        }
    }
}

#[test]
fn the_states_of_the_last_rows_are_kept() {
    let x = Random::new(4).floats(4 * DIM);
    let given = Buffer::from_slice(&x);
    let row = |row: usize| &x[row * DIM..][..DIM];
    let none = &vec![7.0; DIM][..];
    for (sequences, expected) in
        [(&[][..], [none; 3]), (&[0, 0], [row(1), none, none]), (&[2, 0, 0, 1], [row(2), row(3), row(0)])]
    {
        let rows: Vec<(u32, u32, u32)> = sequences.iter().map(|&sequence| (0, 0, sequence)).collect();
        let rows = RowBuffers::new(&rows);
        let to = Buffer::from_slice(&vec![7.0; 3 * DIM]);
        let keep = KeepState { rows: rows.rows(), x: given.ptr(), to: to.ptr_mut(), dim: DIM as u32 };
        run::<eagle::keep_state>([1, 4, 1], 0, 5, keep);
        assert_eq!(to.to_vec(), expected.concat(), "{sequences:?}");
    }
}
