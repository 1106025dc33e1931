//! Compiles a kernel crate to PTX from a build script, with rustc's own NVPTX back end.
//!
//! The interface is a part of that of rust-cuda's `cuda_builder`:
//!
//! ```no_run
//! # fn main() -> Result<(), cuda_builder::Error> {
//! cuda_builder::CudaBuilder::new("../gpu-kernels")
//!     .arch("sm_90a")
//!     .copy_to(std::path::Path::new(&std::env::var("OUT_DIR").unwrap()).join("kernels.ptx"))
//!     .build()?;
//! # Ok(()) }
//! ```
//!
//! The kernels of a crate are grouped into modules, by the module that each kernel's attribute names (`main` if it
//! names none). The build writes one PTX text for each module and, if it has an [`Assembler`], machine code beside it.
//!
//! The device build needs a compiler and the matching sources of `core`: see [`Toolchain::find`].
#![warn(missing_docs)]

mod assembler;
mod launch_bounds;
mod modules;
mod report;
mod toolchain;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use flate2::Compression;
use flate2::write::GzEncoder;

pub use assembler::{ASSEMBLER_VARIABLE, Assembler};
pub use modules::LAYOUTS;
pub use report::FunctionReport;
pub use toolchain::{TOOLCHAIN_VARIABLE, Toolchain};

/// Why a device build failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No compiler with the sources of `core` beside it.
    #[error(
        "no Rust compiler with the sources of `core` was found, and PTX cannot be built without them; run \
         `rustup component add rust-src`, or on Debian `apt-get install rustc-web cargo-web rust-web-src`, \
         or set {TOOLCHAIN_VARIABLE} to the prefix of a toolchain that has them (looked in: {looked_in})"
    )]
    NoToolchain {
        /// The prefixes that were tried.
        looked_in: String,
    },
    /// The compiler ran and refused the crate; its messages are on standard error.
    #[error("compiling {krate} for {arch} failed: {command} ended with {status}")]
    Compile {
        /// The kernel crate's folder.
        krate: String,
        /// The target level.
        arch: String,
        /// The command line.
        command: String,
        /// How it ended.
        status: String,
    },
    /// The assembler refused a text.
    #[error("{assembler} does not assemble the kernels for {arch}: {reason}")]
    Assemble {
        /// The program.
        assembler: String,
        /// The target level.
        arch: String,
        /// The first line of what it said.
        reason: String,
    },
    /// A kernel was asked for that the crate does not have.
    #[error("{krate} has no kernel {kernel} for {arch}; a kernel is named as its function is")]
    NoKernel {
        /// The kernel.
        kernel: String,
        /// The kernel crate's folder.
        krate: String,
        /// The target level.
        arch: String,
    },
    /// A kernel whose comments in the PTX are incomplete.
    #[error("the PTX does not tell the {about} of kernel {kernel}: declare it with #[kernel] of this cuda_std")]
    Note {
        /// The kernel.
        kernel: String,
        /// What is missing.
        about: String,
    },
    /// A file could not be read, written or run.
    #[error("{path}: {source}")]
    Io {
        /// What was touched.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
}

pub(crate) fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.as_ref().display().to_string();
    move |source| Error::Io { path, source }
}

/// A module that was built.
#[derive(Debug)]
pub struct Module {
    /// The name in the attribute of its kernels; `main` if the attribute names none.
    pub name: String,
    /// The file of PTX.
    pub ptx: PathBuf,
    /// The file of machine code, if one was made.
    pub machine_code: Option<PathBuf>,
    /// Its kernels and the digests of their parameter blocks.
    pub layouts: BTreeMap<String, u64>,
}

/// Builds a kernel crate for each of `levels` into the folder `out`. A level with an assembler gets machine code as
/// well.
///
/// Also writes `out/images.rs`: a Rust slice with an `Image { arch, module, ptx_gz, machine_code, report, layouts }`
/// for each module of each level. The crate that includes this file must define such a type. `ptx_gz` is the PTX,
/// packed by gzip: it is read only where there is no machine code for a card.
///
/// # Errors
/// As [`CudaBuilder::build`].
pub fn build_images(krate: &Path, levels: &[(&str, Option<Assembler>)], out: &Path) -> Result<(), Error> {
    let mut images = String::from("[\n");
    let build = |(arch, assembler): &(&str, Option<Assembler>)| {
        let path = out.join(format!("{arch}.ptx"));
        CudaBuilder::new(krate).arch(*arch).copy_to(path).assembler(assembler.clone()).build()
    };
    // The levels are built in parallel: each build is one crate on one thread, with a target directory of its own.
    let built: Vec<Result<_, Error>> = std::thread::scope(|scope| {
        let threads: Vec<_> = levels.iter().map(|level| scope.spawn(move || build(level))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    });
    for ((arch, _), modules) in levels.iter().zip(built) {
        for module in modules? {
            add_image(&mut images, arch, &module)?;
        }
    }
    images.push_str("]\n");
    let path = out.join("images.rs");
    std::fs::write(&path, images).map_err(io(&path))
}

/// Appends the module to `images`, as a Rust expression.
fn add_image(images: &mut String, arch: &str, module: &Module) -> Result<(), Error> {
    let ptx_gz = pack(&module.ptx)?;
    let (machine_code, report) = match &module.machine_code {
        Some(path) => {
            (format!("Some(include_bytes!({path:?}))"), format!("Some(include_str!({:?}))", Assembler::report(path)))
        }
        None => ("None".into(), "None".into()),
    };
    let layouts: Vec<(&String, &u64)> = module.layouts.iter().collect();
    let _ = writeln!(
        images,
        "Image {{ arch: {arch:?}, module: {:?}, ptx_gz: include_bytes!({ptx_gz:?}), machine_code: {machine_code}, \
         report: {report}, layouts: &{layouts:?} }},",
        module.name
    );
    Ok(())
}

/// Packs a file by gzip, and returns the path of the packed one beside it.
fn pack(path: &Path) -> Result<PathBuf, Error> {
    let packed = path.with_added_extension("gz");
    let content = std::fs::read(path).map_err(io(path))?;
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    let bytes = encoder.write_all(&content).and_then(|()| encoder.finish()).map_err(io(&packed))?;
    write(&packed, &bytes)?;
    Ok(packed)
}

/// One compilation of a kernel crate, to PTX.
pub struct CudaBuilder {
    krate: PathBuf,
    arch: String,
    copy_to: Option<PathBuf>,
    target_dir: Option<PathBuf>,
    assembler: Option<Assembler>,
    kernels: Vec<String>,
}

impl CudaBuilder {
    /// A build of the crate in folder `krate`, relative to the package whose build script runs.
    pub fn new(krate: impl Into<PathBuf>) -> Self {
        let krate = krate.into();
        Self { krate, arch: "sm_80".into(), copy_to: None, target_dir: None, assembler: None, kernels: Vec::new() }
    }

    /// The level to compile for, such as `sm_80`, `sm_90` or `sm_90a`. The crate sees it as `cfg(cuda_arch = "…")`, and
    /// also each lower level whose instructions it includes.
    pub fn arch(mut self, arch: impl Into<String>) -> Self {
        self.arch = arch.into();
        self
    }

    /// Where the PTX of module `main` goes. The PTX of another module goes beside it, with the module's name before the
    /// extension. Machine code goes beside its PTX, with the extension `cubin`.
    pub fn copy_to(mut self, path: impl Into<PathBuf>) -> Self {
        self.copy_to = Some(path.into());
        self
    }

    /// Cargo's target directory for the device build. The default is a folder in `ptx` in the outer build's target
    /// directory. There, the two builds never wait for each other's lock, and all host profiles share one device build.
    pub fn target_dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.target_dir = Some(path.into());
        self
    }

    /// The assembler that makes machine code from the PTX. By default there is none.
    pub fn assembler(mut self, assembler: Option<Assembler>) -> Self {
        self.assembler = assembler;
        self
    }

    /// Builds only these kernels, which takes a fraction of the time that all kernels take. Lints are silenced, because
    /// much code is unused then. By default, or with an empty list, all kernels are built.
    pub fn kernels<K: Into<String>>(mut self, kernels: impl IntoIterator<Item = K>) -> Self {
        self.kernels = kernels.into_iter().map(Into::into).collect();
        self
    }

    /// Compiles the crate and returns its modules, sorted by name.
    ///
    /// # Errors
    /// No usable toolchain, a compile error (its text goes to standard error), a [kernel](Self::kernels) that the crate
    /// does not have at this level, or a file that cannot be read or written. It is not an error if the assembler
    /// refuses a text: the module then has no machine code, and a warning is printed.
    pub fn build(self) -> Result<Vec<Module>, Error> {
        let krate = self.krate.canonicalize().map_err(io(&self.krate))?;
        let manifest = krate.join("Cargo.toml");
        // The crate's manifest, and that of the workspace, which sets the profiles.
        for manifest in krate.ancestors().map(|folder| folder.join("Cargo.toml")).filter(|path| path.is_file()) {
            tell_cargo(format_args!("rerun-if-changed={}", manifest.display()));
        }
        let name = package_name(&std::fs::read_to_string(&manifest).map_err(io(&manifest))?);
        tell_cargo(format_args!("rerun-if-env-changed={TOOLCHAIN_VARIABLE}"));
        let toolchain = Toolchain::find()?;
        // A build of some kernels has a folder of its own, so that it does not overwrite the build of all kernels.
        let folder = if self.kernels.is_empty() { self.arch.clone() } else { format!("{}.some", self.arch) };
        let target_dir = self.target_dir.unwrap_or_else(|| outer_target_dir().join("ptx").join(folder));
        // Cargo runs in the crate's folder.
        let target_dir = std::path::absolute(&target_dir).map_err(io(&target_dir))?;

        let mut command = Command::new(toolchain.cargo());
        for (name, _) in std::env::vars_os() {
            if !survives(&name) {
                command.env_remove(name);
            }
        }
        command
            .current_dir(&krate)
            .env("RUSTC", toolchain.rustc())
            // Lets the pinned stable compiler take `-Z` flags and unstable device features, in this command only.
            .env("RUSTC_BOOTSTRAP", "1")
            // With fat LTO the PTX is one self-contained text, so there is nothing to link.
            .env("CARGO_TARGET_NVPTX64_NVIDIA_CUDA_LINKER", "/bin/true")
            .env("RUSTFLAGS", flags(&self.arch))
            .env("CARGO_PROFILE_RELEASE_LTO", "fat")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
            .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
            .args(["rustc", "--release", "--lib", "--crate-type", "cdylib"])
            .args(["--target", "nvptx64-nvidia-cuda", "-Zbuild-std=core"])
            .arg("--target-dir")
            .arg(&target_dir)
            // Only the kernel crate emits assembly: nothing reads the assembly of `core`.
            .args(["--", "--emit=asm"])
            // Declares the `cfg` that selects kernels: see `#[kernel]`.
            .arg("--check-cfg=cfg(cuda_kernels, values(any()))");
        if !self.kernels.is_empty() {
            command.args(["--cap-lints=allow", "--cfg=cuda_kernels"]);
            command.args(self.kernels.iter().map(|kernel| format!("--cfg=cuda_kernels=\"{kernel}\"")));
        }
        let status = command.status().map_err(io(toolchain.cargo()))?;
        if !status.success() {
            return Err(Error::Compile {
                krate: krate.display().to_string(),
                arch: self.arch,
                command: format!("{command:?}"),
                status: status.to_string(),
            });
        }

        let release = target_dir.join("nvptx64-nvidia-cuda/release");
        for source in sources(&release.join(format!("{name}.d")))? {
            tell_cargo(format_args!("rerun-if-changed={source}"));
        }
        let assembly = assembly_of(&name, &release.join("deps"))?;
        let text = std::fs::read_to_string(&assembly).map_err(io(&assembly))?;
        // Lint runs and builds each run this build script, with an `OUT_DIR` of their own. The modules are made beside
        // the assembly, which these runs share, and then copied. So they are made only once.
        let made = assembly.with_extension("ptx");
        let copy_to = self.copy_to.as_deref().unwrap_or(&made);
        let texts = modules::split(&launch_bounds::apply(&text))?;
        let is_there = |kernel: &&String| texts.iter().any(|text| text.layouts.contains_key(*kernel));
        if let Some(kernel) = self.kernels.iter().find(|kernel| !is_there(kernel)) {
            return Err(Error::NoKernel {
                kernel: kernel.clone(),
                krate: krate.display().to_string(),
                arch: self.arch,
            });
        }
        let (arch, assembler) = (self.arch.as_str(), self.assembler.as_ref());
        // Modules are written and assembled in parallel.
        std::thread::scope(|scope| {
            let made = made.as_path();
            let write = |text| copy_module(write_module(text, made, arch, assembler)?, copy_to);
            let parts: Vec<_> = texts.into_iter().map(|text| scope.spawn(move || write(text))).collect();
            parts.into_iter().map(|part| part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }
}

/// Whether this program runs as a Cargo build script.
fn is_build_script() -> bool {
    std::env::var_os("OUT_DIR").is_some()
}

/// Prints an instruction for Cargo, if this runs as a build script.
fn tell_cargo(what: std::fmt::Arguments<'_>) {
    if is_build_script() {
        println!("cargo::{what}");
    }
}

/// The compiler flags for device code of a level.
fn flags(arch: &str) -> String {
    let ptx_version = if arch.starts_with("sm_9") { "+ptx83" } else { "+ptx78" };
    let mut flags = format!("-C target-cpu={arch} -C target-feature={ptx_version}");
    let number = arch.trim_start_matches("sm_").trim_end_matches(char::is_alphabetic).parse().unwrap_or(0);
    // A level whose name ends in a letter (`sm_90a`) is for one architecture only, so no other level includes it.
    let before = [("sm_80", 80), ("sm_90", 90)].into_iter().filter(|(level, from)| *level != arch && *from <= number);
    for level in before.map(|(level, _)| level).chain([arch]) {
        let _ = write!(flags, " --cfg cuda_arch=\"{level}\"");
    }
    flags
}

/// Writes a module's files. `main` is the path for the PTX of module `main`.
fn write_module(text: modules::Text, main: &Path, arch: &str, assembler: Option<&Assembler>) -> Result<Module, Error> {
    let modules::Text { name, ptx: content, layouts } = text;
    let ptx = place_of(&name, main);
    write(&ptx, content.as_bytes())?;
    let machine_code = assembler.and_then(|assembler| {
        let path = ptx.with_extension("cubin");
        if assembler.has_made(&ptx, &path) {
            return Some(path);
        }
        match assembler.assemble(arch, &ptx, &path) {
            Ok(()) => Some(path),
            Err(error) => {
                let warning = format!("{error}; the program will have the driver compile them");
                if is_build_script() {
                    tell_cargo(format_args!("warning={warning}"))
                } else {
                    eprintln!("{warning}")
                }
                None
            }
        }
    });
    Ok(Module { name, ptx, machine_code, layouts })
}

/// The path for the PTX of `module`, if `main` is the path for the PTX of module `main`.
fn place_of(module: &str, main: &Path) -> PathBuf {
    if module == "main" { main.to_owned() } else { main.with_extension(format!("{module}.ptx")) }
}

/// Copies the module's files to the place where they belong if `main` is the path for the PTX of module `main`.
fn copy_module(module: Module, main: &Path) -> Result<Module, Error> {
    let ptx = place_of(&module.name, main);
    copy(&module.ptx, &ptx)?;
    let machine_code = module.machine_code.as_deref().map(|from| -> Result<PathBuf, Error> {
        let to = ptx.with_extension("cubin");
        copy(from, &to)?;
        copy(&Assembler::report(from), &Assembler::report(&to))?;
        Ok(to)
    });
    Ok(Module { ptx, machine_code: machine_code.transpose()?, ..module })
}

/// Copies a file, as [`write`] writes one.
fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    write(to, &std::fs::read(from).map_err(io(from))?)
}

/// Writes a file unless it has that content already. An untouched file does not make Cargo rebuild what depends on it,
/// nor the assembler assemble it again.
fn write(path: &Path, content: &[u8]) -> Result<(), Error> {
    if std::fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    std::fs::write(path, content).map_err(io(path))
}

/// Cargo tells build scripts and wrappers about the outer build through the environment; the device build
/// must see none of it.
fn survives(name: &OsString) -> bool {
    let Some(name) = name.to_str() else { return true };
    let about_outer_build = name.starts_with("CARGO_") && name != "CARGO_HOME" && name != "CARGO_NET_OFFLINE";
    let wrapper = name.starts_with("RUSTC") || name == "RUSTFLAGS" || name == "RUSTDOC";
    let clippy = name.starts_with("CLIPPY_");
    !(about_outer_build || wrapper || clippy || name == "TARGET" || name == "HOST" || name == "OUT_DIR")
}

/// The target directory of the build that runs this build script. In a program that is no build script, `target`.
fn outer_target_dir() -> PathBuf {
    let out = std::env::var_os("OUT_DIR").map(PathBuf::from);
    // <target>/<profile>/build/<package>/out
    out.as_deref().and_then(|out| out.ancestors().nth(4)).unwrap_or(Path::new("target")).to_path_buf()
}

/// The name of a manifest's package, as its library spells it: with underscores.
fn package_name(manifest: &str) -> String {
    let package = manifest.split("[package]").nth(1).unwrap_or_default();
    let package = package.split("\n[").next().unwrap_or_default();
    let name = package.lines().find_map(|line| line.strip_prefix("name")?.trim_start().strip_prefix('='));
    name.unwrap_or_default().trim().trim_matches('"').replace('-', "_")
}

/// The source files in Cargo's dependency list (a `.d` file): those of the crate, and of the crates that it uses by
/// path.
fn sources(list: &Path) -> Result<Vec<String>, Error> {
    let text = std::fs::read_to_string(list).map_err(io(list))?;
    // A space in a path is escaped.
    let names = text.split_once(": ").map_or("", |(_, names)| names.trim_end()).replace("\\ ", "\0");
    Ok(names.split(' ').filter(|name| !name.is_empty()).map(|name| name.replace('\0', " ")).collect())
}

/// The newest assembly file that the device build left for the crate `name` in `folder`.
fn assembly_of(name: &str, folder: &Path) -> Result<PathBuf, Error> {
    let newest = std::fs::read_dir(folder)
        .map_err(io(folder))?
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let stem = path.file_stem()?.to_str()?.to_owned();
            let ours = path.extension()? == "s" && (stem == name || stem.starts_with(&format!("{name}-")));
            let modified = path.metadata().ok()?.modified().ok()?;
            ours.then_some((modified, path))
        })
        .max();
    newest.map(|(_, path)| path).ok_or_else(|| Error::Io {
        path: folder.join(format!("{name}.s")).display().to_string(),
        source: std::io::ErrorKind::NotFound.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::{flags, package_name, sources};

    #[test]
    fn a_package_is_named_as_its_library() {
        let manifest =
            "[workspace]\nname = \"no\"\n[package]\ndescription = \"x\"\nname = \"my-kernels\"\n[lib]\nname = \"y\"\n";
        assert_eq!(package_name(manifest), "my_kernels");
    }

    #[test]
    fn sources_are_what_stands_behind_the_colon() {
        let list = std::env::temp_dir().join(format!("cuda-builder-{}.d", std::process::id()));
        std::fs::write(&list, "/t/kernels.ptx: /a/lib.rs /a\\ b/gemm.rs\n").unwrap();
        let found = sources(&list);
        std::fs::remove_file(&list).unwrap();
        assert_eq!(found.unwrap(), ["/a/lib.rs", "/a b/gemm.rs"]);
    }

    #[test]
    fn a_level_has_the_instructions_of_those_before_it() {
        let seen = |arch| -> Vec<String> {
            let flags = flags(arch);
            flags.split("cuda_arch=").skip(1).map(|rest| rest.split('"').nth(1).unwrap().to_owned()).collect()
        };
        assert_eq!(seen("sm_80"), ["sm_80"]);
        assert_eq!(seen("sm_86"), ["sm_80", "sm_86"]);
        assert_eq!(seen("sm_90"), ["sm_80", "sm_90"]);
        assert_eq!(seen("sm_90a"), ["sm_80", "sm_90", "sm_90a"]);
        assert_eq!(seen("sm_100"), ["sm_80", "sm_90", "sm_100"]);
    }
}
