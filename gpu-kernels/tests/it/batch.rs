//! The kernels that a step of many sequences needs beside the forward pass.

use crate::common::{Random, reordered, run};
use cuda_std::bf16;
use cuda_std::emulator::Buffer;
use gpu_kernels::batch::{self, ClearRows, ListRecords, PageRecords, PickRows, Put, TakeTokens};
use gpu_kernels::linear::N_TILE;
use gpu_kernels::norm::Residual;
use gpu_kernels::sample::GENERATED;

#[test]
fn words_go_where_they_belong() {
    let entries: Vec<[u32; 2]> = (0..300).map(|i| [i * 7 % 1000, i + 1]).collect();
    let list = Buffer::from_slice(&entries.concat());
    let words = Buffer::from_slice(&[9u32; 1000]);
    let grid = [batch::blocks(entries.len()), 1, 1];
    run::<batch::put_words>(grid, 0, 1, Put { entries: list.ptr(), to: words.ptr_mut(), count: 300 });
    let mut expected = [9u32; 1000];
    for [place, value] in entries {
        expected[place as usize] = value;
    }
    assert_eq!(words.to_vec(), expected);
}

#[test]
fn rows_take_tokens_that_were_chosen_before() {
    const VOCAB: usize = 50;
    let sampled = Buffer::from_slice(&(0..400u32).map(|i| i * 11 % VOCAB as u32).collect::<Vec<_>>());
    // Row 2 i takes choice 399 - i; every third token is counted in `uses`.
    let entry = |i: u32| [2 * i, 399 - i, if i.is_multiple_of(3) { i / 3 } else { TakeTokens::NOWHERE }];
    let entries: Vec<u32> = (0..300).flat_map(entry).collect();
    let (entries, tokens) = (Buffer::from_slice(&entries), Buffer::from_slice(&[7777u32; 600]));
    let uses = Buffer::from_slice(&[3u32; 100 * VOCAB]);
    let take = TakeTokens {
        entries: entries.ptr(),
        sampled: sampled.ptr(),
        tokens: tokens.ptr_mut(),
        uses: uses.ptr_mut(),
        vocab: VOCAB as u32,
        count: 300,
    };
    run::<batch::take_tokens>([batch::blocks(300), 1, 1], 0, 5, take);
    let (sampled, tokens) = (sampled.to_vec(), tokens.to_vec());
    let mut expected = [3u32; 100 * VOCAB];
    for i in 0..300 {
        let token = sampled[399 - i];
        assert_eq!(tokens[2 * i..][..2], [token, 7777]);
        if i % 3 == 0 {
            expected[i / 3 * VOCAB + token as usize] += GENERATED;
        }
    }
    assert_eq!(uses.to_vec(), expected);
}

#[test]
fn rows_are_cleared_and_their_neighbours_are_not() {
    let words = Buffer::from_slice(&[5u32; 5 * 301]);
    let rows = Buffer::from_slice(&[3u32, 1]);
    let clear = ClearRows { rows: rows.ptr(), of: words.ptr_mut(), len: 301 };
    run::<batch::clear_rows>([batch::blocks(301), 2, 1], 0, 3, clear);
    let expected: Vec<u32> = [5, 0, 5, 0, 5].iter().flat_map(|&b| [b; 301]).collect();
    assert_eq!(words.to_vec(), expected);
}

#[test]
fn picked_rows_come_in_their_order() {
    const DIM: usize = 2176;
    let mut random = Random::new(1);
    let (scaled, squares) = (random.bf16s(9 * DIM), random.floats(9 * DIM / N_TILE as usize));
    let (from, from_squares) = (Buffer::from_slice(&reordered(&scaled, DIM, false)), Buffer::from_slice(&squares));
    let to = Buffer::<bf16>::new_poisoned(3 * DIM);
    let to_squares = Buffer::<f32>::new_poisoned(3 * DIM / N_TILE as usize);
    let picks = [8, 0, 5];
    let rows = Buffer::from_slice(&picks);
    let residual = Residual {
        x: Default::default(),
        scaled: to.ptr_mut(),
        squares: to_squares.ptr_mut(),
        spans: Default::default(),
        dim: DIM as u32,
    };
    let pick = PickRows { rows: rows.ptr(), first: 0, scaled: from.ptr(), squares: from_squares.ptr(), to: residual };
    let n_tiles = DIM / N_TILE as usize;
    let check = |rows: [usize; 3]| {
        let (to, to_squares) = (to.to_vec(), to_squares.to_vec());
        for (i, row) in rows.into_iter().enumerate() {
            assert!(to[i * DIM..][..DIM] == scaled[row * DIM..][..DIM]);
            assert!(to_squares[i * n_tiles..][..n_tiles] == squares[row * n_tiles..][..n_tiles]);
        }
    };
    run::<batch::pick_rows>([1, 3, 1], 0, 4, pick);
    check(picks.map(|row| row as usize));
    run::<batch::pick_rows>([1, 3, 1], 0, 5, PickRows { rows: Default::default(), first: 4, ..pick });
    check([4, 5, 6]);
}

#[test]
fn a_page_is_listed_as_its_records_in_every_layer() {
    let moves = [[4u32, 0], [1, 7]];
    let (layers, records) = (3, 40);
    let from = PageRecords { page: records, layer: 5 * records };
    let to = PageRecords { page: layers * records, layer: records };
    let count = 2 * (layers * records) as usize;
    let list = Buffer::from_slice(&moves.concat());
    let (src, dst) = (Buffer::from_slice(&vec![-1i32; count + 1]), Buffer::from_slice(&vec![-1i32; count + 1]));
    let params = ListRecords {
        moves: list.ptr(),
        from,
        to,
        src: src.ptr_mut(),
        dst: dst.ptr_mut(),
        moves_count: 2,
        layers,
        records,
    };
    run::<batch::list_records>([batch::blocks(count), 1, 1], 0, 5, params);
    let mut expected = Vec::new();
    for [a, b] in moves {
        for layer in 0..layers {
            for record in 0..records {
                let place = |page: u32, at: PageRecords| (page * at.page + layer * at.layer + record) as i32;
                expected.push((place(a, from), place(b, to)));
            }
        }
    }
    expected.push((-1, -1));
    let found: Vec<(i32, i32)> = src.to_vec().into_iter().zip(dst.to_vec()).collect();
    assert_eq!(found, expected);
}
