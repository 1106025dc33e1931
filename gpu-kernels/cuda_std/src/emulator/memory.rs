//! Device memory: buffers, the process-wide registry of them, which of their bytes are initialised, and who uses them.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::any::type_name;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockWriteGuard};

use crate::tensor::TensorMap;
use crate::{Global, GlobalMut, bf16, f16};

/// Alignment of a buffer, and the size of the margins before and behind it. Nobody owns the two margins between
/// buffers, so that running over an end is noticed.
const ALIGNMENT: usize = 256;
/// What device bytes hold that nobody wrote: NaN as f32 or bf16, and out of range as an index.
const POISON: u8 = 0xff;

/// Every live buffer by its address.
static REGISTRY: RwLock<BTreeMap<u64, Arc<Allocation>>> = RwLock::new(BTreeMap::new());

/// One bit for each byte: whether it was ever written.
#[derive(Debug)]
pub struct Initialised(Box<[AtomicU16]>);

impl Initialised {
    fn new(bytes: usize, initialised: bool) -> Self {
        let word = if initialised { u16::MAX } else { 0 };
        Self((0..bytes.div_ceil(16)).map(|_| AtomicU16::new(word)).collect())
    }

    /// Calls `visit` with each word of the map that the bytes touch, and the bits in it that are theirs, as long as it
    /// returns true. Returns whether it always did.
    #[inline]
    fn words(&self, bytes: Range<usize>, mut visit: impl FnMut(&AtomicU16, u16) -> bool) -> bool {
        let (mut at, end) = (bytes.start, bytes.end);
        while at < end {
            let stop = end.min((at | 15) + 1);
            let bits = (((1u32 << (stop - at)) - 1) << (at & 15)) as u16;
            if !visit(&self.0[at / 16], bits) {
                return false;
            }
            at = stop;
        }
        true
    }

    #[inline]
    pub fn covers(&self, bytes: Range<usize>) -> bool {
        self.words(bytes, |word, bits| word.load(Ordering::Relaxed) & bits == bits)
    }

    #[inline]
    pub fn add(&self, bytes: Range<usize>) {
        self.words(bytes, |word, bits| {
            word.store(word.load(Ordering::Relaxed) | bits, Ordering::Relaxed);
            true
        });
    }

    fn clear(&self) {
        self.0.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    }
}

/// Bytes at a fixed address: a buffer of global memory, or the shared memory of a block.
#[derive(Debug)]
pub struct Allocation {
    start: *mut u8,
    len: usize,
    label: OnceLock<&'static str>,
    contents: String,
    pub initialised: Initialised,
    /// How many [`Hold`]s that read there are, or [`WRITER`].
    users: AtomicUsize,
}

/// Stands for one hold that writes.
const WRITER: usize = usize::MAX;

// SAFETY: once an allocation is shared, only those who have a `Hold` of it use its bytes, and a `Hold` that writes is
// the only one.
unsafe impl Send for Allocation {}
// SAFETY: as for `Send`: only those who have a `Hold` use the bytes, and a `Hold` that writes is the only one.
unsafe impl Sync for Allocation {}

impl Allocation {
    pub fn new(len: usize, initialised: bool, contents: String) -> Self {
        let layout = Self::layout(len);
        // SAFETY: the layout has at least the size of the margins.
        let raw = unsafe { alloc(layout) };
        if raw.is_null() {
            handle_alloc_error(layout);
        }
        // SAFETY: the margin before the bytes is within the allocation.
        let start = unsafe { raw.add(ALIGNMENT) };
        // SAFETY: `len` bytes from there are as well.
        unsafe { start.write_bytes(POISON, len) };
        let initialised = Initialised::new(len, initialised);
        Self { start, len, label: OnceLock::new(), contents, initialised, users: AtomicUsize::new(0) }
    }

    /// The layout of a margin, the bytes, and a margin.
    fn layout(len: usize) -> Layout {
        let size = len.checked_next_multiple_of(ALIGNMENT).and_then(|len| len.checked_add(2 * ALIGNMENT));
        let layout = size.and_then(|size| Layout::from_size_align(size, ALIGNMENT).ok());
        layout.expect("a buffer fits the address space")
    }

    pub fn start(&self) -> *mut u8 {
        self.start
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// What errors call the allocation.
    pub fn name(&self) -> String {
        match self.label.get() {
            Some(label) => format!("buffer `{label}` ({})", self.contents),
            None => format!("buffer {}", self.contents),
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: the pointer and the layout are those of the allocation.
        unsafe { dealloc(self.start.sub(ALIGNMENT), Self::layout(self.len)) }
    }
}

/// The right to read the bytes of an allocation, or to write them too, until it is dropped.
///
/// Several holds may read at once; a hold that writes is the only one. A launch holds every buffer that it uses until
/// it ends, and the host holds what it copies. Addresses are plain numbers, so nothing else keeps two threads from a
/// data race. Nobody waits for a hold: two launches might wait for each other. Besides, two uses that nothing orders
/// are a mistake among threads as they are among lanes.
#[derive(Debug)]
pub struct Hold {
    allocation: Arc<Allocation>,
    writes: bool,
}

impl Hold {
    /// A hold that reads; or, in words, what is in the way.
    pub fn read(allocation: Arc<Allocation>) -> Result<Self, String> {
        // One reader more. The addition overflows if somebody writes.
        let more = |users: usize| users.checked_add(1);
        match allocation.users.fetch_update(Ordering::Acquire, Ordering::Relaxed, more) {
            Ok(_) => Ok(Self { allocation, writes: false }),
            Err(_) => Err(format!("{} is used here while it is written elsewhere", allocation.name())),
        }
    }

    /// A hold that reads and writes; or, in words, what is in the way.
    pub fn write(allocation: Arc<Allocation>) -> Result<Self, String> {
        let mut hold = Self::read(allocation)?;
        hold.begin_to_write().map(|()| hold)
    }

    #[inline]
    pub fn writes(&self) -> bool {
        self.writes
    }

    /// Lets a hold write as well. Fails if there are other holds.
    #[cold]
    pub fn begin_to_write(&mut self) -> Result<(), String> {
        // This hold must be the only user.
        if !self.writes && self.users.compare_exchange(1, WRITER, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Err(format!("{} is written here while it is used elsewhere", self.name()));
        }
        self.writes = true;
        Ok(())
    }

    /// Makes the bytes as if new: poisoned and uninitialised.
    ///
    /// # Panics
    /// If the hold does not write.
    pub fn poison(&mut self) {
        assert!(self.writes, "a hold that writes");
        // SAFETY: the bytes are the allocation's, and nobody else uses them.
        unsafe { self.start.write_bytes(POISON, self.len) };
        self.initialised.clear();
    }
}

impl Deref for Hold {
    type Target = Allocation;

    #[inline]
    fn deref(&self) -> &Allocation {
        &self.allocation
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.writes {
            self.users.store(0, Ordering::Release);
        } else {
            self.users.fetch_sub(1, Ordering::Release);
        }
    }
}

fn registry() -> RwLockWriteGuard<'static, BTreeMap<u64, Arc<Allocation>>> {
    REGISTRY.write().unwrap_or_else(PoisonError::into_inner)
}

/// The live allocation that holds the address; or, in words, what is nearest.
pub fn find(address: u64) -> Result<Arc<Allocation>, String> {
    let registry = REGISTRY.read().unwrap_or_else(PoisonError::into_inner);
    match registry.range(..=address).next_back() {
        Some((start, allocation)) => {
            let offset = address - start;
            if offset < allocation.len as u64 {
                return Ok(allocation.clone());
            }
            let beyond = offset - allocation.len as u64;
            Err(format!("{beyond} bytes past the end of {}", allocation.name()))
        }
        None => Err("in no buffer".to_string()),
    }
}

/// The live allocation that holds all of these bytes, and where in it the first one is. Panics if there is none.
fn find_all(address: u64, len: usize) -> (Arc<Allocation>, usize) {
    let allocation = find(address).unwrap_or_else(|nearest| panic!("address {address:#x} is out of bounds: {nearest}"));
    let start = (address - allocation.start as u64) as usize;
    let room = allocation.len - start;
    assert!(len <= room, "{len} bytes from byte {start} of {} on are out of bounds", allocation.name());
    (allocation, start)
}

/// Keeps a buffer from being written elsewhere, or from being used at all, until it is dropped. It is for code that has
/// a slice of the buffer's memory.
#[derive(Debug)]
pub struct Lock {
    _hold: Hold,
}

impl Lock {
    /// Locks the buffer at an address for reading. Launches may read it meanwhile.
    ///
    /// # Panics
    /// If there is no buffer, or a launch on another thread writes it.
    #[must_use]
    pub fn to_read(address: u64) -> Self {
        Self { _hold: Hold::read(find_all(address, 0).0).unwrap_or_else(|busy| panic!("{busy}")) }
    }

    /// Locks the buffer at an address for writing. Nobody else may use it meanwhile.
    ///
    /// # Panics
    /// If there is no buffer, or somebody uses it.
    #[must_use]
    pub fn to_write(address: u64) -> Self {
        Self { _hold: Hold::write(find_all(address, 0).0).unwrap_or_else(|busy| panic!("{busy}")) }
    }
}

/// Copies bytes of device memory, from address `from` on, to the host. Bytes that nobody has written are 0xff.
///
/// # Panics
/// If the bytes are not all in one live buffer, or if the buffer is written meanwhile, for example by a launch on
/// another thread.
pub fn read(from: u64, out: &mut [u8]) {
    if out.is_empty() {
        return;
    }
    let (allocation, start) = find_all(from, out.len());
    let hold = Hold::read(allocation).unwrap_or_else(|busy| panic!("{busy}"));
    // SAFETY: the bytes are there and set, nobody writes them while they are held, and `out` is elsewhere.
    unsafe { out.as_mut_ptr().copy_from_nonoverlapping(hold.start.add(start), out.len()) };
}

/// Copies bytes from the host to device memory, to address `to` and on.
///
/// # Panics
/// If the bytes do not all fit in one live buffer, or if the buffer is used meanwhile, for example by a launch on
/// another thread.
pub fn write(to: u64, data: &[u8]) {
    if data.is_empty() {
        return;
    }
    let (allocation, start) = find_all(to, data.len());
    let hold = Hold::write(allocation).unwrap_or_else(|busy| panic!("{busy}"));
    // SAFETY: there is room, nobody else uses it while it is held, and `data` is elsewhere.
    unsafe { hold.start.add(start).copy_from_nonoverlapping(data.as_ptr(), data.len()) };
    hold.initialised.add(start..start + data.len());
}

/// An element type of [`Buffer`]. The host can read any bytes as such a value: what a kernel left, and bytes that
/// nobody wrote.
///
/// # Safety
/// Any bytes are a value of the type, and none of its bytes is padding.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($number:ident)*) => { $(
        // SAFETY: any bits are a number, and there is no padding.
        unsafe impl Plain for $number {}
    )* };
}

plain!(u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 bf16 f16);

// SAFETY: 128 bytes of numbers; the size is twice the alignment, so there is no padding.
unsafe impl Plain for TensorMap {}

// SAFETY: one element lies right behind another.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Device memory of the emulator: `len` elements, aligned to 256 bytes, that any launch of the process can use.
///
/// A buffer must not be written while another thread uses it. A launch is stopped, or a copy by the host panics, in two
/// cases: it uses a buffer that an unfinished launch on another thread has written, or it would write a buffer that is
/// in use elsewhere.
#[derive(Debug)]
pub struct Buffer<T: Plain> {
    allocation: Arc<Allocation>,
    elements: PhantomData<T>,
}

impl Buffer<u8> {
    /// A buffer of `len` bytes that are all zero.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let allocation = Self::allocate(len, true);
        // SAFETY: there are as many bytes, and nobody else knows of them yet.
        unsafe { allocation.start.write_bytes(0, len) };
        Self::share(allocation)
    }
}

impl<T: Plain> Buffer<T> {
    fn allocate(len: usize, initialised: bool) -> Allocation {
        const { assert!(size_of::<T>() > 0 && align_of::<T>() <= ALIGNMENT, "elements that a buffer can hold") };
        let bytes = len.checked_mul(size_of::<T>()).expect("a buffer fits the address space");
        Allocation::new(bytes, initialised, format!("[{}; {len}]", type_name::<T>()))
    }

    /// Registers the allocation, so that launches find it.
    fn share(allocation: Allocation) -> Self {
        let allocation = Arc::new(allocation);
        registry().insert(allocation.start as u64, allocation.clone());
        Self { allocation, elements: PhantomData }
    }

    /// A buffer of elements that nobody has written: a kernel that reads them is stopped. Their bytes are 0xff.
    #[must_use]
    pub fn new_poisoned(len: usize) -> Self {
        Self::share(Self::allocate(len, false))
    }

    /// A buffer that holds a copy of the elements.
    #[must_use]
    pub fn from_slice(elements: &[T]) -> Self {
        let allocation = Self::allocate(elements.len(), true);
        // SAFETY: there is room for as many elements, and nobody else knows of it yet.
        unsafe { allocation.start.cast::<T>().copy_from_nonoverlapping(elements.as_ptr(), elements.len()) };
        Self::share(allocation)
    }

    /// Names the buffer: errors give this name, before the buffer's type and length. The first name stays.
    #[must_use]
    pub fn named(self, label: &'static str) -> Self {
        // The buffer has a name already.
        let _ = self.allocation.label.set(label);
        self
    }

    /// How many elements the buffer has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.allocation.len / size_of::<T>()
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn hold(&self, hold: impl FnOnce(Arc<Allocation>) -> Result<Hold, String>) -> Hold {
        hold(self.allocation.clone()).unwrap_or_else(|busy| panic!("{busy}"))
    }

    /// A copy of the elements. Those that nobody has written consist of 0xff bytes.
    ///
    /// # Panics
    /// If a launch on another thread writes them.
    #[must_use]
    pub fn to_vec(&self) -> Vec<T> {
        let hold = self.hold(Hold::read);
        // SAFETY: the buffer has as many elements; its bytes are all set, and any bytes are elements; while they are
        // held, nobody writes them.
        unsafe { std::slice::from_raw_parts(hold.start.cast::<T>(), self.len()) }.to_vec()
    }

    /// Overwrites all elements.
    ///
    /// # Panics
    /// If their number is not the buffer's, or if a launch on another thread uses the buffer.
    pub fn copy_from(&mut self, elements: &[T]) {
        assert_eq!(elements.len(), self.len(), "as many elements as the buffer has");
        let hold = self.hold(Hold::write);
        // SAFETY: the buffer has as many elements, and nobody else uses them while they are held.
        unsafe { hold.start.cast::<T>().copy_from_nonoverlapping(elements.as_ptr(), elements.len()) };
        hold.initialised.add(0..hold.len);
    }

    /// Makes the elements uninitialised, as after [`new_poisoned`](Self::new_poisoned).
    ///
    /// # Panics
    /// If a launch on another thread uses them.
    pub fn poison(&mut self) {
        self.hold(Hold::write).poison();
    }

    /// The buffer's address, for kernels that read.
    #[must_use]
    pub fn ptr(&self) -> Global<T> {
        // SAFETY: the allocation's start.
        unsafe { Global::from_raw(self.allocation.start as u64) }
    }

    /// The buffer's address, for kernels that write.
    #[must_use]
    pub fn ptr_mut(&self) -> GlobalMut<T> {
        // SAFETY: the allocation's start.
        unsafe { GlobalMut::from_raw(self.allocation.start as u64) }
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        registry().remove(&(self.allocation.start as u64));
    }
}
