//! The options with which a device is opened.

use std::path::{Path, PathBuf};

use super::{Image, Level};

/// How a device is opened: which of its features are used, and with which kernels.
#[derive(Clone, Debug, Default)]
pub struct DeviceOptions {
    /// The level of the kernels. By default the last level that the card runs, and under the emulator the last of all.
    /// Other levels are for tests of what other cards do.
    pub level: Option<Level>,
    /// A limit on the shared memory of a CTA, in bytes, for tests of what cards with less of it do. Does not apply to
    /// kernels of [`Level::Sm90a`], which use what Hopper has.
    pub shared_bytes: Option<u32>,
    /// How many SMs the emulator has: 4 by default. A card has what it has.
    pub sms: Option<u32>,
    /// Whether to run a decode step with one launch for each operator even if there is a decode kernel. For comparison.
    pub unfused: bool,
    /// Whether prompts run in passes of many rows, by the kernels for Hopper. By default they do on Hopper, but not
    /// under the emulator, which runs the kernels for all cards much faster.
    pub prefill: Option<bool>,
    /// Whether decode steps read weights packed without loss. By default they do if that is faster and there is memory
    /// for it.
    pub lossless: Option<bool>,
    /// Whether bf16 weights are kept beside codes or packed weights, for the passes that read bf16. By default they are
    /// kept if they take at most a quarter of the free memory; never under the emulator.
    pub plain_beside: Option<bool>,
    /// A file of kernels. Each of its kernels replaces the built-in kernel of the same name.
    pub kernels: Option<KernelFile>,
    /// Modules of kernels in addition to those of this crate. A module is loaded when one of its kernels is first
    /// launched.
    pub modules: &'static [Image],
}

/// A file of kernels, PTX or machine code. What its kernels do is taken on trust.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelFile(PathBuf);

impl KernelFile {
    /// Trusts the file at `path`.
    ///
    /// # Safety
    /// The kernels in the file do the same to memory as the built-in ones: they were built from the sources of this
    /// program, or from others with the same contracts. The parameter blocks that the file states are compared with
    /// those that the host passes, but nothing keeps a file from stating what is not so.
    pub unsafe fn trusted(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl PartialEq for DeviceOptions {
    fn eq(&self, other: &Self) -> bool {
        let Self { level, shared_bytes, sms, unfused, prefill, lossless, plain_beside, kernels, modules } = other;
        // Compared by address, since the texts of modules are megabytes.
        let same_modules = std::ptr::eq(self.modules, *modules);
        (self.level, self.shared_bytes, self.sms, self.unfused) == (*level, *shared_bytes, *sms, *unfused)
            && (self.prefill, self.lossless) == (*prefill, *lossless)
            && (self.plain_beside, &self.kernels) == (*plain_beside, kernels)
            && same_modules
    }
}

impl Eq for DeviceOptions {}
