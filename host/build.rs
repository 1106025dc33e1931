//! Compiles `gpu-kernels` to PTX, once for each level that a card may have.

use std::path::PathBuf;

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default());
    for arch in ["sm_80", "sm_90a"] {
        let built = cuda_builder::CudaBuilder::new("../gpu-kernels")
            .arch(arch)
            .copy_to(out.join(format!("{arch}.ptx")))
            .build();
        if let Err(error) = built {
            println!("cargo::error={error}");
            std::process::exit(1);
        }
    }
}
