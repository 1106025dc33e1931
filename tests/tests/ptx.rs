//! The PTX as the assembler sees it: valid at both levels, and no register spilled to memory.

use std::path::{Path, PathBuf};
use std::process::Command;

/// ptxas, as `make test` installs it.
fn ptxas() -> PathBuf {
    let path = std::env::var_os("PTXAS").map(PathBuf::from);
    let path = path.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/ptxas"));
    assert!(path.exists(), "{} is missing: run `scripts/ptxas.sh .venv`, or set PTXAS", path.display());
    path
}

/// The numbers in front of `unit` in ptxas's report, with the kernel they are about.
fn report(arch: &str, ptx: &str) -> Vec<(String, String)> {
    let folder = std::env::temp_dir().join(format!("warpdraft-ptx-{}-{arch}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("kernels.ptx");
    std::fs::write(&file, ptx).unwrap();
    let output = Command::new(ptxas())
        .arg(format!("-arch={arch}"))
        .args(["-v", "-o"])
        .args([folder.join("kernels.cubin"), file])
        .output()
        .unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "ptxas for {arch}:\n{text}");
    // Products of a warpgroup that wait for each other (C7510 to C7514), registers that cannot be handed over (C7508).
    assert!(!text.contains("(C75"), "ptxas for {arch}:\n{text}");
    let mut kernel = String::new();
    let mut found = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.split("Compiling entry function '").nth(1) {
            kernel = rest.split('\'').next().unwrap_or_default().into();
        } else if line.contains("bytes stack frame") {
            found.push((kernel.clone(), line.trim().to_string()));
        }
    }
    found
}

#[test]
fn no_kernel_spills_or_uses_local_memory() {
    for (arch, ptx) in host::device::PTX {
        let kernels = ptx.matches(".visible .entry ").count();
        let report = report(arch, ptx);
        assert_eq!(report.len(), kernels, "{arch}");
        assert!(kernels > 20, "{arch} has {kernels} kernels");
        // A bounds check or a division that can panic costs registers, and could only trap.
        assert!(!ptx.contains("panicking"), "{arch} can panic");
        for (kernel, line) in report {
            assert_eq!(line, "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", "{kernel} for {arch}");
        }
    }
}
