//! Measured numbers, in a table for each target: for example from how many rows on a path is used, or how much of a
//! card it takes. Numbers outside the tables are the same for all cards. None of them changes a bit of any output.
//!
//! # Adding a card
//! Add a table, and say in [`Tuning::of`] which cards it is for, by their capabilities. `warpdraft bench` and the
//! examples of `benches` measure what these numbers decide.

use std::ops::RangeInclusive;

use gpu_kernels::drafting;

use crate::device::Capabilities;
use crate::forward::MOST_PASS_ROWS;
use crate::weights::Compact;

/// Most rows of a pass over prompts, which reads every weight once for all of them. The same for all cards, because how
/// much memory a model needs is told before the card is known.
pub const PASS_ROWS: usize = 8192;

/// What a draft adds to the time of a step wherever steps of one row and of several take the same way: in batches, and
/// on the unfused path. The same for all cards, so that a text takes the same steps on every card.
pub(crate) const DRAFT_COST: drafting::Cost = drafting::Cost { any: 0, each: drafting::ONE / 64 };

/// What the decode kernel takes for each layer besides reading its weights, as the bytes that could be read meanwhile
/// (`docs/reference/kernels/decode.md`). The costs of drafts and of a draft model's passes follow from it. The same for
/// all cards, as [`DRAFT_COST`].
pub(crate) mod layer_bytes {
    /// With one row.
    pub(crate) const ONE_ROW: u64 = 32 << 20;
    /// More for several rows: grid barriers take the place of words.
    pub(crate) const SEVERAL_ROWS: u64 = 24 << 20;
    /// More for each row but the first.
    pub(crate) const EACH_ROW: u64 = 2 << 20;
}

/// What drafts add to the time of a step of the decode kernel besides [`layer_bytes`], in thousandths of a step of one
/// row: a row's products hide behind the reading of bf16 weights, and less so behind that of fewer bytes.
pub(crate) const fn draft_permille(matrices: &Compact) -> drafting::Cost {
    let (any, each) = match matrices {
        Compact::None => (0, 0),
        Compact::Packed(_) => (30, 4),
        Compact::Quantized(_) => (180, 10),
        Compact::E4m3(_) => (330, 10),
    };
    drafting::Cost { any, each }
}

/// How long work is taken to last until it has been measured, in seconds. Cards of recent years are about so fast.
pub(crate) mod first_guess {
    /// Bytes a second over the bus.
    const BUS: f64 = 40e9;
    /// Operations a second of GEMMs of many rows.
    const GEMM: f64 = 400e12;
    /// Bytes of memory that are read a second, and rows for which weights are read once.
    const READ: f64 = 1e12;
    const ROWS: f64 = 64.0;

    /// The time for a page of so many bytes to leave the device and come back.
    pub(crate) fn swap(bytes: f64) -> f64 {
        2.0 * bytes / BUS
    }

    /// The time for a row of a prompt, from the bytes of the weights in bf16. Where prompts have passes of their own,
    /// these are bound by arithmetic: two operations for each weight of two bytes. Otherwise they are bound by reading
    /// the weights.
    pub(crate) fn row(weight_bytes: f64, prompts_apart: bool) -> f64 {
        if prompts_apart { weight_bytes / GEMM } else { weight_bytes / (ROWS * READ) }
    }
}

/// The numbers for a target.
#[derive(Debug, PartialEq)]
pub struct Tuning {
    /// What a person calls the target.
    pub name: &'static str,
    /// Most sequences of a batch at once, by default.
    pub sequences: u32,
    /// Most rows of a batch's step, by default, where prompts have no passes of their own.
    pub step_rows: u32,
    /// Candidates for how many rows of prompts a batch reads in together. The cheapest is chosen. With fewer rows, more
    /// passes end with idle SMs; with more, more slots of a batch wait.
    pub prompt_rows: RangeInclusive<u32>,
    /// Prompts wait for others, to be read in together, until they have missed one token for every this many sequences
    /// that generate. A pass over few rows takes about a decode step divided by this, and so costs the others as many
    /// tokens.
    pub prompt_share: u32,
    /// Passes over at least this many rows of sequences run their GEMMs as separate launches.
    pub gemm_rows: u32,
    /// Passes over at most this many rows of sequences read codes even where bf16 weights are kept beside them.
    pub code_rows: u32,
    /// From this many attention tiles of a prompt on, clusters of two CTAs are faster.
    pub cluster_tiles: u32,
    /// When a batch packs KV pages.
    pub packed_from: PackedFrom,
    /// From this many bytes of bf16 weights for each layer on, a decode step is faster with weights packed without
    /// loss. The output head's bytes are shared out among the layers.
    pub lossless_from: u64,
    /// SMs for a copy over the bus. With more it is no faster.
    pub copy_sms: u32,
    /// How GEMMs of many rows are cut.
    pub gemm: GemmTuning,
}

/// From how many full KV pages on a step's pages are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedFrom {
    /// All full pages that the step has to read.
    pub pages: usize,
    /// Full pages of a sequence in the mean, unless the step attends by [single
    /// warps](fn@gpu_kernels::batched::attend_batch). Where memory is fast, CTAs read a short sequence sooner plain: to
    /// unpack its few pages takes them longer.
    pub mean: usize,
}

/// How a GEMM's [cut](crate::gemm::Cut) is chosen, and how it is launched.
#[derive(Debug, PartialEq)]
pub struct GemmTuning {
    /// The time of a round of tiles in each cut, in the order of [`Cut::ALL`](crate::gemm::Cut::ALL). 100 is the time
    /// of a round of 128 rows × 256 weight rows. (A tile of 128 weight rows is somewhat more than half the work of one
    /// of 256.)
    pub rounds: [u32; 5],
    /// What a second launch adds, in the same unit: it begins and ends somewhat later than the first.
    pub second_launch: u32,
    /// From this many rows on, it pays to share tiles in clusters.
    pub cluster_rows: u32,
    /// With fewer rows, 4 × 2 clusters pay if the number of rows is a multiple of this.
    pub whole_cluster_rows: u32,
    /// Rows of a band of tiles: for single CTAs, and for clusters. Tiles are taken band by band, so that L2 holds the
    /// rows and weights that they share.
    pub band_rows: [u32; 2],
    /// [Tiles of 128 weight rows](crate::gemm::Cut::N128) with more input features than this are not launched early on
    /// more than half of the card.
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
        cluster_tiles: 32,
        packed_from: PackedFrom { pages: 512, mean: 0 },
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
    pub const H200: Self = Self {
        name: "H200",
        sequences: 1024,
        gemm_rows: 384,
        packed_from: PackedFrom { pages: 512, mean: 48 },
        ..Self::H100
    };

    /// Every other card. None was measured, so the numbers are cautious.
    pub const OTHER: Self = Self { name: "other cards", sequences: 256, ..Self::H100 };

    /// The emulator: little of everything, since it runs lane by lane.
    pub const EMULATOR: Self = Self { name: "emulator", sequences: 8, ..Self::H100 };

    /// A Hopper card is taken for an H200 if its memory moves at least this many bytes a cycle for each SM. An H100 has
    /// 12.8, an H200 18.8.
    const FAST_MEMORY: f64 = 16.0;

    /// The table for a device with these capabilities.
    pub fn of(capabilities: &Capabilities) -> &'static Self {
        match capabilities.bytes_per_cycle {
            None => &Self::EMULATOR,
            Some(bytes) if bytes >= Self::FAST_MEMORY && capabilities.has_gemms() => &Self::H200,
            Some(_) if capabilities.has_gemms() => &Self::H100,
            Some(_) => &Self::OTHER,
        }
    }
}

const _: () = assert!(Tuning::H100.sequences <= MOST_PASS_ROWS && Tuning::H200.sequences <= MOST_PASS_ROWS);

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
            shared_bytes: gpu_kernels::HOPPER_SHARED_BYTES,
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
