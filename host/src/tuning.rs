//! Numbers that were measured, in a table for each target: from how many rows on a path is used, how much of a card it
//! takes. Two of them are the same for all cards. None of them changes a bit of any output.
//!
//! # Adding a card
//! Add a table, and say in [`Tuning::of`] which cards it is for, by what they can do. `warpdraft bench` and the
//! examples of `benches` measure what these numbers decide.

use std::ops::RangeInclusive;

use gpu_kernels::batched::MAX_BATCHED_ROWS;
use gpu_kernels::drafting;

use crate::device::Capabilities;

/// Most rows of a pass over prompts: every weight is read once for so many. One number, since what a model needs of
/// memory is told before a card is known.
pub const PASS_ROWS: usize = 8192;

/// What a draft adds to a decode step on a device, between what it does with bf16 weights and with packed ones
/// (`docs/reference/kernels/decode.md`). One number, so that the same text takes the same steps on every card.
pub(crate) const DRAFT_COST: drafting::Cost = drafting::Cost { any: 0, each: drafting::ONE / 64 };

/// What a layer of a decode step takes besides reading its weights, in bytes that could be read meanwhile
/// (`docs/reference/kernels/decode.md`): what a pass of a draft model costs follows from it.
pub(crate) const DRAFT_LAYER_BYTES: u64 = 32 << 20;

/// What work takes until it has been measured, in seconds: what any card of the last years does.
pub(crate) mod first_guess {
    /// Bytes a second over the bus.
    const BUS: f64 = 40e9;
    /// Operations a second of GEMMs of many rows.
    const GEMM: f64 = 400e12;
    /// Bytes a second of memory that is read, and rows for which weights are read once.
    const READ: f64 = 1e12;
    const ROWS: f64 = 64.0;

    /// For a page of so many bytes to leave the device and come back.
    pub(crate) fn swap(bytes: f64) -> f64 {
        2.0 * bytes / BUS
    }

    /// For a row of a prompt, by the bytes of the weights in bf16: two operations for each weight where prompts have
    /// passes of their own.
    pub(crate) fn row(weight_bytes: f64, prompts_apart: bool) -> f64 {
        if prompts_apart { weight_bytes / GEMM } else { weight_bytes / (ROWS * READ) }
    }
}

/// What is good for a target.
#[derive(Debug, PartialEq)]
pub struct Tuning {
    /// What a person calls the target.
    pub name: &'static str,
    /// Sequences of a batch at once, where nothing is said.
    pub sequences: u32,
    /// Rows of a batch's step, where nothing is said and prompts have no passes of their own.
    pub step_rows: u32,
    /// How many rows of prompts are best read in together: the cheapest of these. Over fewer, more passes end with idle
    /// SMs; over more, more slots of a batch wait.
    pub prompt_rows: RangeInclusive<u32>,
    /// Prompts are read in sooner than enough of them wait, once they have missed a token for each so many that
    /// generate: a pass over few rows takes about so much of a decode step.
    pub prompt_share: u32,
    /// Passes over at least so many rows of sequences have their GEMMs as launches.
    pub gemm_rows: u32,
    /// Passes over at most so many rows of sequences read codes where bf16 weights are beside them.
    pub code_rows: u32,
    /// Tiles of a prompt's attention from which on CTAs in pairs are faster.
    pub paired_tiles: u32,
    /// Full pages that a step has to read for them to be packed; `usize::MAX` where plain ones are read sooner than
    /// packed ones are unpacked.
    pub packed_pages: usize,
    /// Bytes of bf16 that a step reads for each layer, those of the output head shared out, from which on it is sooner
    /// done with weights packed without loss.
    pub lossless_from: u64,
    /// SMs that a copy over the bus wants: it is no faster with more.
    pub copy_sms: u32,
    /// How GEMMs of many rows are cut.
    pub gemm: GemmTuning,
}

/// By what a GEMM's [cut](crate::gemm::Cut) is chosen, and how it is launched.
#[derive(Debug, PartialEq)]
pub struct GemmTuning {
    /// What a round of tiles takes, for each cut in the order of [`Cut::ALL`](crate::gemm::Cut::ALL), where 100 is one
    /// of 128 rows × 256 weight rows. (A tile of 128 weight rows is somewhat more than half the work of one of 256.)
    pub rounds: [u32; 5],
    /// What a second launch adds: it begins and ends somewhat later.
    pub second_launch: u32,
    /// Rows from which on it pays to share tiles in clusters; and multiples of rows of which 4 × 2 clusters pay with
    /// fewer.
    pub cluster_rows: u32,
    /// See `cluster_rows`.
    pub whole_cluster_rows: u32,
    /// Rows of a band of tiles, which are walked together so that L2 has what they share: of blocks, and of clusters.
    pub band_rows: [u32; 2],
    /// GEMMs of more input features than this begin no launch early on more than half of the card.
    pub long_k: u32,
}

impl Tuning {
    /// NVIDIA H100.
    pub const H100: Self = Self {
        name: "H100",
        sequences: 512,
        step_rows: 256,
        prompt_rows: 4096..=6144,
        prompt_share: 2,
        gemm_rows: 385,
        code_rows: 128,
        paired_tiles: 32,
        packed_pages: 512,
        lossless_from: 64 << 20,
        copy_sms: gpu_kernels::token_copy::SMS,
        gemm: GemmTuning {
            rounds: [56, 95, 100, 99, 97],
            second_launch: 3,
            cluster_rows: 2048,
            whole_cluster_rows: 512,
            band_rows: [1024, 2048],
            long_k: 4096,
        },
    };

    /// NVIDIA H200: the same SMs, with memory that is half as fast again.
    pub const H200: Self = Self { name: "H200", packed_pages: usize::MAX, ..Self::H100 };

    /// Every other card, of which none was measured: what takes the fewest bets.
    pub const OTHER: Self = Self { name: "other cards", sequences: 256, ..Self::H100 };

    /// The emulator: little of everything, since it runs lane by lane.
    pub const EMULATOR: Self = Self { name: "emulator", sequences: 8, ..Self::H100 };

    /// From so many bytes of memory a cycle and SM on a card is taken for an H200: an H100 has 12.8, an H200 18.8.
    const FAST_MEMORY: f64 = 16.0;

    /// The table for what can do this.
    pub fn of(capabilities: &Capabilities) -> &'static Self {
        match capabilities.bytes_per_cycle {
            None => &Self::EMULATOR,
            Some(bytes) if bytes >= Self::FAST_MEMORY && capabilities.has_gemms() => &Self::H200,
            Some(_) if capabilities.has_gemms() => &Self::H100,
            Some(_) => &Self::OTHER,
        }
    }
}

const _: () = assert!(Tuning::H100.sequences <= MAX_BATCHED_ROWS && Tuning::H100.gemm_rows <= MAX_BATCHED_ROWS);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Level;

    #[test]
    fn a_table_is_chosen_by_what_a_card_can_do() {
        let hopper = Capabilities {
            level: Level::Sm90a,
            bulk_copies: true,
            clusters: true,
            wgmma: true,
            early_launches: true,
            shared_bytes: 227 << 10,
            l2_bytes: 50 << 20,
            sms: 132,
            bytes_per_cycle: Some(12.8),
        };
        assert_eq!(hopper.tuning(), &Tuning::H100);
        let h200 = Capabilities { bytes_per_cycle: Some(18.8), ..hopper };
        assert_eq!(h200.tuning(), &Tuning::H200);
        assert_eq!(Capabilities { wgmma: false, ..h200 }.tuning(), &Tuning::OTHER);
        assert_eq!(Capabilities { bytes_per_cycle: None, ..hopper }.tuning(), &Tuning::EMULATOR);
    }
}
