//! Makes machine code from PTX with NVIDIA's assembler, `ptxas`.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Error, io, tell_cargo};

/// Names the environment variable that overrides the search of [`Assembler::find`]: the path of `ptxas`.
pub const ASSEMBLER_VARIABLE: &str = "PTXAS";

/// The `ptxas` program.
#[derive(Debug, Clone)]
pub struct Assembler {
    path: PathBuf,
}

impl Assembler {
    /// Looks for `ptxas`, in this order: the path in [`ASSEMBLER_VARIABLE`]; in `folder`; on the search path. None if
    /// it is in none of these places.
    pub fn find(folder: &Path) -> Option<Self> {
        tell_cargo(format_args!("rerun-if-env-changed={ASSEMBLER_VARIABLE}"));
        let named = std::env::var_os(ASSEMBLER_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
        let searched = std::env::var_os("PATH").unwrap_or_default();
        let searched = std::env::split_paths(&searched).map(|folder| folder.join("ptxas"));
        let path = named.into_iter().chain([folder.join("ptxas")]).chain(searched).find(|path| path.is_file())?;
        tell_cargo(format_args!("rerun-if-changed={}", path.display()));
        Some(Self { path })
    }

    /// Whether the file `machine_code` is up to date: newer than the file `ptx` and than this assembler, and with a
    /// report. Assembling is slow, so it is skipped then.
    pub fn has_made(&self, ptx: &Path, machine_code: &Path) -> bool {
        let time = |path: &Path| path.metadata().and_then(|data| data.modified()).ok();
        let made = time(machine_code);
        made.is_some() && made > time(ptx) && made > time(&self.path) && Self::report(machine_code).is_file()
    }

    /// The path of the report beside `machine_code`: what the assembler said about each kernel.
    /// [`FunctionReport`](crate::FunctionReport) reads it.
    pub fn report(machine_code: &Path) -> PathBuf {
        machine_code.with_extension("ptxas.txt")
    }

    /// Assembles the file `ptx` for `arch` into the file `machine_code`, with a [report](Self::report).
    ///
    /// # Errors
    /// [`Error::Assemble`] with the first line that the assembler said, or a file that cannot be run or written.
    pub fn assemble(&self, arch: &str, ptx: &Path, machine_code: &Path) -> Result<(), Error> {
        // The file gets its final name only when it is complete, so an interrupted run leaves nothing that looks made.
        let unfinished = machine_code.with_extension("unfinished");
        let output = Command::new(&self.path)
            .arg(format!("-arch={arch}"))
            // `-O3` is also the default of the driver's compiler. `--split-compile=0` compiles kernels on all cores and
            // does not change their code.
            .args(["-O3", "-v", "--split-compile=0", "-o"])
            .args([unfinished.as_path(), ptx])
            .output()
            .map_err(io(&self.path))?;
        let report = Self::report(machine_code);
        if output.status.success() {
            std::fs::write(&report, &output.stderr).map_err(io(&report))?;
            return std::fs::rename(&unfinished, machine_code).map_err(io(machine_code));
        }
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let reason = said.lines().next().unwrap_or("it said nothing").to_owned();
        Err(Error::Assemble { assembler: self.path.display().to_string(), arch: arch.into(), reason })
    }
}
