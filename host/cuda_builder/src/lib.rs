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
//! A crate becomes one PTX text for each module that its kernels name, `main` where they name none, and where there is
//! an [`Assembler`], machine code beside each.
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
use std::path::{Path, PathBuf};
use std::process::Command;

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
    /// A kernel that was asked for, and that the crate does not have.
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
    /// What the attribute of its kernels calls it; `main` where that says nothing.
    pub name: String,
    /// The file of PTX.
    pub ptx: PathBuf,
    /// The file of machine code, if one was made.
    pub machine_code: Option<PathBuf>,
    /// Its kernels and the digests of their parameter blocks.
    pub layouts: BTreeMap<String, u64>,
}

/// Builds a kernel crate for each of `levels` into the folder `out`, with machine code where a level has an assembler,
/// and writes `out/images.rs`: a Rust slice with an `Image { arch, module, ptx, machine_code, report, layouts }` for
/// each module of each level, for a crate to include where it has such a type.
///
/// # Errors
/// As [`CudaBuilder::build`].
pub fn build_images(krate: &Path, levels: &[(&str, Option<Assembler>)], out: &Path) -> Result<(), Error> {
    let mut images = String::from("[\n");
    let build = |(arch, assembler): &(&str, Option<Assembler>)| {
        let path = out.join(format!("{arch}.ptx"));
        CudaBuilder::new(krate).arch(*arch).copy_to(path).assembler(assembler.clone()).build()
    };
    // Each compiles one crate, with one thread; their target directories are their own.
    let built: Vec<Result<_, Error>> = std::thread::scope(|scope| {
        let threads: Vec<_> = levels.iter().map(|level| scope.spawn(move || build(level))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    });
    for ((arch, _), modules) in levels.iter().zip(built) {
        for module in modules? {
            add_image(&mut images, arch, &module);
        }
    }
    images.push_str("]\n");
    let path = out.join("images.rs");
    std::fs::write(&path, images).map_err(io(&path))
}

/// Adds the module to the list, as Rust.
fn add_image(images: &mut String, arch: &str, module: &Module) {
    let (machine_code, report) = match &module.machine_code {
        Some(path) => {
            (format!("Some(include_bytes!({path:?}))"), format!("Some(include_str!({:?}))", Assembler::report(path)))
        }
        None => ("None".into(), "None".into()),
    };
    let layouts: Vec<(&String, &u64)> = module.layouts.iter().collect();
    let _ = writeln!(
        images,
        "Image {{ arch: {arch:?}, module: {:?}, ptx: include_str!({:?}), machine_code: {machine_code}, \
         report: {report}, layouts: &{layouts:?} }},",
        module.name, module.ptx
    );
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

    /// The level to compile for, such as `sm_80`, `sm_90` or `sm_90a`. The crate sees it, and those before it, whose
    /// instructions it has too, as `cfg(cuda_arch = "…")`.
    pub fn arch(mut self, arch: impl Into<String>) -> Self {
        self.arch = arch.into();
        self
    }

    /// Where the PTX of module `main` goes. Other modules go beside it, with their name before the extension, and
    /// machine code with the extension `cubin`.
    pub fn copy_to(mut self, path: impl Into<PathBuf>) -> Self {
        self.copy_to = Some(path.into());
        self
    }

    /// Cargo's target directory for the device build. By default one in `ptx` in the outer build's own, so that
    /// the two never wait for one lock and every profile of the host shares one device build.
    pub fn target_dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.target_dir = Some(path.into());
        self
    }

    /// What makes machine code of the PTX; by default nothing does.
    pub fn assembler(mut self, assembler: Option<Assembler>) -> Self {
        self.assembler = assembler;
        self
    }

    /// Builds these kernels alone, without warnings of what they leave unused: to try one in a part of the time that
    /// all take. By default, or with none, all are built.
    pub fn kernels<K: Into<String>>(mut self, kernels: impl IntoIterator<Item = K>) -> Self {
        self.kernels = kernels.into_iter().map(Into::into).collect();
        self
    }

    /// Compiles, and returns the modules in the order of their names.
    ///
    /// # Errors
    /// No usable toolchain, a compile error (its text goes to standard error), a [kernel](Self::kernels) that the crate
    /// does not have at this level, or a file that cannot be written. An assembler that refuses a text is none: there
    /// is no machine code then, and a warning.
    pub fn build(self) -> Result<Vec<Module>, Error> {
        let krate = self.krate.canonicalize().map_err(io(&self.krate))?;
        let manifest = krate.join("Cargo.toml");
        // Its own, and the workspace's, whose profiles it has.
        for manifest in krate.ancestors().map(|folder| folder.join("Cargo.toml")).filter(|path| path.is_file()) {
            tell_cargo(format_args!("rerun-if-changed={}", manifest.display()));
        }
        let name = package_name(&std::fs::read_to_string(&manifest).map_err(io(&manifest))?);
        tell_cargo(format_args!("rerun-if-env-changed={TOOLCHAIN_VARIABLE}"));
        let toolchain = Toolchain::find()?;
        // What all kernels were built to stays as it is.
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
            // The pinned stable compiler takes `-Z` flags and device features with this, here alone.
            .env("RUSTC_BOOTSTRAP", "1")
            // Fat LTO leaves one self-contained PTX text: nothing to link.
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
            // Of the kernels alone: the text of `core` is of no use to anyone.
            .args(["--", "--emit=asm"])
            // Which kernels there are to be: see `#[kernel]`.
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
        // Lints and builds run a build script each, with folders of their own. What is made lies beside the assembly,
        // which they share, so that it is made once.
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
        // The assembler works on one core.
        std::thread::scope(|scope| {
            let made = made.as_path();
            let write = |text| copy_module(write_module(text, made, arch, assembler)?, copy_to);
            let parts: Vec<_> = texts.into_iter().map(|text| scope.spawn(move || write(text))).collect();
            parts.into_iter().map(|part| part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }
}

/// Whether Cargo runs this as a build script.
fn is_build_script() -> bool {
    std::env::var_os("OUT_DIR").is_some()
}

/// Tells Cargo, if that listens.
fn tell_cargo(what: std::fmt::Arguments<'_>) {
    if is_build_script() {
        println!("cargo::{what}");
    }
}

/// How the device's code is compiled for a level.
fn flags(arch: &str) -> String {
    let ptx_version = if arch.starts_with("sm_9") { "+ptx83" } else { "+ptx78" };
    let mut flags = format!("-C target-cpu={arch} -C target-feature={ptx_version}");
    let number = arch.trim_start_matches("sm_").trim_end_matches(char::is_alphabetic).parse().unwrap_or(0);
    // What ends in a letter is a card's alone, and no other level has it.
    let before = [("sm_80", 80), ("sm_90", 90)].into_iter().filter(|(level, from)| *level != arch && *from <= number);
    for level in before.map(|(level, _)| level).chain([arch]) {
        let _ = write!(flags, " --cfg cuda_arch=\"{level}\"");
    }
    flags
}

/// Writes a module's files; `main` is the path of the main one's PTX.
fn write_module(text: modules::Text, main: &Path, arch: &str, assembler: Option<&Assembler>) -> Result<Module, Error> {
    let modules::Text { name, ptx: content, layouts } = text;
    let ptx = place_of(&name, main);
    if !std::fs::read(&ptx).is_ok_and(|old| old == content.as_bytes()) {
        std::fs::write(&ptx, &content).map_err(io(&ptx))?;
    }
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

/// Where the PTX of a module goes, if that of module `main` goes to `main`.
fn place_of(module: &str, main: &Path) -> PathBuf {
    if module == "main" { main.to_owned() } else { main.with_extension(format!("{module}.ptx")) }
}

/// The module, copied to where that of module `main` is to be `main`.
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

/// Copies a file, unless the same is there already: then nothing that was made of it is made again.
fn copy(from: &Path, to: &Path) -> Result<(), Error> {
    let content = std::fs::read(from).map_err(io(from))?;
    if std::fs::read(to).is_ok_and(|old| old == content) {
        return Ok(());
    }
    std::fs::write(to, content).map_err(io(to))
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

/// The folder that holds the profile folders of the build that runs this build script; of another program, `target`.
fn outer_target_dir() -> PathBuf {
    let out = std::env::var_os("OUT_DIR").map(PathBuf::from);
    // <target>/<profile>/build/<package>/out
    out.as_deref().and_then(|out| out.ancestors().nth(4)).unwrap_or(Path::new("target")).to_path_buf()
}

/// The name of a manifest's package, as its library has it.
fn package_name(manifest: &str) -> String {
    let package = manifest.split("[package]").nth(1).unwrap_or_default();
    let package = package.split("\n[").next().unwrap_or_default();
    let name = package.lines().find_map(|line| line.strip_prefix("name")?.trim_start().strip_prefix('='));
    name.unwrap_or_default().trim().trim_matches('"').replace('-', "_")
}

/// The sources that Cargo's list of dependencies names: those of the crate, and of the crates that lie in folders.
fn sources(list: &Path) -> Result<Vec<String>, Error> {
    let text = std::fs::read_to_string(list).map_err(io(list))?;
    // A space in a path is escaped.
    let names = text.split_once(": ").map_or("", |(_, names)| names.trim_end()).replace("\\ ", "\0");
    Ok(names.split(' ').filter(|name| !name.is_empty()).map(|name| name.replace('\0', " ")).collect())
}

/// The one assembly file that the device build left for the crate `name` in `folder`.
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
