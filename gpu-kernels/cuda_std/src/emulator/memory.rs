//! Device memory: buffers, the process-wide registry of them, and which of their bytes are initialised.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::any::type_name;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockWriteGuard};

use crate::{Global, GlobalMut};

/// Between buffers lie at least twice as many bytes of nobody, so that running over an end is noticed.
const ALIGNMENT: usize = 256;
/// Device bytes nobody wrote: not a number as f32 or bf16, and out of range as an index.
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

    /// Calls `visit` with each word of the map that the bytes touch and the bits that are theirs, while it says true.
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
}

// SAFETY: the bytes are only used through raw pointers, by launches and by the owner of the buffer; that two of these
// do not write at once is the contract of `Buffer`, as it is that of a GPU's memory.
unsafe impl Send for Allocation {}
// SAFETY: as above.
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
        Self { start, len, label: OnceLock::new(), contents, initialised: Initialised::new(len, initialised) }
    }

    /// A margin, the bytes, a margin.
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

    /// What errors call it.
    pub fn name(&self) -> String {
        match self.label.get() {
            Some(label) => format!("buffer `{label}` ({})", self.contents),
            None => format!("buffer {}", self.contents),
        }
    }

    /// As if new.
    pub fn poison(&self) {
        // SAFETY: the bytes are this allocation's.
        unsafe { self.start.write_bytes(POISON, self.len) };
        self.initialised.clear();
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: as it was allocated.
        unsafe { dealloc(self.start.sub(ALIGNMENT), Self::layout(self.len)) }
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

/// Device memory of the emulator: `len` elements, aligned to 256 bytes, that any launch of the process can use.
///
/// As on a GPU, nothing but care keeps the host from reading or writing a buffer while a launch on another thread uses
/// it.
#[derive(Debug)]
pub struct Buffer<T: Copy> {
    allocation: Arc<Allocation>,
    elements: PhantomData<T>,
}

impl Buffer<u8> {
    /// Bytes that are all zero.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let buffer = Self::new(len, true);
        // SAFETY: the buffer has as many bytes.
        unsafe { buffer.allocation.start.write_bytes(0, len) };
        buffer
    }
}

impl<T: Copy> Buffer<T> {
    fn new(len: usize, initialised: bool) -> Self {
        let contents = format!("[{}; {len}]", type_name::<T>());
        let allocation = Arc::new(Allocation::new(len * size_of::<T>(), initialised, contents));
        registry().insert(allocation.start as u64, allocation.clone());
        Self { allocation, elements: PhantomData }
    }

    /// Elements nobody has written: a kernel that reads them is stopped. Their bytes are 0xff.
    #[must_use]
    pub fn new_poisoned(len: usize) -> Self {
        Self::new(len, false)
    }

    /// A copy of the elements.
    #[must_use]
    pub fn from_slice(elements: &[T]) -> Self {
        let buffer = Self::new(elements.len(), true);
        buffer.write(elements);
        buffer
    }

    /// The name by which errors call the buffer, before its type and length.
    #[must_use]
    pub fn named(self, label: &'static str) -> Self {
        // Already named: the first name stays.
        let _ = self.allocation.label.set(label);
        self
    }

    fn write(&self, elements: &[T]) {
        assert_eq!(elements.len(), self.len(), "as many elements as the buffer has");
        let destination = self.allocation.start.cast::<T>();
        // SAFETY: the buffer holds as many elements, and a slice elsewhere does not overlap it.
        unsafe { destination.copy_from_nonoverlapping(elements.as_ptr(), elements.len()) };
        self.allocation.initialised.add(0..self.allocation.len);
    }

    /// How many elements there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.allocation.len / size_of::<T>()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements; those that nobody has written are made of 0xff bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: the buffer holds this many elements, whose bytes are all set.
        unsafe { std::slice::from_raw_parts(self.allocation.start.cast(), self.len()) }
    }

    /// Overwrites all elements.
    ///
    /// # Panics
    /// If there are more or fewer.
    pub fn copy_from(&mut self, elements: &[T]) {
        self.write(elements);
    }

    /// Forgets the contents, as after [`new_poisoned`](Self::new_poisoned).
    pub fn poison(&mut self) {
        self.allocation.poison();
    }

    /// The address, for kernels that read.
    #[must_use]
    pub fn ptr(&self) -> Global<T> {
        // SAFETY: the allocation's start.
        unsafe { Global::from_raw(self.allocation.start as u64) }
    }

    /// The address, for kernels that write.
    #[must_use]
    pub fn ptr_mut(&self) -> GlobalMut<T> {
        // SAFETY: likewise.
        unsafe { GlobalMut::from_raw(self.allocation.start as u64) }
    }
}

impl<T: Copy> Drop for Buffer<T> {
    fn drop(&mut self) {
        registry().remove(&(self.allocation.start as u64));
    }
}
