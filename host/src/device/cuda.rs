//! A CUDA card, by `cust`, and by the driver's own calls where `cust` lacks them.

use std::collections::HashMap;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use cust::context::{Context, CurrentContext, ResourceLimit};
use cust::device::{Device as CudaDevice, DeviceAttribute};
use cust::error::CudaError;
use cust::stream::{Stream, StreamFlags};
use cust::sys;

use super::capabilities::{Capabilities, Hardware};
use super::kernels::Kernels;
use super::recording::{Freed, Recording, Recordings};
use super::{Begin, DeviceOptions, Entry, Grid};
use crate::Error;
use crate::timed::timed;

/// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: the launch need not wait for the end of the launch ahead.
const MAY_BEGIN_EARLY: u32 = 6;
/// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`: the cluster's size in x, y and z, in CTAs.
const CLUSTER_DIMENSION: u32 = 4;

/// The driver's `CUlaunchAttribute`, which `cust` does not have.
#[repr(C)]
struct LaunchAttribute {
    id: u32,
    padding: u32,
    value: [u64; 8],
}

/// The driver's `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared_bytes: u32,
    stream: sys::CUstream,
    attributes: *const LaunchAttribute,
    count: u32,
}

// `driver_link` forwards it.
unsafe extern "C" {
    fn cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: sys::CUfunction,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> sys::CUresult;

    fn cuOccupancyMaxActiveClusters(
        clusters: *mut u32,
        function: sys::CUfunction,
        config: *const LaunchConfig,
    ) -> sys::CUresult;
}

/// Limit of a thread's stack, in bytes. The kernels' machine code needs no more. If another kernel does, the driver
/// enlarges the stacks.
pub const STACK_BYTES: usize = 128;

/// A queue of a card. Work in one queue runs in order; different queues run concurrently.
pub(super) struct Cuda {
    // Fields are dropped in this order: whatever lives in the context must go before the context.
    stream: Stream,
    recording: Recording,
    /// Whether the next launch must wait until the last one is done, even if it is an early launch.
    holds: AtomicBool,
    card: Arc<Card>,
}

/// What all queues of a card share.
struct Card {
    name: String,
    capabilities: Capabilities,
    options: DeviceOptions,
    kernels: Mutex<Kernels>,
    clusters: Mutex<HashMap<(&'static str, u32), u32>>,
    recordings: Recordings,
    context: Context,
}

// SAFETY: these are handles that any thread may pass to the driver, which does its own locking.
unsafe impl Sync for Cuda {}
// SAFETY: the same, and every use first makes the context current on its own thread.
unsafe impl Send for Cuda {}
// SAFETY: as for `Cuda`.
unsafe impl Sync for Card {}
// SAFETY: as for `Cuda`.
unsafe impl Send for Card {}

/// Facts about a card, for a person to read.
#[derive(Clone, Debug)]
pub struct CardInfo {
    /// The card's number, as in `cuda:N`.
    pub ordinal: u32,
    /// The driver's name for the card.
    pub name: String,
    /// Device memory in bytes.
    pub memory: u64,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// What the card can do. None if it is too old.
    pub capabilities: Option<Capabilities>,
}

fn initialise() -> Result<(), Error> {
    static DONE: OnceLock<Result<(), String>> = OnceLock::new();
    let done = DONE.get_or_init(|| {
        driver_link::available().map_err(|e| format!("the CUDA driver library could not be opened ({e})"))?;
        let started = cust::init(cust::CudaFlags::empty());
        started.map_err(|e| {
            let reason = format!("the CUDA driver could not be started ({e})");
            // A driver without a card is no surprise, so there is no warning.
            if e != CudaError::NoDevice {
                tracing::warn!("{reason}: going on as if there were no card");
            }
            reason
        })
    });
    done.clone().map_err(|reason| Error::NoCuda { reason })
}

/// The cards that the driver shows. Empty if there is no usable driver.
///
/// # Errors
/// The driver was started, but fails.
pub fn cards() -> Result<Vec<CardInfo>, Error> {
    if initialise().is_err() {
        return Ok(Vec::new());
    }
    let count = CudaDevice::num_devices().map_err(Error::driver("counting devices"))?;
    (0..count)
        .map(|ordinal| {
            let device = CudaDevice::get_device(ordinal).map_err(Error::driver("opening a device"))?;
            let capability = capability(device)?;
            let (name, hardware) = (name(device)?, hardware(device, capability)?);
            Ok(CardInfo {
                ordinal,
                memory: device.total_memory().map_err(Error::driver("sizing a device"))? as u64,
                capability,
                capabilities: Capabilities::of(&name, &hardware, &DeviceOptions::default()).ok(),
                name,
            })
        })
        .collect()
}

fn name(device: CudaDevice) -> Result<String, Error> {
    device.name().map_err(Error::driver("naming a device"))
}

fn capability(device: CudaDevice) -> Result<(i32, i32), Error> {
    let get = |a| device.get_attribute(a).map_err(Error::driver("asking for the compute capability"));
    Ok((get(DeviceAttribute::ComputeCapabilityMajor)?, get(DeviceAttribute::ComputeCapabilityMinor)?))
}

/// The properties of a card, as the driver states them.
fn hardware(device: CudaDevice, capability: (i32, i32)) -> Result<Hardware, Error> {
    let get = |attribute| device.get_attribute(attribute).map_err(Error::driver("asking what a card has"));
    let sms = get(DeviceAttribute::MultiprocessorCount)? as u32;
    let mut shared_bytes = 0;
    let attribute = sys::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    // SAFETY: `shared_bytes` is valid for a write, and the device is the driver's.
    let code = unsafe { sys::cuDeviceGetAttribute(&mut shared_bytes, attribute, device.as_raw()) };
    check("asking what a card has", code)?;
    // Memory makes two transfers per clock cycle.
    let bytes = 2.0
        * f64::from(get(DeviceAttribute::MemoryClockRate)?)
        * f64::from(get(DeviceAttribute::GlobalMemoryBusWidth)?)
        / 8.0;
    let cycles = f64::from(get(DeviceAttribute::ClockRate)?) * f64::from(sms);
    Ok(Hardware {
        capability,
        shared_bytes: shared_bytes as u32,
        l2_bytes: get(DeviceAttribute::L2CacheSize)? as u32,
        sms,
        bytes_per_cycle: bytes / cycles.max(1.0),
    })
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Fields are freed on the thread that drops this, which needs the context.
        let _ = self.enter();
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        let _ = CurrentContext::set_current(&self.context);
    }
}

impl Cuda {
    pub(super) fn open(ordinal: u32, options: &DeviceOptions) -> Result<Self, Error> {
        timed("starting the driver", initialise)?;
        let count = CudaDevice::num_devices().map_err(Error::driver("counting devices"))?;
        if ordinal >= count {
            return Err(Error::NoCuda { reason: format!("there is no card {ordinal}; the driver shows {count}") });
        }
        let device = CudaDevice::get_device(ordinal).map_err(Error::driver("opening a device"))?;
        let name = name(device)?;
        let hardware = hardware(device, capability(device)?)?;
        let capabilities = Capabilities::of(&name, &hardware, options)?;
        let context = timed("making a context", || Context::new(device)).map_err(Error::driver("making a context"))?;
        // The driver reserves a stack for every thread that the SMs have room for. Its default would take 260 MiB of an
        // H200.
        CurrentContext::set_resource_limit(ResourceLimit::StackSize, STACK_BYTES)
            .map_err(Error::driver("sizing stacks"))?;
        let kernels = Mutex::new(Kernels::load(capabilities.level, options)?);
        let stream = Stream::new(StreamFlags::NON_BLOCKING, None).map_err(Error::driver("making a stream"))?;
        let (clusters, recordings) = (Mutex::default(), Recordings::default());
        let options = options.clone();
        let card = Card { name, capabilities, options, kernels, clusters, recordings, context };
        Ok(Self { stream, recording: Recording::default(), holds: AtomicBool::new(false), card: Arc::new(card) })
    }

    /// Makes another queue on this card.
    pub(super) fn beside(&self) -> Result<Self, Error> {
        self.enter()?;
        let stream = Stream::new(StreamFlags::NON_BLOCKING, None).map_err(Error::driver("making a stream"))?;
        Ok(Self { stream, recording: Recording::default(), holds: AtomicBool::new(false), card: self.card.clone() })
    }

    pub(super) fn recording(&self) -> &Recording {
        &self.recording
    }

    /// The recordings of all queues of the card.
    pub(super) fn recordings(&self) -> &Recordings {
        &self.card.recordings
    }

    pub(super) fn is_same_card(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.card, &other.card)
    }

    pub(super) fn name(&self) -> &str {
        &self.card.name
    }

    pub(super) fn capabilities(&self) -> &Capabilities {
        &self.card.capabilities
    }

    pub(super) fn options(&self) -> &DeviceOptions {
        &self.card.options
    }

    pub(super) fn has_machine_code(&self) -> bool {
        self.card.kernels.lock().unwrap_or_else(|e| e.into_inner()).has_machine_code()
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Makes this card's context current on the calling thread.
    pub(super) fn enter(&self) -> Result<(), Error> {
        CurrentContext::set_current(&self.card.context).map_err(Error::driver("entering the context"))
    }

    pub(super) fn free_memory(&self) -> Result<u64, Error> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: both are valid for writes.
        check("asking for free memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok(free as u64)
    }

    pub(super) fn allocate(&self, bytes: usize) -> Result<u64, Error> {
        self.enter()?;
        let mut address = 0;
        // SAFETY: `address` is valid for a write.
        let code = unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
        if code == sys::cudaError_enum::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(Error::OutOfMemory { wanted: bytes as u64, free: self.free_memory()? });
        }
        check("allocating", code)?;
        // SAFETY: all of it.
        unsafe { self.zero(address, bytes)? };
        Ok(address)
    }

    /// Frees memory; while recorded work of the card may use it, only notes it to be freed later.
    ///
    /// # Safety
    /// The memory is from [`allocate`](Self::allocate) or [`allocate_mapped`](Self::allocate_mapped), and only enqueued
    /// or recorded work uses it from now on.
    pub(super) unsafe fn free(&self, memory: Freed) {
        // SAFETY: the caller's word; there are no recordings when this is called.
        self.card.recordings.free(memory, |memory| unsafe { self.free_now(memory) });
    }

    /// Called when a recording's graph is gone, or could not be made. Frees the memory that only recordings kept.
    pub(super) fn let_go(&self) {
        // SAFETY: the memory's owner freed it before; only recordings kept it.
        self.card.recordings.remove(|memory| unsafe { self.free_now(memory) });
    }

    /// Frees memory when the work that was enqueued so far is done. A failure cannot be handled here.
    ///
    /// # Safety
    /// As for [`free`](Self::free), and no recorded work uses it.
    unsafe fn free_now(&self, memory: Freed) {
        if self.enter().is_err() {
            return;
        }
        match memory {
            // SAFETY: the caller's word; the driver waits for work that uses the memory.
            Freed::Device(address) => unsafe { sys::cuMemFree_v2(address) },
            // Kernels in any queue may still write to it. If they cannot be waited for, it is never freed.
            Freed::Pinned(_) if self.synchronize_card().is_err() => return,
            // SAFETY: the caller's word; the card has been waited for.
            Freed::Pinned(host) => unsafe { sys::cuMemFreeHost(std::ptr::with_exposed_provenance_mut(host)) },
        };
    }

    pub(super) fn allocate_mapped(&self, bytes: usize) -> Result<(*mut u32, u64), Error> {
        self.enter()?;
        let mut host: *mut c_void = std::ptr::null_mut();
        let mut device = 0;
        // SAFETY: `host` is valid for a write.
        let code = unsafe { sys::cuMemHostAlloc(&mut host, bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP) };
        check("allocating pinned memory", code)?;
        // SAFETY: fresh memory of that size.
        unsafe { host.write_bytes(0, bytes) };
        // SAFETY: `device` is valid for a write and `host` came from the call above.
        let mapped = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, host, 0) };
        if let Err(error) = check("mapping pinned memory", mapped) {
            // SAFETY: nobody knows of it yet.
            unsafe { sys::cuMemFreeHost(host) };
            return Err(error);
        }
        Ok((host.cast(), device))
    }

    /// # Safety
    /// The range is within one allocation.
    pub(super) unsafe fn zero(&self, address: u64, bytes: usize) -> Result<(), Error> {
        self.enter()?;
        // SAFETY: the caller's word.
        check("zeroing", unsafe { sys::cuMemsetD8Async(address, 0, bytes, self.stream.as_inner()) })
    }

    /// # Safety
    /// The range is within one allocation.
    pub(super) unsafe fn write(&self, to: u64, data: &[u8]) -> Result<(), Error> {
        self.enter()?;
        // SAFETY: the caller's word; the data is there until it has been read, as is seen to below.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, data.as_ptr().cast(), data.len(), self.stream.as_inner()) };
        check("copying to the device", code)?;
        // The driver has read pageable memory when it returns. Pinned memory the device reads later.
        if is_pinned(data) { self.synchronize() } else { Ok(()) }
    }

    /// # Safety
    /// The range is within one allocation.
    pub(super) unsafe fn read(&self, from: u64, out: &mut [u8]) -> Result<(), Error> {
        self.synchronize()?;
        // SAFETY: the caller's word, and `out` is as long.
        check("copying from the device", unsafe { sys::cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), from, out.len()) })
    }

    /// # Safety
    /// `params` is the kernel's parameter block, and its addresses are as the kernel wants them.
    pub(super) unsafe fn launch<P>(
        &self,
        kernel: Entry,
        grid: Grid,
        shared_bytes: u32,
        begin: Begin,
        params: &P,
    ) -> Result<(), Error> {
        self.enter()?;
        let Entry { name, threads, .. } = kernel;
        let function = self.function(kernel, shared_bytes)?;
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let (f, stream, arguments) = (function, self.stream.as_inner(), arguments.as_mut_ptr());
        let Grid(x, y, z) = grid;
        let begin = match (begin, self.holds.swap(begin == Begin::Whole, Ordering::Relaxed)) {
            (Begin::Early, true) => Begin::InTurn,
            _ => begin,
        };
        // SAFETY: the caller's word; the driver copies the parameters before it returns.
        let code = unsafe {
            let extra = std::ptr::null_mut();
            match begin {
                Begin::InTurn | Begin::Whole => {
                    sys::cuLaunchKernel(f, x, y, z, threads, 1, 1, shared_bytes, stream, arguments, extra)
                }
                Begin::Together => {
                    sys::cuLaunchCooperativeKernel(f, x, y, z, threads, 1, 1, shared_bytes, stream, arguments)
                }
                Begin::Early => {
                    let early = LaunchAttribute { id: MAY_BEGIN_EARLY, padding: 0, value: [1, 0, 0, 0, 0, 0, 0, 0] };
                    let config = LaunchConfig {
                        grid: [x, y, z],
                        block: [threads, 1, 1],
                        shared_bytes,
                        stream,
                        attributes: &early,
                        count: 1,
                    };
                    cuLaunchKernelEx(&config, f, arguments, extra)
                }
            }
        };
        check(name, code)
    }

    /// How many of a kernel's clusters an idle card runs at once. 0 if the driver does not say.
    pub(super) fn clusters_at_once(&self, kernel: Entry, shared_bytes: u32) -> u32 {
        let mut known = self.card.clusters.lock().unwrap_or_else(|e| e.into_inner());
        *known.entry((kernel.name, shared_bytes)).or_insert_with(|| {
            let clusters = self.ask_for_clusters(kernel, shared_bytes);
            clusters.unwrap_or_else(|e| {
                tracing::debug!("no clusters of {} blocks: {e}", kernel.cluster);
                0
            })
        })
    }

    fn ask_for_clusters(&self, kernel: Entry, shared_bytes: u32) -> Result<u32, Error> {
        self.enter()?;
        let Entry { name, threads, cluster: blocks, .. } = kernel;
        let function = self.function(kernel, shared_bytes)?;
        let cluster = LaunchAttribute {
            id: CLUSTER_DIMENSION,
            padding: 0,
            value: [u64::from(blocks) | 1 << 32, 1, 0, 0, 0, 0, 0, 0],
        };
        let config = LaunchConfig {
            grid: [blocks * self.card.capabilities.sms, 1, 1],
            block: [threads, 1, 1],
            shared_bytes,
            stream: self.stream.as_inner(),
            attributes: &cluster,
            count: 1,
        };
        let mut clusters = 0;
        // SAFETY: the function is the module's, `clusters` is valid for a write, and the configuration lives as long as
        // the call.
        check(name, unsafe { cuOccupancyMaxActiveClusters(&mut clusters, function, &config) })?;
        Ok(clusters)
    }

    fn function(&self, kernel: Entry, shared_bytes: u32) -> Result<sys::CUfunction, Error> {
        self.card.kernels.lock().unwrap_or_else(|e| e.into_inner()).function(kernel, shared_bytes)
    }

    pub(super) fn synchronize(&self) -> Result<(), Error> {
        self.enter()?;
        self.stream.synchronize().map_err(Error::driver("running the kernels"))
    }

    /// Waits for every queue of the card.
    pub(super) fn synchronize_card(&self) -> Result<(), Error> {
        self.enter()?;
        // SAFETY: the context is current.
        check("running the kernels", unsafe { sys::cuCtxSynchronize() })
    }

    /// Enqueues a copy between device and pinned memory, in either direction, or within either.
    ///
    /// # Safety
    /// Both ranges are live until the copy is done.
    pub(super) unsafe fn copy(&self, to: u64, from: u64, bytes: usize) -> Result<(), Error> {
        self.enter()?;
        // SAFETY: the caller's word; with unified addressing the driver tells the two kinds of memory apart.
        check("copying", unsafe { sys::cuMemcpyAsync(to, from, bytes, self.stream.as_inner()) })
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        self.enter()?;
        // SAFETY: the stream is ours and alive.
        let code = unsafe { sys::cuStreamQuery(self.stream.as_inner()) };
        if code == sys::cudaError_enum::CUDA_ERROR_NOT_READY {
            return Ok(());
        }
        check("running the kernels", code)
    }
}

/// Whether the driver knows the memory of `data`, so that the device may read it by itself.
fn is_pinned(data: &[u8]) -> bool {
    let is_known = |byte: &u8| {
        let attribute = sys::CUpointer_attribute_enum::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        let (mut kind, address) = (0u32, std::ptr::from_ref(byte).addr() as u64);
        // SAFETY: `kind` is valid for a write of this attribute; the address is only looked up.
        let code = unsafe { sys::cuPointerGetAttribute((&raw mut kind).cast(), attribute, address) };
        code == sys::cudaError_enum::CUDA_SUCCESS
    };
    [data.first(), data.last()].into_iter().flatten().any(is_known)
}

/// Turns a driver's result into an error that says what was being done.
pub(super) fn check(doing: &str, code: sys::CUresult) -> Result<(), Error> {
    if code == sys::cudaError_enum::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: `text` is valid for a write, and the driver's texts live for ever.
    let reason = unsafe {
        sys::cuGetErrorString(code, &mut text);
        if text.is_null() { "unknown error".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
    };
    Err(Error::Driver { doing: doing.into(), reason })
}
