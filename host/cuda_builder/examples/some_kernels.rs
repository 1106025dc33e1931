//! Builds only some kernels of a crate, which takes a fraction of the time that all kernels take, and prints the
//! registers, stack and spills of each: `some_kernels CRATE LEVEL OUT [KERNEL …]`, such as
//! `some_kernels gpu-kernels sm_90a target/trial decode_16 decode_tree`.
//!
//! Writes `OUT.ptx` and, if `ptxas` is found (`PTXAS`, `.venv/ptxas`, the search path), `OUT.cubin`. The programs of
//! this repository take either file with `--kernels`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use cuda_builder::{Assembler, CudaBuilder, FunctionReport};

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
        for FunctionReport { name, stack, spill_stores, spill_loads, registers } in FunctionReport::read_all(&report)? {
            let registers = registers.map_or_else(|| "is called".into(), |registers| format!("{registers} registers"));
            println!(
                "{name}: {registers}, {stack} bytes of stack, {spill_stores} stored and {spill_loads} loaded in spills"
            );
        }
    }
    Ok(())
}
