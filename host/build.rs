//! Compiles `gpu-kernels` to PTX, once for each level that a card may have, and to machine code for Hopper, which is a
//! level of its own. The list of what was made is `images.rs`.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use cuda_builder::{Assembler, CudaBuilder, Error, Module};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Err(error) = build(&PathBuf::from(std::env::var_os("OUT_DIR").unwrap_or_default())) {
        println!("cargo::error={error}");
        std::process::exit(1);
    }
}

fn build(out: &Path) -> Result<(), Error> {
    let assembler = Assembler::find(Path::new("../.venv"));
    if assembler.is_none() {
        println!(
            "cargo::warning=built without machine code for Hopper, as there is no ptxas: the driver will compile the \
             kernels when they are first used, for some seconds (scripts/ptxas.sh .venv fetches it)"
        );
    }
    let mut images = String::from("[\n");
    for (arch, assembler) in [("sm_80", None), ("sm_90a", assembler)] {
        let path = out.join(format!("{arch}.ptx"));
        for module in CudaBuilder::new("../gpu-kernels").arch(arch).copy_to(path).assembler(assembler).build()? {
            add_image(&mut images, arch, &module);
        }
    }
    images.push_str("]\n");
    let path = out.join("images.rs");
    std::fs::write(&path, images).map_err(|source| Error::Io { path: path.display().to_string(), source })
}

/// Adds the module to the list, as Rust.
fn add_image(images: &mut String, arch: &str, module: &Module) {
    let machine_code = match &module.machine_code {
        Some(path) => format!("Some(include_bytes!({path:?}))"),
        None => "None".into(),
    };
    let layouts: Vec<(&String, &u64)> = module.layouts.iter().collect();
    let _ = writeln!(
        images,
        "Image {{ arch: {arch:?}, module: {:?}, ptx: include_str!({:?}), machine_code: {machine_code}, \
         layouts: &{layouts:?} }},",
        module.name, module.ptx
    );
}
