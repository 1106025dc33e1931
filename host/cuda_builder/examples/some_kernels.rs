//! Builds some kernels of a crate alone, in a part of the time that all take, and says what each has of registers:
//! `some_kernels CRATE LEVEL OUT [KERNEL …]`, such as
//! `some_kernels gpu-kernels sm_90a target/trial decode_16 decode_tree`.
//!
//! What is built lies at `OUT.ptx` and, where `ptxas` is found (`PTXAS`, `.venv/ptxas`, the search path), `OUT.cubin`.
//! Programs of this repository take either by `--kernels`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cuda_builder::{Assembler, CudaBuilder};

fn main() -> ExitCode {
    match build(std::env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn build(mut words: impl Iterator<Item = String>) -> Result<(), Box<dyn std::error::Error>> {
    let (Some(krate), Some(level), Some(out)) = (words.next(), words.next(), words.next()) else {
        return Err("usage: some_kernels CRATE LEVEL OUT [KERNEL …]".into());
    };
    let ptx = PathBuf::from(format!("{out}.ptx"));
    let assembler = Assembler::find(Path::new(".venv"));
    let modules = CudaBuilder::new(krate).arch(level).copy_to(ptx).assembler(assembler).kernels(words).build()?;
    for module in modules {
        println!("{}", module.machine_code.as_ref().unwrap_or(&module.ptx).display());
        let Some(code) = module.machine_code else { continue };
        let report = std::fs::read_to_string(Assembler::report(&code))?;
        for line in report.lines() {
            if let Some(kernel) =
                line.split("Compiling entry function '").nth(1).and_then(|rest| rest.split('\'').next())
            {
                println!("{kernel}");
            } else if line.contains("bytes stack frame") || line.contains("Used ") {
                println!("  {}", line.trim_start_matches("ptxas info    :").trim());
            }
        }
    }
    Ok(())
}
