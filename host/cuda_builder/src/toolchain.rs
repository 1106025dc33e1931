//! Which compiler builds device code.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;

/// Names the environment variable that overrides the search of [`Toolchain::find`]: a toolchain's prefix,
/// the folder that has `bin/rustc`, `bin/cargo` and `lib/rustlib/src/rust/library`.
pub const TOOLCHAIN_VARIABLE: &str = "CUDA_BUILDER_TOOLCHAIN";

/// A Rust toolchain that has the sources of `core`.
#[derive(Debug, Clone)]
pub struct Toolchain {
    prefix: PathBuf,
}

impl Toolchain {
    /// Looks for a toolchain, in this order: the prefix in [`TOOLCHAIN_VARIABLE`]; the active compiler
    /// with the `rust-src` component; a distribution's pair in `/usr` (Debian: `rustc-web`, `cargo-web`,
    /// `rust-web-src`).
    ///
    /// # Errors
    /// [`Error::NoToolchain`] when none of them has `core`'s sources.
    pub fn find() -> Result<Self, Error> {
        let candidates: Vec<PathBuf> = match std::env::var_os(TOOLCHAIN_VARIABLE) {
            Some(prefix) => vec![prefix.into()],
            None => active_prefix().into_iter().chain([PathBuf::from("/usr")]).collect(),
        };
        let usable = candidates.iter().find(|prefix| {
            source_of_core(prefix).is_dir() && prefix.join("bin/rustc").exists() && prefix.join("bin/cargo").exists()
        });
        usable.map(|prefix| Self { prefix: prefix.clone() }).ok_or_else(|| Error::NoToolchain {
            looked_in: candidates.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "),
        })
    }

    /// The compiler.
    pub fn rustc(&self) -> PathBuf {
        self.prefix.join("bin/rustc")
    }

    /// The Cargo that belongs to it.
    pub fn cargo(&self) -> PathBuf {
        self.prefix.join("bin/cargo")
    }
}

fn source_of_core(prefix: &Path) -> PathBuf {
    prefix.join("lib/rustlib/src/rust/library/core")
}

/// The prefix of the compiler on the search path. If that is rustup's proxy, it answers for the toolchain that it
/// picks.
fn active_prefix() -> Option<PathBuf> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).args(["--print", "sysroot"]).output().ok()?;
    Some(PathBuf::from(String::from_utf8(output.stdout).ok()?.trim()))
}
