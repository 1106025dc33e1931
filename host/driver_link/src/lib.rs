//! Forwards the CUDA driver's entry points to `libcuda.so.1`, opened at the first call.
//!
//! `cust` is written to be linked with the driver library, which would keep the program from starting on a machine
//! without one. This crate defines the entry points that are used, under their own names; each looks its original up
//! once and jumps there. Without a driver they answer [`NO_DEVICE`], so that the caller gets an ordinary error.
//!
//! Every argument of these functions is an integer or a pointer: one machine word each on the 64-bit systems
//! that have a CUDA driver. That is why one untyped signature serves them all.
//!
//! A `libcuda.so` for the linker alone, an empty linker script, lies in `cuda/lib64`; `.cargo/config.toml`
//! points `CUDA_LIBRARY_PATH` there.
#![warn(missing_docs)]

use std::ffi::{CStr, c_char};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use libloading::Library;

/// `CUDA_ERROR_NO_DEVICE`: what every entry point answers where there is no driver.
pub const NO_DEVICE: u32 = 100;
/// `CUDA_ERROR_NOT_FOUND`: the driver is there, but too old to have the entry point.
pub const NOT_FOUND: u32 = 500;

/// The driver library, opened at the first use; the error says why it could not be.
fn library() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    let opened = LIBRARY.get_or_init(|| {
        // SAFETY: libcuda's initialisers are meant to run in any process that opens it.
        unsafe { Library::new("libcuda.so.1") }.map_err(|e| e.to_string())
    });
    opened.as_ref().map_err(String::as_str)
}

/// Whether a driver library could be opened, and if not, why.
///
/// # Errors
/// The loader's message.
pub fn available() -> Result<(), &'static str> {
    library().map(|_| ())
}

/// Looks an entry point up; the answer is kept by the caller.
fn resolve(name: &str) -> Result<usize, u32> {
    let library = library().map_err(|_| NO_DEVICE)?;
    // SAFETY: only the symbol's address is taken, as a word.
    let symbol = unsafe { library.get::<unsafe extern "C" fn()>(name) };
    symbol.map(|f| *f as usize).map_err(|_| NOT_FOUND)
}

static COUNTING: AtomicBool = AtomicBool::new(false);

/// From now on, counts the calls of every entry point, of all threads. Without it, a call does no more than look at
/// this switch.
pub fn count_calls() {
    COUNTING.store(true, Ordering::Relaxed);
}

/// How often each entry point was called since [`count_calls`].
pub fn calls() -> impl Iterator<Item = (&'static str, u64)> {
    COUNTS.iter().map(|(name, count)| (*name, count.load(Ordering::Relaxed)))
}

macro_rules! forward {
    ($($name:ident($($arg:ident)*);)*) => {
        #[allow(non_upper_case_globals)]
        mod counts {
            $(pub(super) static $name: super::AtomicU64 = super::AtomicU64::new(0);)*
        }

        static COUNTS: &[(&str, &AtomicU64)] = &[$((stringify!($name), &counts::$name)),*];

        $(
        #[doc = concat!("Forwards to the driver's `", stringify!($name), "`.")]
        ///
        /// # Safety
        /// As for the original.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe extern "C" fn $name($($arg: usize),*) -> u32 {
            static ORIGINAL: OnceLock<Result<usize, u32>> = OnceLock::new();
            if COUNTING.load(Ordering::Relaxed) {
                counts::$name.fetch_add(1, Ordering::Relaxed);
            }
            match *ORIGINAL.get_or_init(|| resolve(stringify!($name))) {
                Err(code) => code,
                Ok(address) => {
                    type Original = unsafe extern "C" fn($(forward!(@word $arg)),*) -> u32;
                    // SAFETY: the driver exports a function of this name, whose arguments are all one word.
                    let original = unsafe { std::mem::transmute::<usize, Original>(address) };
                    // SAFETY: the caller's duty, passed on.
                    unsafe { original($($arg),*) }
                }
            }
        })*
    };
    (@word $arg:ident) => { usize };
}

forward! {
    cuInit(flags);
    cuDriverGetVersion(version);
    cuDeviceGet(device ordinal);
    cuDeviceGetCount(count);
    cuDeviceGetName(name len device);
    cuDeviceGetAttribute(value attribute device);
    cuDeviceGetUuid(uuid device);
    cuDeviceTotalMem_v2(bytes device);
    cuDevicePrimaryCtxRetain(context device);
    cuDevicePrimaryCtxRelease_v2(device);
    cuDevicePrimaryCtxReset_v2(device);
    cuDevicePrimaryCtxGetState(device flags active);
    cuDevicePrimaryCtxSetFlags_v2(device flags);
    cuCtxGetCurrent(context);
    cuCtxSetCurrent(context);
    cuCtxPushCurrent_v2(context);
    cuCtxPopCurrent_v2(context);
    cuCtxDestroy_v2(context);
    cuCtxSynchronize();
    cuCtxGetApiVersion(context version);
    cuCtxGetCacheConfig(config);
    cuCtxGetDevice(device);
    cuCtxGetFlags(flags);
    cuCtxGetLimit(value limit);
    cuCtxGetSharedMemConfig(config);
    cuCtxGetStreamPriorityRange(least greatest);
    cuCtxSetCacheConfig(config);
    cuCtxSetLimit(limit value);
    cuCtxSetSharedMemConfig(config);
    cuCtxResetPersistingL2Cache();
    cuEventCreate(event flags);
    cuEventDestroy_v2(event);
    cuEventElapsedTime(milliseconds start end);
    cuEventQuery(event);
    cuEventRecord(event stream);
    cuEventSynchronize(event);
    cuFuncGetAttribute(value attribute function);
    cuFuncSetAttribute(function attribute value);
    cuFuncSetCacheConfig(function config);
    cuFuncSetSharedMemConfig(function config);
    cuGraphDestroy(graph);
    cuGraphExecDestroy(exec);
    cuGraphInstantiateWithFlags(exec graph flags);
    cuGraphLaunch(exec stream);
    cuStreamBeginCapture_v2(stream mode);
    cuStreamEndCapture(stream graph);
    cuLaunchKernel(function grid_x grid_y grid_z block_x block_y block_z shared stream params extra);
    cuLaunchKernelEx(config function params extra);
    cuLaunchCooperativeKernel(function grid_x grid_y grid_z block_x block_y block_z shared stream params);
    cuMemAlloc_v2(pointer bytes);
    cuMemFree_v2(pointer);
    cuMemGetInfo_v2(free total);
    cuMemHostAlloc(pointer bytes flags);
    cuMemAllocHost_v2(pointer bytes);
    cuMemFreeHost(pointer);
    cuMemHostGetDevicePointer_v2(device host flags);
    cuMemHostRegister_v2(pointer bytes flags);
    cuMemHostUnregister(pointer);
    cuMemcpy(destination source bytes);
    cuMemcpyAsync(destination source bytes stream);
    cuMemcpyDtoDAsync_v2(destination source bytes stream);
    cuMemcpyDtoD_v2(destination source bytes);
    cuMemcpyDtoHAsync_v2(destination source bytes stream);
    cuMemcpyDtoH_v2(destination source bytes);
    cuMemcpyHtoDAsync_v2(destination source bytes stream);
    cuMemcpyHtoD_v2(destination source bytes);
    cuMemsetD8Async(pointer value count stream);
    cuMemsetD8_v2(pointer value count);
    cuModuleGetFunction(function module name);
    cuModuleGetGlobal_v2(pointer bytes module name);
    cuModuleLoadData(module image);
    cuModuleLoadDataEx(module image count options values);
    cuModuleLoadFatBinary(module image);
    cuModuleUnload(module);
    cuOccupancyAvailableDynamicSMemPerBlock(bytes function blocks size);
    cuOccupancyMaxActiveClusters(clusters function config);
    cuOccupancyMaxActiveBlocksPerMultiprocessor(count function size shared);
    cuOccupancyMaxPotentialBlockSize(grid size function callback shared limit);
    cuPointerGetAttribute(data attribute pointer);
    cuStreamAddCallback(stream callback data flags);
    cuStreamCreateWithPriority(stream flags priority);
    cuStreamDestroy_v2(stream);
    cuStreamQuery(stream);
    cuStreamSynchronize(stream);
    cuStreamWaitEvent(stream event flags);
    cuTensorMapEncodeTiled(map kind rank address sizes strides tile steps interleave swizzle promotion fill);
}

/// The text that stands in for the driver's where there is no driver.
const NO_DRIVER: &CStr = c"no CUDA driver";

/// `cust` prints every error through these two and takes their failure for a bug, so they answer
/// without a driver too.
macro_rules! forward_text {
    ($($name:ident)*) => { $(
        #[doc = concat!("Forwards to the driver's `", stringify!($name), "`, or gives a fixed text.")]
        ///
        /// # Safety
        /// `text` is valid for one pointer.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        pub unsafe extern "C" fn $name(code: u32, text: *mut *const c_char) -> u32 {
            if let Ok(address) = resolve(stringify!($name)) {
                type Original = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
                // SAFETY: the driver exports a function of this name and signature.
                let original = unsafe { std::mem::transmute::<usize, Original>(address) };
                // SAFETY: the caller's duty, passed on.
                if unsafe { original(code, text) } == 0 {
                    return 0;
                }
            }
            // SAFETY: `text` is valid for a pointer, and the constant lives for ever.
            unsafe { *text = NO_DRIVER.as_ptr() };
            0
        }
    )* };
}

forward_text! { cuGetErrorString cuGetErrorName }
