//! A device that runs kernels: a CUDA card, or the emulator of `cuda_std`, behind one interface.
//!
//! Everything above this module (weights, cache, forward pass, decode loop) is the same code on both, so that tests
//! without a GPU run the launches that a GPU runs.

mod buffer;
mod calls;
mod capabilities;
mod cuda;
mod emulated;
mod images;
mod kernels;
mod level;
mod options;
mod pinned;
mod recording;
mod tensor;
mod timing;
mod upload;

use std::sync::Arc;

use cuda_std::Kernel;
use cuda_std::emulator::MissingWait;

pub use buffer::Buffer;
pub use calls::Calls;
pub use capabilities::Capabilities;
pub use cuda::{CardInfo, STACK_BYTES, cards};
pub use images::{IMAGES, Image, MAIN};
pub use level::Level;
pub use options::{DeviceOptions, KernelFile};
pub use pinned::{Mapped, Pinned, PinnedSlice, PinnedSliceMut};
pub use tensor::TensorMaps;
pub use timing::{Graph, Marker, Timer};
pub use upload::{Fill, Filling, Group, Region};

use crate::Error;

/// The size of a grid, in CTAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid(pub u32, pub u32, pub u32);

impl From<u32> for Grid {
    fn from(x: u32) -> Self {
        Self(x, 1, 1)
    }
}

impl From<(u32, u32)> for Grid {
    fn from((x, y): (u32, u32)) -> Self {
        Self(x, y, 1)
    }
}

impl From<(u32, u32, u32)> for Grid {
    fn from((x, y, z): (u32, u32, u32)) -> Self {
        Self(x, y, z)
    }
}

/// A device with a queue of work. Clones share both. [`Device::beside`] makes another queue on the same device.
#[derive(Clone)]
pub struct Device(Arc<DeviceKind>);

enum DeviceKind {
    Cuda(cuda::Cuda),
    Emulator(Box<emulated::Emulator>),
}

/// When the CTAs of a launch may begin.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begin {
    /// After the launches ahead have ended, as SMs become free.
    InTurn,
    /// As [`InTurn`](Self::InTurn). In addition, the next launch begins only after this one has ended, even if it is
    /// `Early`.
    Whole,
    /// As [`InTurn`](Self::InTurn), but all at once: a cooperative launch.
    Together,
    /// While the last CTAs of the launch ahead still run.
    Early,
}

/// What a launch needs to know about its kernel.
#[derive(Clone, Copy)]
struct Entry {
    name: &'static str,
    module: &'static str,
    /// The digest of the parameter block that the host passes.
    layout: u64,
    threads: u32,
    cluster: u32,
}

impl Entry {
    const fn of<K: Kernel>() -> Self {
        Self { name: K::NAME, module: K::MODULE, layout: K::LAYOUT, threads: K::THREADS, cluster: K::CLUSTER }
    }
}

impl Device {
    /// Opens CUDA card `ordinal` and loads the kernels for its level. The card's primary context, which other CUDA code
    /// of the process may share, gets a limit of [`STACK_BYTES`] for a thread's stack.
    ///
    /// # Errors
    /// There is no driver or no such card, the card is older than compute capability 8.0, or the driver fails.
    pub fn cuda(ordinal: u32) -> Result<Self, Error> {
        Self::cuda_with(ordinal, &DeviceOptions::default())
    }

    /// As [`cuda`](Self::cuda), with `options`.
    ///
    /// # Errors
    /// As [`cuda`](Self::cuda). Also if a file of kernels cannot be read, or its kernels have other parameter blocks.
    pub fn cuda_with(ordinal: u32, options: &DeviceOptions) -> Result<Self, Error> {
        Ok(Self(Arc::new(DeviceKind::Cuda(cuda::Cuda::open(ordinal, options)?))))
    }

    /// The emulator: it runs every kernel lane by lane on the CPU, in an order drawn from `seed`. For checking, not for
    /// speed.
    pub fn emulator(seed: u64) -> Self {
        Self::emulator_with(seed, &DeviceOptions::default())
    }

    /// As [`emulator`](Self::emulator), with `options`. A file of kernels is ignored: the emulator runs the kernels of
    /// this program.
    pub fn emulator_with(seed: u64, options: &DeviceOptions) -> Self {
        Self(Arc::new(DeviceKind::Emulator(Box::new(emulated::Emulator::new(seed, options.clone())))))
    }

    /// Makes the emulator's launches of `K` leave out `wait`, as if the kernel lacked it. For tests that check that a
    /// missing wait is found. On a card this does nothing.
    pub fn leave_out<K: Kernel>(&self, wait: MissingWait) {
        if let DeviceKind::Emulator(emulator) = &*self.0 {
            emulator.leave_out(K::NAME, wait);
        }
    }

    /// Whether a launch has left out a wait since [`leave_out`](Self::leave_out) was called.
    pub fn has_left_out(&self) -> bool {
        matches!(&*self.0, DeviceKind::Emulator(emulator) if emulator.has_left_out())
    }

    /// The options that it was opened with.
    pub fn options(&self) -> &DeviceOptions {
        match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.options(),
            DeviceKind::Emulator(emulator) => emulator.options(),
        }
    }

    /// The device's name, for a person to read.
    pub fn name(&self) -> &str {
        match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.name(),
            DeviceKind::Emulator(_) => "emulator",
        }
    }

    /// Another queue on the same device. Work on different queues runs concurrently. (The emulator runs one launch at a
    /// time, whatever its queue.)
    ///
    /// # Errors
    /// A driver error.
    pub fn beside(&self) -> Result<Self, Error> {
        match &*self.0 {
            DeviceKind::Cuda(cuda) => Ok(Self(Arc::new(DeviceKind::Cuda(cuda.beside()?)))),
            DeviceKind::Emulator(_) => Ok(self.clone()),
        }
    }

    /// What the device can do.
    pub fn capabilities(&self) -> &Capabilities {
        match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.capabilities(),
            DeviceKind::Emulator(emulator) => emulator.capabilities(),
        }
    }

    /// Number of SMs.
    pub fn sms(&self) -> u32 {
        self.capabilities().sms
    }

    /// Free device memory in bytes. None for the emulator, which uses the host's memory.
    ///
    /// # Errors
    /// A driver error.
    pub fn free_memory(&self) -> Result<Option<u64>, Error> {
        match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.free_memory().map(Some),
            DeviceKind::Emulator(_) => Ok(None),
        }
    }

    /// Enqueues a kernel. `shared_bytes` is its dynamic shared memory.
    ///
    /// # Safety
    /// Every address in `params` points to live device memory as large as the kernel's parameter block says, and stays
    /// alive until the device is done.
    ///
    /// # Errors
    /// A refused launch; under the emulator also whatever the kernel did wrong.
    pub unsafe fn launch<K: Kernel>(
        &self,
        grid: impl Into<Grid>,
        shared_bytes: u32,
        params: K::Params,
    ) -> Result<(), Error> {
        // SAFETY: the caller's word.
        unsafe { self.launch_kind::<K>(grid.into(), shared_bytes, Begin::InTurn, params) }
    }

    /// As [`launch`](Self::launch), but all CTAs are resident at once, so that they may wait for each other.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch).
    ///
    /// # Errors
    /// As [`launch`](Self::launch), and if the CTAs of the grid do not fit on the device at once.
    pub unsafe fn launch_cooperative<K: Kernel>(
        &self,
        grid: impl Into<Grid>,
        shared_bytes: u32,
        params: K::Params,
    ) -> Result<(), Error> {
        // SAFETY: the caller's word.
        unsafe { self.launch_kind::<K>(grid.into(), shared_bytes, Begin::Together, params) }
    }

    /// As [`launch`](Self::launch), for a kernel that itself waits for the launches ahead of it, by
    /// [`cuda_std::dependent_launch`]. On devices that can, it may begin before they are done (programmatic dependent
    /// launch).
    ///
    /// # Safety
    /// As for [`launch`](Self::launch). Every CTA waits before it touches memory that others write, or writes memory
    /// that others touch.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub unsafe fn launch_early<K: Kernel>(
        &self,
        grid: impl Into<Grid>,
        shared_bytes: u32,
        params: K::Params,
    ) -> Result<(), Error> {
        let begin = if self.capabilities().early_launches { Begin::Early } else { Begin::InTurn };
        // SAFETY: the caller's word.
        unsafe { self.launch_kind::<K>(grid.into(), shared_bytes, begin, params) }
    }

    /// As [`launch`](Self::launch), for a kernel that writes memory which later launches read [before they
    /// wait](Self::launch_early). The next launch begins only when this one is done, even if it is an early launch.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch).
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub unsafe fn launch_whole<K: Kernel>(
        &self,
        grid: impl Into<Grid>,
        shared_bytes: u32,
        params: K::Params,
    ) -> Result<(), Error> {
        // SAFETY: the caller's word.
        unsafe { self.launch_kind::<K>(grid.into(), shared_bytes, Begin::Whole, params) }
    }

    /// How many clusters of the kernel's CTAs run at once on an idle device, with this much dynamic shared memory. 0
    /// if the driver does not say, and on the emulator.
    pub fn clusters_at_once<K: Kernel>(&self, shared_bytes: u32) -> u32 {
        match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.clusters_at_once(Entry::of::<K>(), shared_bytes),
            DeviceKind::Emulator(_) => 0,
        }
    }

    unsafe fn launch_kind<K: Kernel>(
        &self,
        grid: Grid,
        shared_bytes: u32,
        begin: Begin,
        params: K::Params,
    ) -> Result<(), Error> {
        match &*self.0 {
            // SAFETY: the caller's word; the parameter block is the kernel's own type.
            DeviceKind::Cuda(cuda) => unsafe { cuda.launch(Entry::of::<K>(), grid, shared_bytes, begin, &params) },
            DeviceKind::Emulator(emulator) => {
                let most = self.capabilities().shared_bytes;
                if shared_bytes > most {
                    let what =
                        format!("kernel `{}` wants {shared_bytes} bytes of shared memory; {most} is all", K::NAME);
                    return Err(Error::Emulator(what));
                }
                // SAFETY: the caller's word.
                unsafe { emulator.launch::<K>(grid, shared_bytes, begin, params) }
            }
        }
    }

    /// Whether prompts run in passes of many rows, by the kernels for Hopper: see [`DeviceOptions::prefill`].
    pub fn has_prefill(&self) -> bool {
        self.capabilities().has_gemms() && self.options().prefill.unwrap_or(!self.is_emulator())
    }

    /// Whether a decode step runs in one launch, if memory suffices: see [`DeviceOptions::unfused`].
    pub fn has_decode_kernel(&self) -> bool {
        self.capabilities().has_decode_kernel() && !self.options().unfused
    }

    /// Whether the decode kernel has its full ring, and so reads packed weights: see [`Capabilities::has_full_ring`].
    pub fn has_full_ring(&self) -> bool {
        self.capabilities().has_full_ring() && !self.options().unfused
    }

    /// Whether the main module is the built-in machine code and no file replaces kernels. Otherwise the driver may have
    /// had to compile kernels.
    pub fn has_machine_code(&self) -> bool {
        match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.has_machine_code(),
            DeviceKind::Emulator(_) => false,
        }
    }

    /// Whether this and `other` are queues of the same device.
    pub fn is_same_card(&self, other: &Self) -> bool {
        match (&*self.0, &*other.0) {
            (DeviceKind::Cuda(a), DeviceKind::Cuda(b)) => a.is_same_card(b),
            (DeviceKind::Emulator(_), DeviceKind::Emulator(_)) => Arc::ptr_eq(&self.0, &other.0),
            _ => false,
        }
    }

    /// Whether this is the emulator.
    pub fn is_emulator(&self) -> bool {
        matches!(&*self.0, DeviceKind::Emulator(_))
    }

    /// Waits until everything enqueued on this queue is done.
    ///
    /// # Errors
    /// The error of a kernel that failed, or a driver error; [`Error::Recording`] while the queue's work is recorded.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _waiting = self.refuse_while_recording("a wait")?;
        match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.synchronize(),
            DeviceKind::Emulator(emulator) => {
                emulator.synchronize();
                Ok(())
            }
        }
    }

    /// Checks whether an enqueued kernel has failed, without waiting.
    ///
    /// # Errors
    /// The error of the kernel that failed.
    pub fn check(&self) -> Result<(), Error> {
        match &*self.0 {
            DeviceKind::Cuda(cuda) => cuda.check(),
            DeviceKind::Emulator(_) => Ok(()),
        }
    }
}
