//! Checks of a plan: that it names only what exists. The device trusts every number in it.

use super::passes::SequenceRows;
use crate::batch::backend::Start;
use crate::batch::limits::Limits;
use crate::batch::plan::Plan;

/// Checks every number of a plan, and the tokens of the sequences that start.
///
/// # Panics
/// If a number names something that does not exist, or a slot has work twice.
pub fn check_plan(plan: &Plan, starts: &[Start<'_>], limits: &Limits, vocab: usize) {
    let within = |what: &str, number: u32, most: u32| assert!(number < most, "{what} {number} of {most}");
    let entries = limits.context.div_ceil(limits.page_tokens) as u32;
    let slot = |number| within("slot", number, limits.sequences);
    let page = |number| within("page", number, limits.pages);
    let host_page = |number| within("page of the host", number, limits.host_pages);
    plan.cleared.iter().for_each(|cleared| page(*cleared));
    plan.swap_out.iter().for_each(|moved| {
        page(moved.from);
        host_page(moved.to);
    });
    plan.copies.iter().for_each(|moved| {
        page(moved.from);
        page(moved.to);
    });
    plan.swap_in.iter().for_each(|moved| {
        host_page(moved.from);
        page(moved.to);
    });
    plan.tables.iter().for_each(|entry| {
        slot(entry.slot);
        within("entry of a page table", entry.index, entries);
        page(entry.page);
    });
    let mut has_work = vec![false; limits.sequences as usize];
    for work in &plan.work {
        slot(work.slot);
        // Two works of a slot would have the same rows, choices and uses.
        let is_second = std::mem::replace(&mut has_work[work.slot as usize], true);
        assert!(!is_second, "slot {} has work twice", work.slot);
    }
    plan.started.iter().for_each(|started| slot(started.slot));
    assert_eq!(plan.started.len(), starts.len(), "sequences that start, and what is known of them");
    for start in starts {
        let unknown = start.tokens.iter().find(|&&token| token as usize >= vocab);
        assert!(unknown.is_none(), "token {unknown:?} of {vocab}");
    }
}

/// Checks that the rows of a step are within the context, and that there is room for their choices.
///
/// # Panics
/// If not.
pub fn check_rows(rows: &[SequenceRows], limits: &Limits, choices: usize) {
    for rows in rows {
        let end = rows.start + rows.tokens.len();
        assert!(end <= limits.context, "positions below {end}, and a context of {}", limits.context);
    }
    let chosen: usize = rows.iter().map(|rows| rows.tokens.len().saturating_sub(rows.chosen_from)).sum();
    assert!(chosen <= choices, "{chosen} choices, and room for {choices}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::plan::{PageCopy, Started, SwapIn, SwapOut, TableEntry, Work};
    use model::Sampling;

    const LIMITS: Limits = Limits {
        context: 100,
        sequences: 3,
        generating: 3,
        rows: 8,
        page_tokens: 16,
        pages: 20,
        host_pages: 5,
        drafts: 0,
        draft_rows: 0,
        prompt_rows: 0,
        prompt_share: 2,
        prompts_apart: false,
        tiles: &[],
    };

    fn refuses(plan: Plan, tokens: Option<&[u32]>) -> bool {
        let start = tokens.map(|tokens| Start {
            tokens,
            prompt: tokens.len(),
            max_length: 50,
            sampling: Sampling::default(),
            stop_tokens: &[],
            logprobs: None,
            form: None,
        });
        let checked = || check_plan(&plan, start.as_slice(), &LIMITS, 10);
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(checked)).is_err()
    }

    #[test]
    fn a_number_of_nothing_is_refused() {
        let work = |slot| Work { slot, start: 0, rows: 1, samples: false, most_drafts: 0 };
        let entry = |slot, index, page| TableEntry { slot, index, page };
        let good = Plan {
            swap_out: vec![SwapOut { from: 19, to: 4 }],
            copies: vec![PageCopy { from: 0, to: 19 }],
            swap_in: vec![SwapIn { from: 4, to: 3 }],
            started: vec![Started { slot: 2, sequence: 7 }],
            tables: vec![entry(2, 6, 19)],
            work: vec![work(2)],
            ..Plan::default()
        };
        assert!(!refuses(good.clone(), Some(&[1, 9])));
        assert!(refuses(good.clone(), Some(&[1, 10])), "a token");
        assert!(refuses(good.clone(), None), "a start that is missing");
        for (what, bad) in [
            ("saved from", Plan { swap_out: vec![SwapOut { from: 20, to: 4 }], ..good.clone() }),
            ("saved to", Plan { swap_out: vec![SwapOut { from: 0, to: 5 }], ..good.clone() }),
            ("copied from", Plan { copies: vec![PageCopy { from: 20, to: 1 }], ..good.clone() }),
            ("copied to", Plan { copies: vec![PageCopy { from: 1, to: 20 }], ..good.clone() }),
            ("brought from", Plan { swap_in: vec![SwapIn { from: 5, to: 3 }], ..good.clone() }),
            ("brought to", Plan { swap_in: vec![SwapIn { from: 0, to: 20 }], ..good.clone() }),
            ("started", Plan { started: vec![Started { slot: 3, sequence: 7 }], ..good.clone() }),
            ("a table's slot", Plan { tables: vec![entry(3, 0, 0)], ..good.clone() }),
            ("a table's entry", Plan { tables: vec![entry(0, 7, 0)], ..good.clone() }),
            ("a table's page", Plan { tables: vec![entry(0, 0, 20)], ..good.clone() }),
            ("work", Plan { work: vec![work(3)], ..good.clone() }),
            ("work of a slot, twice", Plan { work: vec![work(2), work(0), work(2)], ..good.clone() }),
        ] {
            assert!(refuses(bad, Some(&[1])), "{what}");
        }
    }

    #[test]
    fn rows_beyond_the_context_are_refused() {
        let rows =
            |start, count, chosen_from| SequenceRows { slot: 0, start, tokens: vec![0; count], chosen_from, prompt: 0 };
        let refuses = |rows: SequenceRows| std::panic::catch_unwind(|| check_rows(&[rows], &LIMITS, 3)).is_err();
        assert!(!refuses(rows(90, 10, 7)));
        assert!(refuses(rows(91, 10, 9)), "positions");
        assert!(refuses(rows(90, 10, 6)), "choices");
    }
}
