//! Compiles `gpu-kernels` to PTX, once for each level that a card may have, and for the last level, Hopper's, also to
//! machine code. The generated `images.rs` lists the results.

use std::path::{Path, PathBuf};

use cuda_builder::{Assembler, build_images};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    if std::env::var_os("CARGO_CFG_MIRI").is_some() {
        // Miri has no card, so there are no kernels to load.
        if let Err(error) = std::fs::write(out.join("images.rs"), "[]") {
            println!("cargo::error={error}");
        }
        return;
    }
    let assembler = Assembler::find(Path::new("../.venv"));
    if assembler.is_none() {
        println!(
            "cargo::warning=built without machine code for Hopper, as there is no ptxas: the driver will compile the \
             kernels when they are first used, for some seconds (scripts/ptxas.sh .venv fetches it)"
        );
    }
    if let Err(error) =
        build_images(Path::new("../gpu-kernels"), &[("sm_80", None), ("sm_90", None), ("sm_90a", assembler)], &out)
    {
        println!("cargo::error={error}");
        std::process::exit(1);
    }
}
