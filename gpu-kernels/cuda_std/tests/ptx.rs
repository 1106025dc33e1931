//! The device's bodies of the intrinsics become the PTX that they are meant to be, for sm_80 and for sm_90a.
//!
//! Needs what the device build needs: a compiler with the sources of `core`. If `ptxas` is in the path, the PTX is
//! assembled as well.

use std::path::Path;
use std::process::Command;

use cuda_builder::CudaBuilder;

/// The build of the test kernels for an architecture.
fn builder(arch: &str) -> CudaBuilder {
    // The folder that build scripts use, too, so that `core` is compiled once.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("ptx").join(arch);
    CudaBuilder::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/device")).arch(arch).target_dir(folder)
}

/// The PTX of the test kernels for an architecture, without comments.
fn build(arch: &str) -> String {
    let modules = builder(arch).build().unwrap_or_else(|error| panic!("{error}"));
    let [module] = &modules[..] else { panic!("one module, not {modules:?}") };
    let path = &module.ptx;
    let ptxas = Command::new("ptxas").args(["-arch", arch, "-o", "/dev/null"]).arg(path).output();
    if let Ok(output) = ptxas {
        assert!(output.status.success(), "ptxas: {}", String::from_utf8_lossy(&output.stderr));
    }
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| format!("{line}\n")).collect()
}

/// The instructions of one kernel.
fn kernel<'a>(ptx: &'a str, name: &str) -> &'a str {
    let start = ptx.find(&format!(".entry {name}(")).unwrap_or_else(|| panic!("no kernel `{name}`"));
    let rest = &ptx[start..];
    &rest[..rest.find("\n}").expect("a kernel ends")]
}

/// Checks that a kernel has each instruction as many times as listed, and no local memory.
fn has(ptx: &str, name: &str, instructions: &[(&str, usize)]) {
    let body = kernel(ptx, name);
    for (instruction, times) in instructions {
        assert_eq!(body.matches(instruction).count(), *times, "`{instruction}` in {body}");
    }
    assert!(!body.contains(".local"), "local memory in {body}");
}

/// Checks that a kernel has an instruction at least once: LLVM may copy it when it rotates a loop.
fn mentions(ptx: &str, name: &str, instruction: &str) {
    let body = kernel(ptx, name);
    assert!(body.contains(instruction), "`{instruction}` in {body}");
}

/// Checks the kernels that both architectures have.
fn both(ptx: &str) {
    has(ptx, "xor", &[("shfl.sync.bfly.b32", 1)]);
    has(ptx, "idx", &[("shfl.sync.idx.b32", 1)]);
    has(ptx, "up", &[("shfl.sync.up.b32", 1)]);
    has(ptx, "down", &[("shfl.sync.down.b32", 1)]);
    has(ptx, "wide", &[("shfl.sync.bfly.b32", 2), ("shfl.sync.down.b32", 2), ("shfl.sync.idx.b32", 1)]);
    has(ptx, "ballot", &[("vote.sync.ballot.b32", 1)]);
    has(ptx, "votes", &[("vote.sync.any.pred", 2), ("vote.sync.all.pred", 2)]);
    has(ptx, "most", &[("redux.sync.max.u32", 1)]);
    has(
        ptx,
        "sizes",
        &[
            ("ld.global.v4.b32", 1),
            ("ld.global.nc.v4.b32", 1),
            ("ld.global.nc.L1::no_allocate.L2::256B.v4.b32", 1),
            ("ld.global.nc.b16", 1),
            ("ld.global.u8", 1),
            ("ld.global.b64", 1),
            ("st.global.v4.b32", 2),
            ("createpolicy.fractional.L2::evict_last.b64", 1),
            ("st.global.L2::cache_hint.v4.b32", 1),
            ("st.global.cs.v4.b32", 1),
            ("st.global.b32", 3),
            ("st.global.b64", 2),
            ("ld.shared.v4.b32", 1),
            ("st.shared.v4.b32", 1),
            ("st.shared.u8", 4),
            ("st.shared.b16", 2),
        ],
    );
    has(
        ptx,
        "atomics",
        &[
            ("atom.relaxed.gpu.global.add.u32", 1),
            ("atom.relaxed.gpu.global.max.u32", 1),
            ("atom.relaxed.cta.shared.min.s32", 1),
            ("atom.relaxed.cta.shared.max.s32", 1),
            ("atom.relaxed.gpu.global.add.u64", 1),
            ("atom.release.gpu.global.exch.b32", 1),
            ("ld.relaxed.cta.shared.b32", 1),
            ("bar.sync", 2),
        ],
    );
    has(ptx, "turned", &[("movmatrix.sync.aligned.m8n8.trans.b16", 1)]);
    has(
        ptx,
        "product",
        &[
            ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 1),
            ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", 1),
            ("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", 1),
            ("bar.warp.sync", 1),
        ],
    );
    has(
        ptx,
        "arithmetic",
        &[
            ("ex2.approx.ftz.f32", 2),
            ("lg2.approx.ftz.f32", 1),
            ("rcp.approx.ftz.f32", 1),
            ("rsqrt.approx.ftz.f32", 1),
            ("sqrt.rn.f32", 1),
            ("cvt.rn.bf16x2.f32", 2),
            ("popc.b32", 1),
            ("clz.b32", 1),
            ("brev.b32", 1),
            ("mul.hi.u64", 1),
        ],
    );
    has(
        ptx,
        "fences",
        &[
            ("fence.acq_rel.cta", 1),
            ("fence.acq_rel.gpu", 1),
            ("fence.acq_rel.sys", 1),
            ("nanosleep.u32", 1),
            ("bar.sync \t1, 64", 1),
            ("%globaltimer", 2),
        ],
    );
    has(
        ptx,
        "async_copies",
        &[("cp.async.cg.shared.global", 1), ("cp.async.commit_group", 1), ("cp.async.wait_group 0", 1)],
    );
    mentions(ptx, "atomics", "atom.acquire.gpu.global.cas.b32");
    assert_eq!(ptx.matches(".extern .shared .align 1024").count(), 1, "dynamic shared memory is declared once");
}

/// Builds some of the kernels alone. It runs before all kernels are built, so that all of them are left in the folder.
fn some_kernels_are_built_alone() {
    let modules = builder("sm_80").kernels(["xor", "idx"]).build().unwrap_or_else(|error| panic!("{error}"));
    let names: Vec<_> = modules.iter().flat_map(|module| module.layouts.keys()).collect();
    assert_eq!(names, ["idx", "xor"]);
    let text = std::fs::read_to_string(&modules[0].ptx).unwrap();
    assert_eq!(text.matches(".visible .entry ").count(), 2);
    let error = builder("sm_80").kernels(["xor", "nor"]).build().unwrap_err().to_string();
    assert!(error.contains("no kernel nor for sm_80"), "{error}");
}

#[test]
fn ptx_is_what_was_meant() {
    some_kernels_are_built_alone();
    both(&build("sm_80"));
    let ptx = build("sm_90a");
    both(&ptx);
    has(&ptx, "elect", &[("elect.sync", 1)]);
    mentions(&ptx, "bulk_copies", "mbarrier.try_wait.parity.shared::cta.b64");
    has(
        &ptx,
        "bulk_copies",
        &[
            ("mbarrier.init.shared::cta.b64", 2),
            ("mbarrier.arrive.expect_tx.shared::cta.b64", 1),
            ("mbarrier.arrive.shared::cta.b64", 1),
            ("fence.mbarrier_init.release.cluster", 1),
            ("fence.proxy.async.shared::cta", 1),
            ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [", 1),
            ("createpolicy.fractional.L2::evict_first.b64", 1),
            ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [", 1),
            ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [", 1),
            ("cp.async.bulk.global.shared::cta.bulk_group", 1),
            ("cp.async.bulk.commit_group", 1),
            ("cp.async.bulk.wait_group.read 0", 1),
            ("cp.async.bulk.wait_group 0", 1),
        ],
    );
    has(
        &ptx,
        "cores",
        &[
            ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", 4),
            ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", 8),
            ("b, keep, 1, 1, 1;", 4),
            ("mov.b32 plain, 0x40;", 4),
            ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", 5),
        ],
    );
    has(
        &ptx,
        "warpgroup",
        &[
            (".reg .f32 acc<224>", 1),
            ("fence.proxy.tensormap::generic.acquire.gpu", 3),
            ("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [", 1),
            ("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [", 1),
            ("setmaxnreg.inc.sync.aligned.u32", 1),
            ("wgmma.fence.sync.aligned", 1),
            ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", 4),
            ("wgmma.commit_group.sync.aligned", 1),
            ("wgmma.wait_group.sync.aligned", 1),
            ("mbarrier.arrive.shared::cluster.b64", 1),
            ("barrier.cluster.arrive;", 1),
            ("barrier.cluster.arrive.relaxed;", 1),
            ("barrier.cluster.wait;", 2),
            ("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16", 1),
            ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group", 1),
        ],
    );
}
