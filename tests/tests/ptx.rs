//! The PTX as the assembler sees it, of what answers need and of what measures: valid at every level, and no register
//! spilled to memory but in [`SPILLING`].

use std::path::{Path, PathBuf};
use std::process::Command;

use cuda_builder::FunctionReport;
use host::device::{IMAGES, Image, MAIN, STACK_BYTES};
use rayon::prelude::*;

/// Every module: host's, and that of the benchmarks.
fn images() -> impl Iterator<Item = &'static Image> {
    IMAGES.iter().chain(benches::MODULES)
}

/// ptxas, as `make test` installs it.
fn ptxas() -> PathBuf {
    let path = std::env::var_os("PTXAS").map(PathBuf::from);
    let path = path.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/ptxas"));
    assert!(path.exists(), "{} is missing: run `scripts/ptxas.sh .venv`, or set PTXAS", path.display());
    path
}

/// Kernels that spill, and the most bytes of loads they may: since the GEMM keeps totals beside its sums, these tiles
/// lack registers; decode kernels of one row, in e4m3, and those with attention of many pairs at a time keep some
/// addresses outside of their loops; and tiles of 128 rows of quantised layers have fragments of weights beside as many
/// sums and totals. A defect with a bound, not a licence: shrink it.
const SPILLING: [(&str, u32); 34] = [
    ("gemm_qkv_n192", 8),
    ("gemm_qkv_2x1", 64),
    ("gemm_qkv_4x2", 76),
    ("gemm_swiglu_2x1", 28),
    ("gemm_swiglu_4x2", 40),
    ("gemm_add_2x1", 20),
    ("gemm_add_4x2", 36),
    ("gemm_plain_2x1", 72),
    ("gemm_plain_4x2", 64),
    ("decode_1", 20),
    ("decode_1_e4m3", 32),
    ("decode_1_e4m3_lossless_head", 12),
    ("decode_1_fp8", 32),
    ("decode_1_fp8_lossless_head", 8),
    ("decode_1_int4", 16),
    ("decode_1_int4_f16", 32),
    ("decode_1_int4_f16_lossless_head", 60),
    ("decode_1_int4_lossless_head", 20),
    ("decode_1_lossless", 36),
    ("decode_1_lossless_head", 8),
    ("decode_16_e4m3", 12),
    ("decode_16_fp8", 8),
    ("decode_16_sequences", 0),
    ("decode_16_sequences_e4m3", 8),
    ("decode_16_sequences_fp8", 104),
    ("decode_16_sequences_int4", 104),
    ("decode_16_sequences_int4_f16", 104),
    ("decode_16_sequences_lossless", 76),
    ("decode_16_wgmma_lossless", 36),
    ("decode_tree_e4m3", 16),
    ("decode_tree_wgmma_lossless", 40),
    ("batched_128_fp8", 164),
    ("batched_128_int4", 92),
    ("batched_128_int4_f16", 92),
];

/// The level of cards after Hopper, and what the driver makes its machine code for there.
const AFTER_HOPPER: (&str, [&str; 2]) = ("sm_90", ["sm_100", "sm_120"]);

/// Which kernels may spill there, by how their names begin: in those of decode steps consumers cannot take other warps'
/// registers.
const SPILLING_AFTER_HOPPER: [(&str, u32); 2] = [("decode_", 1008), ("sample_each", 4)];

/// Whether a kernel of an image is assembled for `arch`. Those of cards after Hopper are for one of the two: decode
/// kernels with a short ring for compute capability 12.0, which has no others, and the rest for 10.0. Of quantised
/// weights those kernels are enough that make the most of them, int4 with scales in f16.
fn is_assembled(kernel: &str, arch: &str) -> bool {
    let is_enough = !kernel.contains("_fp8") && (!kernel.contains("_int4") || kernel.contains("_int4_f16"));
    match arch {
        "sm_100" => is_enough && !kernel.contains("_short"),
        "sm_120" => is_enough && kernel.contains("_short"),
        _ => true,
    }
}

/// ptxas's report of these kernels of `module`'s text, as it makes machine code for `arch` of them.
fn assemble(module: &str, ptx: &str, arch: &str, kernels: &[&str]) -> String {
    let folder = std::env::temp_dir().join(format!("warpdraft-ptx-{}-{arch}-{module}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("kernels.ptx");
    std::fs::write(&file, ptx).unwrap();
    let output = Command::new(ptxas())
        .arg(format!("-arch={arch}"))
        .arg(format!("--entry={}", kernels.join(",")))
        .args(["-v", "--split-compile=0", "-o"])
        .args([folder.join("kernels.cubin"), file])
        .output()
        .unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "ptxas for {arch}:\n{text}");
    text
}

/// What ptxas's report says of each kernel, and of each function that one calls.
fn functions(arch: &str, text: &str) -> Vec<FunctionReport> {
    // Products of a warpgroup that wait for each other (C7510 to C7514), registers that cannot be handed over (C7508).
    assert_eq!(text.lines().find(|line| line.contains("(C75")), None, "ptxas for {arch}");
    FunctionReport::read_all(text).unwrap()
}

#[test]
fn no_kernel_spills_or_uses_local_memory_but_those_named() {
    // The assembler has one thread.
    images().par_bridge().for_each(|image| {
        let (level, cards) = AFTER_HOPPER;
        let own = [image.arch];
        // What measures has no kernels with a short ring.
        let cards = if image.module == MAIN { &cards[..] } else { &cards[..1] };
        let archs = if image.arch == level { cards } else { &own };
        archs.par_iter().for_each(|arch| spills_are_named(image, arch));
    });
}

fn spills_are_named(image: &Image, arch: &str) {
    let Image { module, .. } = image;
    let ptx = image.ptx();
    let mut kernels = kernels(image);
    assert_eq!(ptx.matches("\n.visible .entry ").count(), kernels.len(), "{module} for {arch}");
    kernels.retain(|kernel| is_assembled(kernel, arch));
    let report = image.report.map_or_else(|| assemble(module, &ptx, arch, &kernels), str::to_owned);
    let report = functions(arch, &report);
    assert_eq!(report.len(), kernels.len(), "{module} for {arch}");
    assert!(kernels.len() >= 6, "{module} for {arch} has {} kernels", kernels.len());
    // A bounds check or a division that can panic costs registers, and could only trap.
    assert!(!ptx.contains("panicking"), "{module} for {arch} can panic");
    for function in report {
        let FunctionReport { name: ref kernel, stack, spill_stores, spill_loads, .. } = function;
        assert!(image.machine_code.is_none() || stack as usize <= STACK_BYTES, "for {arch}: {function:?}");
        let of_level = SPILLING_AFTER_HOPPER.iter().find(|(begin, _)| kernel.starts_with(begin));
        let of_level = of_level.filter(|_| image.arch == AFTER_HOPPER.0);
        let named = SPILLING.iter().find(|(name, _)| *name == *kernel);
        match of_level.or(named) {
            Some((_, most)) => assert!(spill_loads <= *most, "for {arch}: {function:?}"),
            None => assert_eq!([stack, spill_stores, spill_loads], [0; 3], "for {arch}: {function:?}"),
        }
    }
}

/// The names of an image's kernels.
fn kernels(image: &Image) -> Vec<&'static str> {
    image.layouts.iter().map(|(kernel, _)| *kernel).collect()
}

/// The kernels of a module.
fn kernels_of(arch: &str, module: &str) -> Vec<&'static str> {
    kernels(images().find(|image| image.arch == arch && image.module == module).unwrap())
}

/// What only measurements launch is apart from what answers are made with, which is all that host builds.
#[test]
fn the_main_module_has_what_answers_need_and_no_more() {
    let of_all = [
        "embed",
        "attend",
        "attend_tiles",
        "combine",
        "split_heads",
        "sample",
        "sample_each",
        "accept",
        "accept_and_draft",
        "plan_prompt",
        "plan_decode",
        "plan_draft",
        "next_draft",
        "plan_tree",
        "keep_path",
        "linear_8",
        "linear_add_16",
        "swiglu_64",
        "put_words",
        "pick_rows",
        "clear_rows",
        "take_tokens",
        "take_best",
        "list_records",
        "mask_logits",
        "note_logits",
        "note_chosen",
        "token_copy_4096_i32",
        "ngram_match_mixed_i32",
    ];
    let from_90 = ["decode_1", "decode_16_lossless", "decode_tree", "decode_8_sequences_int4", "pack_weights"];
    let after_hopper = ["decode_short", "decode_short_int4", "decode_tree_short_fp8", "decode_sequences_short"];
    let of_hopper = ["decode_1_e4m3", "batched_64", "batched_128", "prefill_attention", "pack_pages"];
    assert!(IMAGES.iter().all(|image| image.module == MAIN) && benches::MODULES.iter().all(|i| i.module == "bench"));
    for arch in ["sm_80", "sm_90", "sm_90a"] {
        let (main, bench) = (kernels_of(arch, "main"), kernels_of(arch, "bench"));
        let wanted = [
            (&of_all[..], true),
            (&from_90, arch != "sm_80"),
            (&after_hopper, arch == "sm_90"),
            (&of_hopper, arch == "sm_90a"),
        ];
        for (kernels, are_there) in wanted {
            for kernel in kernels {
                assert_eq!(main.contains(kernel), are_there, "{kernel} in the main module for {arch}");
            }
        }
        let measuring =
            ["ceiling_", "ngram_windows", "ngram_match_i", "token_copy_sorted", "gemm_plain", "draft_script"];
        for kernel in &main {
            assert!(!bench.contains(kernel), "{kernel} is in both modules for {arch}");
            assert!(
                !measuring.iter().any(|name| kernel.starts_with(name)),
                "{kernel} is in the main module for {arch}"
            );
        }
        assert!(bench.len() > 40, "{} kernels for measurements on {arch}", bench.len());
    }
}

/// Machine code is for Hopper alone, and for all of its kernels: `make test` has an assembler.
#[test]
fn hopper_has_machine_code() {
    for image in images() {
        assert_eq!(image.machine_code.is_some(), image.arch == "sm_90a", "{} for {}", image.module, image.arch);
        if let Some(code) = image.machine_code {
            assert!(code.starts_with(b"\x7fELF"), "{}", image.module);
            for (kernel, _) in image.layouts {
                let name = format!(".text.{kernel}\0");
                assert!(code.windows(name.len()).any(|window| window == name.as_bytes()), "{kernel}");
            }
        }
    }
}
