//! Compiles `benches/kernels` to PTX and, for Hopper, machine code, as host's build script does with `gpu-kernels`.

use std::path::{Path, PathBuf};

use cuda_builder::{Assembler, build_images};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let levels = [("sm_80", None), ("sm_90", None), ("sm_90a", Assembler::find(Path::new("../.venv")))];
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    if let Err(error) = build_images(Path::new("kernels"), &levels, &out) {
        println!("cargo::error={error}");
        std::process::exit(1);
    }
}
