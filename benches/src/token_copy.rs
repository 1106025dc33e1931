//! The token-record gather: fixed-size records copied between two regions by `(src, dst)` pairs.
//!
//! [`TokenCopy`] holds what a copy needs besides the regions, so that a copy allocates nothing. Indices are on the
//! device. [`TokenCopy::check`] checks them once; the pairs that it returns can be copied as often as wanted, also in a
//! recorded graph:
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use benches::token_copy::{Shape, TokenCopy, Variant};
//!
//! let device = benches::device(0)?;
//! let shape = Shape { record_bytes: 656, src_records: 1000, dst_records: 100, max_pairs: 100 };
//! let mut copier = TokenCopy::new(&device, shape)?;
//! let host = device.pinned::<u8>(656 * 1000)?;
//! let mut cache = device.zeroed::<u8>(656 * 100)?;
//! let (src, dst) = (device.upload(&[3i32, 900])?, device.upload(&[0i32, 1])?);
//! let pairs = copier.check(&src, &dst)?;
//! copier.copy(Variant::Grouped, &pairs, &host, &mut cache, None)?;
//! device.synchronize()?;
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::str::FromStr;

use bench_kernels::token_copy::{self as kernels, Check, Index, Pairs, Regions, Scan, Sort, SortedCopy};
use bytemuck::Pod;
use cuda_std::{GlobalMut, Kernel};

use host::device::{Buffer, Device, Pinned};

/// Why records were not copied.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Indices outside the regions.
    #[error(
        "{refused} of {pairs} pairs name a record outside the regions (the source has {src_records}, \
         the destination {dst_records}); nothing was written for them"
    )]
    OutOfRange {
        /// Pairs outside.
        refused: u32,
        /// Pairs in all.
        pairs: usize,
        /// Records of the source.
        src_records: usize,
        /// Records of the destination.
        dst_records: usize,
    },
    /// A size that the copies cannot take.
    #[error("{what} cannot be {found}; {most}")]
    Size {
        /// The thing that has this size.
        what: &'static str,
        /// What was asked for.
        found: usize,
        /// What would be accepted.
        most: String,
    },
    /// The variant has no kernel for records of this size.
    #[error("the variant {variant} copies records of 656 bytes, not of {record_bytes}; use `sorted`")]
    Variant {
        /// The variant.
        variant: Variant,
        /// The record's bytes.
        record_bytes: u32,
    },
    /// The device.
    #[error(transparent)]
    Device(#[from] host::Error),
}

/// How to copy: the ladder of [`bench_kernels::token_copy`], slow to fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Variant {
    /// One thread a record, one byte at a time.
    Bytewise,
    /// One thread a record, 16 bytes at a time.
    Vectors,
    /// One warp a record, 16 bytes a lane.
    Warp,
    /// All of a lane's loads before its first store.
    LoadsFirst,
    /// As `LoadsFirst`, on a few SMs that stride over the pairs.
    Capped,
    /// As `Capped`, over pairs sorted by source.
    Sorted,
    /// As `Sorted`, but eight neighbouring records are read as whole lines, each once: for records of 656 bytes.
    Grouped,
    /// As `Capped`, over pairs sorted by destination: for writing to the host.
    SortedByDestination,
}

impl Variant {
    /// All of them, slow to fast.
    pub const ALL: [Self; 8] = [
        Self::Bytewise,
        Self::Vectors,
        Self::Warp,
        Self::LoadsFirst,
        Self::Capped,
        Self::Sorted,
        Self::Grouped,
        Self::SortedByDestination,
    ];

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bytewise => "bytewise",
            Self::Vectors => "vectors",
            Self::Warp => "warp",
            Self::LoadsFirst => "loads-first",
            Self::Capped => "capped",
            Self::Sorted => "sorted",
            Self::Grouped => "grouped",
            Self::SortedByDestination => "sorted-by-destination",
        }
    }

    /// What it does, in a few words.
    pub const fn summary(self) -> &'static str {
        match self {
            Self::Bytewise => "a thread a record, byte by byte",
            Self::Vectors => "a thread a record, 16-byte vectors",
            Self::Warp => "a warp a record, 16 bytes a lane",
            Self::LoadsFirst => "a warp a record, loads before stores",
            Self::Capped => "the same, grid-stride on few SMs",
            Self::Sorted => "the same, pairs sorted by source",
            Self::Grouped => "sorted, eight records read as whole lines",
            Self::SortedByDestination => "loads before stores, pairs sorted by destination",
        }
    }

    /// Whether there is a kernel for records of so many bytes.
    pub const fn takes(self, record_bytes: u32) -> bool {
        !matches!(self, Self::Grouped) || record_bytes == kernels::MLA_RECORD_BYTES
    }

    /// The fastest variant that was measured for reading `pairs` pairs of this shape from the host. Sorting takes time.
    /// It pays only with many pairs, of which enough are neighbours.
    pub const fn best(shape: &Shape, pairs: usize) -> Self {
        if pairs < SORT_FROM || pairs < shape.src_records / 5 {
            Self::Capped
        } else if pairs < shape.src_records / 2 || !Self::Grouped.takes(shape.record_bytes) {
            Self::Sorted
        } else {
            Self::Grouped
        }
    }

    /// The shift of the sort: records within the same `2^shift` may be in any order. `None` if the variant does not
    /// sort.
    const fn shift(self) -> Option<u32> {
        match self {
            Self::Sorted | Self::SortedByDestination => Some(0),
            Self::Grouped => Some(kernels::GROUP_SHIFT),
            _ => None,
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Variant {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|variant| variant.name() == name)
            .ok_or_else(|| format!("there is no variant {name}; there are {}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// Number of pairs from which on sorting pays.
const SORT_FROM: usize = 64 << 10;
/// Most buckets of a sort; larger regions get buckets of more records.
const MOST_BUCKETS: usize = 1 << 20;

/// The sizes of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of a record, a multiple of 16.
    pub record_bytes: u32,
    /// Records of the source region.
    pub src_records: usize,
    /// Records of the destination region.
    pub dst_records: usize,
    /// Most pairs of one copy.
    pub max_pairs: usize,
}

impl Shape {
    fn check(&self) -> Result<(), Error> {
        let refuse = |what, found, most: &str| Err(Error::Size { what, found, most: most.into() });
        if self.record_bytes == 0 || !self.record_bytes.is_multiple_of(kernels::UNIT_BYTES) {
            return refuse("a record's size in bytes", self.record_bytes as usize, "use a multiple of 16");
        }
        for (what, found) in [
            ("the records of the source", self.src_records),
            ("the records of the destination", self.dst_records),
            ("the pairs of a copy", self.max_pairs),
        ] {
            if found >= u32::MAX as usize {
                return refuse(what, found, "use fewer than 4294967295");
            }
        }
        Ok(())
    }

    /// Bytes of payload that `pairs` pairs copy.
    pub const fn payload(&self, pairs: usize) -> u64 {
        self.record_bytes as u64 * pairs as u64
    }
}

mod sealed {
    use super::*;

    pub trait Region {
        fn address(&self) -> GlobalMut<u8>;
        fn bytes(&self) -> usize;
    }
    impl Region for Buffer<u8> {
        fn address(&self) -> GlobalMut<u8> {
            self.ptr_mut()
        }
        fn bytes(&self) -> usize {
            self.len()
        }
    }
    impl Region for Pinned<u8> {
        fn address(&self) -> GlobalMut<u8> {
            self.ptr_mut()
        }
        fn bytes(&self) -> usize {
            self.len()
        }
    }

    /// The kernels for a type of index.
    pub trait Kernels: Index + Pod {
        type Check: Kernel<Params = Check<Self>>;
        type Bytewise: Kernel<Params = kernels::TokenCopy<Self>>;
        type Vectors: Kernel<Params = kernels::TokenCopy<Self>>;
        type Warp: Kernel<Params = kernels::TokenCopy<Self>>;
        type Any: Kernel<Params = kernels::TokenCopy<Self>>;
        type Mla: Kernel<Params = kernels::TokenCopy<Self>>;
        type Page: Kernel<Params = kernels::TokenCopy<Self>>;
        type Count: Kernel<Params = Sort<Self>>;
        type Scatter: Kernel<Params = Sort<Self>>;
        type SortedAny: Kernel<Params = SortedCopy<Self>>;
        type SortedMla: Kernel<Params = SortedCopy<Self>>;
        type SortedPage: Kernel<Params = SortedCopy<Self>>;
        type Grouped: Kernel<Params = SortedCopy<Self>>;
    }
    macro_rules! kernels {
        ($($index:ty: $($name:ident = $kernel:ident)*;)*) => { $(
            impl Kernels for $index {
                $(type $name = kernels::$kernel;)*
            }
        )* };
    }
    kernels! {
        i32: Check = token_copy_check_i32 Bytewise = token_copy_bytewise_i32 Vectors = token_copy_vectors_i32
            Warp = token_copy_warp_i32 Any = token_copy_i32 Mla = token_copy_656_i32 Page = token_copy_4096_i32
            Count = token_copy_count_i32 Scatter = token_copy_scatter_i32 SortedAny = token_copy_sorted_i32
            SortedMla = token_copy_sorted_656_i32 SortedPage = token_copy_sorted_4096_i32
            Grouped = token_copy_grouped_656_i32;
        i64: Check = token_copy_check_i64 Bytewise = token_copy_bytewise_i64 Vectors = token_copy_vectors_i64
            Warp = token_copy_warp_i64 Any = token_copy_i64 Mla = token_copy_656_i64 Page = token_copy_4096_i64
            Count = token_copy_count_i64 Scatter = token_copy_scatter_i64 SortedAny = token_copy_sorted_i64
            SortedMla = token_copy_sorted_656_i64 SortedPage = token_copy_sorted_4096_i64
            Grouped = token_copy_grouped_656_i64;
    }
}

/// A region of records: `Buffer<u8>` on the device, or `Pinned<u8>` on the host.
pub trait Region: sealed::Region {}
impl<R: sealed::Region> Region for R {}

/// A type of record numbers: `i32` or `i64`.
pub trait RecordIndex: sealed::Kernels {}
impl<I: sealed::Kernels> RecordIndex for I {}

/// Pairs that were checked: all of them are inside regions of these sizes.
#[derive(Clone, Copy)]
pub struct CheckedPairs<'p, I> {
    src: &'p Buffer<I>,
    dst: &'p Buffer<I>,
    src_records: usize,
    dst_records: usize,
}

impl<I: Pod> CheckedPairs<'_, I> {
    /// Number of pairs.
    pub fn len(&self) -> usize {
        self.src.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.src.is_empty()
    }
}

/// Copies records of one shape. Copies run in the order of the calls, on the queue of the device that this was made
/// with.
pub struct TokenCopy {
    device: Device,
    shape: Shape,
    sms: u32,
    /// The sort's counts, and one more element: their total. Cleared before each sort.
    counts: Buffer<u32>,
    ranks: Buffer<u32>,
    sorted: Buffer<u64>,
    refused: Buffer<u32>,
}

impl TokenCopy {
    /// Allocates what copies of this shape need: 12 bytes a pair, and 4 bytes a record of the larger region, up to 4
    /// MiB.
    ///
    /// # Errors
    /// If the kernels cannot take the shape, or there is too little device memory.
    pub fn new(device: &Device, shape: Shape) -> Result<Self, Error> {
        shape.check()?;
        let buckets = (shape.src_records.max(shape.dst_records) + 1).min(MOST_BUCKETS);
        let counts = buckets.next_multiple_of(kernels::SCAN_CHUNK as usize) + 1;
        Ok(Self {
            device: device.clone(),
            shape,
            sms: kernels::SMS.min(device.sms()),
            counts: device.zeroed(counts)?,
            ranks: device.zeroed(shape.max_pairs)?,
            sorted: device.zeroed(shape.max_pairs)?,
            refused: device.zeroed(1)?,
        })
    }

    /// How many SMs the variants from [`Variant::Capped`] on use; [`kernels::SMS`] unless this is called.
    pub fn set_sms(&mut self, sms: u32) {
        self.sms = sms.clamp(1, self.device.sms());
    }

    /// The sizes that this was made for.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    fn pairs<I: RecordIndex>(&self, src: &Buffer<I>, dst: &Buffer<I>) -> Pairs<I> {
        Pairs {
            src: src.ptr(),
            dst: dst.ptr(),
            count: src.len() as u64,
            src_records: self.shape.src_records as u64,
            dst_records: self.shape.dst_records as u64,
            refused: self.refused.ptr_mut(),
        }
    }

    fn check_count<I: Pod>(&self, src: &Buffer<I>, dst: &Buffer<I>) -> Result<(), Error> {
        if src.len() != dst.len() {
            let most = format!("there are {} sources", src.len());
            return Err(Error::Size { what: "the number of destinations", found: dst.len(), most });
        }
        if src.len() > self.shape.max_pairs {
            let most = format!("this copier was made for {}", self.shape.max_pairs);
            return Err(Error::Size { what: "the number of pairs", found: src.len(), most });
        }
        Ok(())
    }

    /// Checks every pair, and waits for the result: one launch, and one word that is read back.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if a pair names a record outside the regions. Also if the lists are not as long as agreed,
    /// or the driver fails.
    pub fn check<'p, I: RecordIndex>(
        &mut self,
        src: &'p Buffer<I>,
        dst: &'p Buffer<I>,
    ) -> Result<CheckedPairs<'p, I>, Error> {
        self.check_count(src, dst)?;
        self.refused.clear()?;
        let blocks = kernels::blocks(src.len() as u64 * 8, kernels::SORT_THREADS, self.device.sms());
        // SAFETY: both lists are of that length, alive, and borrowed until this returns.
        unsafe { self.device.launch::<I::Check>(blocks, 0, Check { pairs: self.pairs(src, dst) })? };
        self.refuse_if_any(src.len())?;
        let Shape { src_records, dst_records, .. } = self.shape;
        Ok(CheckedPairs { src, dst, src_records, dst_records })
    }

    /// How many pairs the copies have refused since the last check. Waits for the copies.
    ///
    /// # Errors
    /// Whatever a kernel failed with.
    pub fn refused(&self) -> Result<u32, Error> {
        let mut refused = [0];
        self.refused.read(0, &mut refused)?;
        Ok(refused[0])
    }

    fn refuse_if_any(&self, pairs: usize) -> Result<(), Error> {
        let refused = self.refused()?;
        if refused == 0 {
            return Ok(());
        }
        let Shape { src_records, dst_records, .. } = self.shape;
        Err(Error::OutOfRange { refused, pairs, src_records, dst_records })
    }

    /// Enqueues a copy of every pair. If `map` is given, the copy writes into it where each source record went.
    ///
    /// # Errors
    /// If the regions or the pairs have another shape than this copier's, the variant does not take such records, or
    /// the driver fails.
    pub fn copy<I: RecordIndex>(
        &mut self,
        variant: Variant,
        pairs: &CheckedPairs<'_, I>,
        src: &impl Region,
        dst: &mut impl Region,
        map: Option<&mut Buffer<I>>,
    ) -> Result<(), Error> {
        for (what, found, shape) in [
            ("the records of the source", pairs.src_records, self.shape.src_records),
            ("the records of the destination", pairs.dst_records, self.shape.dst_records),
        ] {
            if found != shape {
                return Err(Error::Size { what, found, most: format!("this copier was made for {shape}") });
            }
        }
        // SAFETY: the pairs were looked at, and nobody could write to them since.
        unsafe { self.enqueue(variant, pairs.src, pairs.dst, src, dst, map) }
    }

    /// Enqueues a copy of pairs that were not checked. A pair outside the regions is not copied here either, but
    /// counted in [`TokenCopy::refused`]. In a debug build this waits for the copy, and such a pair is an error.
    ///
    /// # Safety
    /// No launch that is not waited for writes to the lists of indices.
    ///
    /// # Errors
    /// As for [`TokenCopy::copy`]; in a debug build also [`Error::OutOfRange`].
    pub unsafe fn copy_unchecked<I: RecordIndex>(
        &mut self,
        variant: Variant,
        (src_index, dst_index): (&Buffer<I>, &Buffer<I>),
        src: &impl Region,
        dst: &mut impl Region,
        map: Option<&mut Buffer<I>>,
    ) -> Result<(), Error> {
        if cfg!(debug_assertions) {
            self.refused.clear()?;
        }
        // SAFETY: the caller's word.
        unsafe { self.enqueue(variant, src_index, dst_index, src, dst, map)? };
        if cfg!(debug_assertions) { self.refuse_if_any(src_index.len()) } else { Ok(()) }
    }

    /// # Safety
    /// Nothing enqueued writes to the lists of indices meanwhile.
    unsafe fn enqueue<I: RecordIndex>(
        &mut self,
        variant: Variant,
        src_index: &Buffer<I>,
        dst_index: &Buffer<I>,
        src: &impl Region,
        dst: &mut impl Region,
        map: Option<&mut Buffer<I>>,
    ) -> Result<(), Error> {
        let record_bytes = self.shape.record_bytes;
        self.check_count(src_index, dst_index)?;
        if !variant.takes(record_bytes) {
            return Err(Error::Variant { variant, record_bytes });
        }
        let map_slots = map.as_ref().map_or(self.shape.src_records, |map| map.len());
        for (what, found, records, unit) in [
            ("the bytes of the source", src.bytes(), self.shape.src_records, record_bytes as usize),
            ("the bytes of the destination", dst.bytes(), self.shape.dst_records, record_bytes as usize),
            ("the slots of the map", map_slots, self.shape.src_records, 1),
        ] {
            if found < records * unit {
                return Err(Error::Size { what, found, most: format!("{} are needed", records * unit) });
            }
        }
        if src_index.is_empty() {
            return Ok(());
        }
        let pairs = self.pairs(src_index, dst_index);
        let regions = Regions {
            src: src.address().read(),
            dst: dst.address(),
            map: map.map_or(GlobalMut::default(), |map| map.ptr_mut()),
            record_bytes,
        };
        let sorted = match variant.shift() {
            Some(shift) => Some(self.sort(pairs, shift, variant == Variant::SortedByDestination)?),
            None => None,
        };
        let device = &self.device;
        let most = self.sms;
        let full = |threads| kernels::blocks(pairs.count, threads, u32::MAX);
        let few = |threads| kernels::blocks(pairs.count, threads, most);
        let by_thread = kernels::blocks(pairs.count.div_ceil(32), kernels::NARROW_THREADS, u32::MAX);
        let plain = kernels::TokenCopy { pairs, regions };
        let (known, wide) = (record_bytes, kernels::THREADS);
        // SAFETY: every region is as large as its pairs may need, which the kernels check; the regions and the
        // workspace are not freed before the device is done; `src` and `dst` are two, as one of them is borrowed
        // exclusively.
        unsafe {
            match (variant, sorted) {
                (Variant::Bytewise, _) => device.launch::<I::Bytewise>(by_thread, 0, plain)?,
                (Variant::Vectors, _) => device.launch::<I::Vectors>(by_thread, 0, plain)?,
                (Variant::Warp, _) => device.launch::<I::Warp>(full(kernels::NARROW_THREADS), 0, plain)?,
                (Variant::Grouped, Some(sorted)) => {
                    let copy = SortedCopy { regions, ..sorted };
                    device.launch::<I::Grouped>(few(kernels::GROUPED_THREADS), 0, copy)?;
                }
                (_, Some(sorted)) => {
                    let copy = SortedCopy { regions, ..sorted };
                    match known {
                        kernels::MLA_RECORD_BYTES => device.launch::<I::SortedMla>(few(wide), 0, copy)?,
                        kernels::PAGE_RECORD_BYTES => device.launch::<I::SortedPage>(few(wide), 0, copy)?,
                        _ => device.launch::<I::SortedAny>(few(wide), 0, copy)?,
                    }
                }
                (_, None) => {
                    let grid = if variant == Variant::Capped { few(wide) } else { full(wide) };
                    match known {
                        kernels::MLA_RECORD_BYTES => device.launch::<I::Mla>(grid, 0, plain)?,
                        kernels::PAGE_RECORD_BYTES => device.launch::<I::Page>(grid, 0, plain)?,
                        _ => device.launch::<I::Any>(grid, 0, plain)?,
                    }
                }
            }
        }
        Ok(())
    }

    /// Enqueues only what a variant does before it copies, for measuring.
    ///
    /// # Errors
    /// If this copier was not made for these pairs, or the driver fails.
    pub fn prepare<I: RecordIndex>(&mut self, variant: Variant, pairs: &CheckedPairs<'_, I>) -> Result<(), Error> {
        self.check_count(pairs.src, pairs.dst)?;
        if let Some(shift) = variant.shift() {
            self.sort(self.pairs(pairs.src, pairs.dst), shift, variant == Variant::SortedByDestination)?;
        }
        Ok(())
    }

    /// Enqueues a sort of the pairs. The caller fills in the regions of the result.
    fn sort<I: RecordIndex>(
        &mut self,
        pairs: Pairs<I>,
        least_shift: u32,
        by_destination: bool,
    ) -> Result<SortedCopy<I>, Error> {
        let keys = if by_destination { self.shape.dst_records } else { self.shape.src_records };
        let mut shift = least_shift;
        while (keys >> shift) + 1 > self.counts.len() - 1 {
            shift += 1;
        }
        let chunks = ((keys >> shift) as u32 + 1).div_ceil(kernels::SCAN_CHUNK);
        // SAFETY: the last element.
        let total = unsafe { self.counts.ptr_mut().at(self.counts.len() - 1) };
        let by_destination = by_destination.into();
        let (counts, ranks, sorted) = (self.counts.ptr_mut(), self.ranks.ptr_mut(), self.sorted.ptr_mut());
        self.counts.clear()?;
        let sort = Sort { pairs, counts, ranks, sorted, shift, by_destination };
        let blocks = kernels::blocks(pairs.count * 8, kernels::SORT_THREADS, self.sms);
        let scan = Scan { counts, total, chunks };
        // SAFETY: the workspace was made for at least this many pairs and buckets; it lives until the device is done.
        unsafe {
            self.device.launch::<I::Count>(blocks, 0, sort)?;
            let grid = chunks.min(self.sms);
            self.device.launch::<kernels::token_copy_scan>(grid, kernels::SCAN_SHARED_BYTES, scan)?;
            self.device.launch::<I::Scatter>(blocks, 0, sort)?;
        }
        let regions = Regions {
            src: cuda_std::Global::default(),
            dst: GlobalMut::default(),
            map: GlobalMut::default(),
            record_bytes: 0,
        };
        Ok(SortedCopy { sorted: sorted.read(), total: total.read(), regions })
    }
}
