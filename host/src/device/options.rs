//! How a device is opened.

use std::path::{Path, PathBuf};

use super::{Image, Level};

/// How a device is opened: what of it is used, and with which kernels.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// The level of the kernels. None is the last that the card runs, and under the emulator the last: others are for
    /// tests of what other cards do.
    pub level: Option<Level>,
    /// No more shared memory of a CTA than so many bytes: for tests of what cards with less do. Kernels of
    /// [`Level::Sm90a`] take what Hopper has.
    pub shared_bytes: Option<u32>,
    /// Runs a decode step as a launch for each operator, where one launch could run all of it: to compare with.
    pub unfused: bool,
    /// Whether prompts run in passes of many rows, by the kernels for Hopper. None is on Hopper, and not under the
    /// emulator: there, the kernels of every card are much quicker.
    pub prefill: Option<bool>,
    /// Whether decode steps read weights packed without loss. None is where that is faster and there is the memory.
    pub lossless: Option<bool>,
    /// Whether bf16 weights stay beside codes, or beside weights packed without loss, for the passes that read bf16.
    /// None is where they take a quarter of the free memory at most; not under the emulator.
    pub plain_beside: Option<bool>,
    /// A file of kernels, each of which takes the place of the built-in one of its name.
    pub kernels: Option<KernelFile>,
    /// Modules of kernels beside those of this crate. One is loaded when a kernel of it is first launched.
    pub modules: &'static [Image],
}

/// A file of kernels, PTX or machine code, whose word is taken for what they do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelFile(PathBuf);

impl KernelFile {
    /// The file at `path`.
    ///
    /// # Safety
    /// Its kernels do to memory what those that are built in do: they were built from the sources of this program, or
    /// from others with the same contracts. What the file says of the parameters that they take is compared with what
    /// the host hands them, but nothing keeps a file from saying what is not so.
    pub unsafe fn trusted(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl PartialEq for DeviceOptions {
    fn eq(&self, other: &Self) -> bool {
        let Self { level, shared_bytes, unfused, prefill, lossless, plain_beside, kernels, modules } = other;
        // Their texts are megabytes.
        let same_modules = std::ptr::eq(self.modules, *modules);
        (self.level, self.shared_bytes, self.unfused) == (*level, *shared_bytes, *unfused)
            && (self.prefill, self.lossless) == (*prefill, *lossless)
            && (self.plain_beside, &self.kernels) == (*plain_beside, kernels)
            && same_modules
    }
}

impl Eq for DeviceOptions {}
