//! Lossless packing of KV pages: 13 bits for a bf16, so that attention of many sequences reads 13/16 of the bytes.
//!
//! The exponent bits of keys and values carry little information: the elements of a page nearly always have magnitudes
//! within a factor of 2³⁰ of each other, though bf16 has room for 2²⁵⁶. So a packed page has four bits in place of the
//! exponent's upper seven: by how much they are above a `base` of the page's keys, or of its values. The exponent's
//! lowest bit, the mantissa and the sign stay. The page of a head is packed when it is full, and nobody writes to it
//! any more. (That exponents of models are compressible is known of weights: Zhang et al., 2025, "70% Size, 100%
//! Accuracy: Lossless LLM Compression for Efficient GPU Inference via Dynamic-Length Float"; here the length is fixed,
//! so that nothing has to be searched for.)
//!
//! # Layout
//! A packed page lies where the page lay: keys in the first [`PACKED_BYTES`] of their 16 KiB, and values in as many of
//! theirs. Keys, and values, are two halves of 32 tokens; a warp of [`attend`](crate::attention) takes one half. A half
//! is four groups of four fragments, as its lanes give them to the tensor core: 32 elements a lane in each group.
//!
//! ```text
//! group:  low     [2][lane][16]  bytes  the lower bytes of the elements, in order
//!         middle  [lane][4]      words  a fragment each: code of element b in byte b's lower half, of 4 + b in upper
//!         signs   [lane]         words  of element 4 H + b of fragment J in bit 8 b + 7 − (2 J + H)
//! ```
//!
//! If the magnitudes of a page's keys or values are further apart (or some are zero), the page stays as it was. Either
//! way its [form](Form) is noted.
//!
//! # Safety
//! What is not a kernel is called by whole warps. A page that is named by its first byte in dynamic shared memory, a
//! multiple of 16, is there with all that is read of it, visible to the warp, and nobody writes that before the warp is
//! done. `token` is the first of a half of the page, 0 or 32; groups are below 4, and `lane` is the lane's own number.

use cuda_std::shared::{self, Shared};
use cuda_std::{Global, GlobalMut, bf16, device, kernel, math, thread, warp};

use crate::attention::{TILE_KEYS, WARP_KEYS, keys_from, values_from};
use crate::kv::{HEAD_DIM, PAGE_TOKENS, PageLayout, place};

/// Where the parts of a group begin.
const MIDDLE: u32 = 32 * 32;
const SIGNS: u32 = MIDDLE + 32 * 16;
const GROUP_BYTES: u32 = SIGNS + 32 * 4;
/// Bytes of a half, the tokens of one warp.
pub(crate) const HALF_BYTES: u32 = 4 * GROUP_BYTES;
/// Bytes of a page's packed keys for a head, or of its packed values.
pub const PACKED_BYTES: u32 = 2 * HALF_BYTES;
/// Bytes of a page's keys for a head, or of its values, before they are packed.
const RAW_BYTES: u32 = PAGE_TOKENS * HEAD_DIM * 2;
/// The first token of an unpacked page that lies beyond [`PACKED_BYTES`]. Of a page that was to be packed no more bytes
/// are copied, even if it could not be packed.
const FIRST_BEYOND: u32 = PACKED_BYTES / (HEAD_DIM * 2);
const _: () = assert!(PACKED_BYTES == 13_312 && PACKED_BYTES.is_multiple_of(HEAD_DIM * 2) && FIRST_BEYOND >= WARP_KEYS);

/// The exponent's bits in the upper bytes of four elements.
const EXPONENTS: u32 = 0x7f7f_7f7f;
const OTHERS: u32 = 0x8080_8080;
const CODES: u32 = 0x0f0f_0f0f;
/// The largest code.
const LARGEST_CODE: u32 = 15;

/// How the keys and values of a page lie for a head, as a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form(pub u32);

impl Form {
    /// Not packed, and copied whole.
    pub const RAW: Self = Self(0);
    const PACKED: u32 = 1 << 31;
    const UNPACKABLE: u32 = 1 << 30;

    /// Packed, with these bases.
    #[device]
    const fn packed(keys: u32, values: u32) -> Self {
        Self(Self::PACKED | values << 8 | keys)
    }

    /// The page could not be packed. It is this [block](crate::kv::Cache::block_index) of the layer.
    #[device]
    const fn unpackable(block: u32) -> Self {
        Self(Self::UNPACKABLE | block)
    }

    /// Whether it is packed.
    #[device]
    #[must_use]
    pub const fn is_packed(self) -> bool {
        self.0 & Self::PACKED != 0
    }

    /// Which block it is, if it could not be packed: then no more than [`PACKED_BYTES`] of its keys, or values, were
    /// copied.
    #[device]
    pub(crate) fn beyond(self) -> Option<u32> {
        (self.0 & Self::UNPACKABLE != 0).then_some(self.0 & (Self::UNPACKABLE - 1))
    }

    /// The base of keys (0) or values (1), in each byte of a word.
    #[device]
    pub(crate) const fn base(self, kind: u32) -> u32 {
        (self.0 >> (8 * kind) & 0x7f) * 0x0101_0101
    }
}

/// A lane's part of a group.
#[derive(Clone, Copy)]
struct Group {
    low: [[u32; 4]; 2],
    middle: [u32; 4],
    signs: u32,
}

impl Group {
    const EMPTY: Self = Self { low: [[0; 4]; 2], middle: [0; 4], signs: 0 };

    /// Where the three parts of a group are, for a lane: group `i` of the half from `token` on, of a page that begins
    /// at byte `page` of dynamic shared memory.
    ///
    /// # Safety
    /// The group is within dynamic shared memory.
    #[device]
    unsafe fn at(page: u32, token: u32, lane: u32, i: u32) -> [Shared<u32>; 3] {
        let group = page + token / WARP_KEYS * HALF_BYTES + i * GROUP_BYTES;
        // SAFETY: the caller's word.
        [lane * 16, MIDDLE + lane * 16, SIGNS + lane * 4].map(|part| unsafe { shared::dynamic(group + part) })
    }

    /// # Safety
    /// The parts are a group's, for this lane.
    #[device]
    unsafe fn load([low, middle, signs]: [Shared<u32>; 3]) -> Self {
        // SAFETY: the caller's word.
        unsafe { Self { low: [low.load16(0), low.load16(128)], middle: middle.load16(0), signs: signs.load(0) } }
    }

    /// # Safety
    /// The parts are a group's, for this lane, and nobody else uses them meanwhile.
    #[device]
    unsafe fn store(&self, [low, middle, signs]: [Shared<u32>; 3]) {
        // SAFETY: the caller's word.
        unsafe {
            low.store16(0, self.low[0]);
            low.store16(128, self.low[1]);
            middle.store16(0, self.middle);
            signs.store(0, self.signs);
        }
    }

    /// Packs fragments, with this base in each byte.
    #[device]
    fn new(fragments: [[u32; 4]; 4], base: u32) -> Self {
        let mut group = Self::EMPTY;
        unroll!(J < 4; {
            unroll!(H < 2; {
                let words = (fragments[J][2 * H], fragments[J][2 * H + 1]);
                group.low[J / 2][J % 2 * 2 + H] = math::permute(words.0, words.1, 0x6420);
                let high = math::permute(words.0, words.1, 0x7531);
                group.middle[J] |= ((high & EXPONENTS) - base) << (4 * H);
                group.signs |= (high & OTHERS) >> (2 * J + H);
            });
        });
        group
    }

    /// Unpacks the fragments, with this base in each byte.
    #[device]
    fn fragments(&self, base: u32) -> [[u32; 4]; 4] {
        let mut fragments = [[0; 4]; 4];
        unroll!(J < 4; {
            let codes = [self.middle[J] & CODES, self.middle[J] >> 4 & CODES];
            unroll!(H < 2; {
                // No byte carries: the sum of a base and a code is below 128.
                let high = (codes[H] + base) | (self.signs << (2 * J + H)) & OTHERS;
                let low = self.low[J / 2][J % 2 * 2 + H];
                fragments[J][2 * H] = math::permute(low, high, 0x5140);
                fragments[J][2 * H + 1] = math::permute(low, high, 0x7362);
            });
        });
        fragments
    }
}

/// One lane's part of a half of packed keys, or values.
#[derive(Clone, Copy)]
pub(crate) struct Half([Group; 4]);

impl Half {
    /// Loads the half from `token` on of the page that begins at byte `page` of dynamic shared memory.
    ///
    /// # Safety
    /// The half is packed.
    #[device]
    pub unsafe fn load(page: u32, token: u32, lane: u32) -> Self {
        let mut half = Self([Group::EMPTY; 4]);
        unroll!(I < 4; {
            // SAFETY: the caller's word.
            half.0[I] = unsafe { Group::load(Group::at(page, token, lane, I as u32)) };
        });
        half
    }

    /// The fragments of a single group `i`: [`load`](Self::load) and [`fragments`](Self::fragments) in one.
    ///
    /// # Safety
    /// As for [`load`](Self::load).
    #[device]
    pub unsafe fn load_fragments(page: u32, token: u32, lane: u32, i: usize, base: u32) -> [[u32; 4]; 4] {
        // SAFETY: the caller's word.
        unsafe { Group::load(Group::at(page, token, lane, i as u32)).fragments(base) }
    }

    /// The fragments of group `i`, with this base in each byte.
    #[device]
    pub fn fragments(&self, i: usize, base: u32) -> [[u32; 4]; 4] {
        self.0[i].fragments(base)
    }
}

/// Completes an unpackable page's keys, or values, of which only the first [`PACKED_BYTES`] were copied: brings the
/// rest of `from` to where it belongs behind byte `to` of dynamic shared memory. A warp does it together.
///
/// # Safety
/// `from` is the page's keys or values in the cache, not packed. `to` is a multiple of 16, with room for all of them;
/// nobody else uses what is brought before the function returns, and nobody writes the cache's meanwhile.
#[device]
pub(crate) unsafe fn bring_rest(from: Global<bf16>, to: u32) {
    // SAFETY: the caller's word.
    unsafe {
        let (from, to) = (from.cast::<u32>(), shared::dynamic::<u32>(to));
        let mut at = PACKED_BYTES / 4 + thread::opaque(thread::lane_id()) * 4;
        while at < RAW_BYTES / 4 {
            to.store16(at as usize, from.load16(at as usize));
            at += 32 * 4;
        }
        warp::sync_warp();
    }
}

/// Whether some tokens of a half were not copied, if its page is unpackable.
#[device]
pub(crate) const fn is_cut(token: u32) -> bool {
    token % PAGE_TOKENS + WARP_KEYS > FIRST_BEYOND
}

/// Parameters of [`pack_pages`] and [`unpack_pages`]. Grid: (key-value heads, layers, pages). Shared memory:
/// [`PackPages::SHARED_BYTES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, cuda_std::Layout)]
pub struct PackPages {
    /// The pages, each once.
    pub list: Global<u32>,
    /// `[layers, pages, page]`, a page as [`kv`](crate::kv) has it.
    pub pages: GlobalMut<bf16>,
    /// `[layers, pages, kv_heads]` [forms](Form).
    pub forms: GlobalMut<u32>,
    /// Pages of a layer.
    pub page_count: u32,
}

const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;
/// Shared memory holds the page itself, behind it the packed keys and values, and behind these what each warp has found
/// of exponents.
const PACKED: u32 = 2 * RAW_BYTES;
const EXTREMES: u32 = PACKED + 2 * PACKED_BYTES;

impl PackPages {
    /// Dynamic shared memory of a CTA.
    pub const SHARED_BYTES: u32 = EXTREMES + 4 * WARPS * 4;

    /// The page of a head that this CTA takes: its block's number in the layer, where its keys are, and where its form
    /// is.
    ///
    /// # Safety
    /// The CTA is of a launch whose parameter block this is.
    #[device]
    unsafe fn block(&self) -> (u32, GlobalMut<u32>, GlobalMut<u32>) {
        // SAFETY: the caller's word.
        unsafe {
            let (head, layer) = (thread::block_idx_x(), thread::block_idx_y());
            let heads = thread::grid_dim_x();
            let block = self.list.load(thread::block_idx_z() as usize) * heads + head;
            let at = (layer * self.page_count * heads) as usize + block as usize;
            (block, self.pages.at(at * (2 * PAGE_TOKENS * HEAD_DIM) as usize).cast(), self.forms.at(at))
        }
    }
}

/// A warp's part of a page: keys (0) or values (1), the first token of a half, and the first of two groups.
#[device]
fn part(warp_id: u32) -> (u32, u32, usize) {
    (warp_id / 4, warp_id / 2 % 2 * WARP_KEYS, (warp_id % 2 * 2) as usize)
}

/// Packs pages where they lie, as far as they can be, and notes their forms.
#[kernel(threads = 256)]
pub unsafe fn pack_pages(p: PackPages) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (block, page, form) = p.block();
        let (thread, lane, warp_id) = (thread::thread_idx_x(), thread::lane_id(), thread::warp_id());
        // For keys and for values: the largest of the exponents' upper bits, and 0x7f minus the least of them, so that
        // both are found by a maximum.
        let mut extremes = [0u32; 4];
        unroll!(I < 8; {
            let at = (I as u32 * THREADS + thread) as usize * 4;
            let words = page.load16(at);
            shared::dynamic::<u32>(0).store16(at, words);
            unroll!(W < 4; {
                unroll!(H < 2; {
                    let exponent = words[W] >> (16 * H + 8) & 0x7f;
                    let kind = I / 4 * 2;
                    extremes[kind] = extremes[kind].max(exponent);
                    extremes[kind + 1] = extremes[kind + 1].max(0x7f - exponent);
                });
            });
        });
        unroll!(M < 5; {
            unroll!(E < 4; {
                extremes[E] = extremes[E].max(warp::shuffle_xor(extremes[E], 1 << M));
            });
        });
        let known = shared::dynamic::<u32>(EXTREMES);
        if lane == 0 {
            known.store16((warp_id * 4) as usize, extremes);
        }
        thread::sync_threads();
        let mut warp = 0;
        while warp < WARPS {
            let others = known.load16((warp * 4) as usize);
            unroll!(E < 4; {
                extremes[E] = extremes[E].max(others[E]);
            });
            warp += 1;
        }
        let bases = [extremes[0], extremes[2]].map(|most| most.saturating_sub(LARGEST_CODE));
        let found = if 0x7f - extremes[1] >= bases[0] && 0x7f - extremes[3] >= bases[1] {
            Form::packed(bases[0], bases[1])
        } else {
            Form::unpackable(block)
        };
        if thread == 0 {
            form.store(0, found.0);
        }
        if !found.is_packed() {
            return;
        }
        let (kind, token, first) = part(warp_id);
        let raw = kind * RAW_BYTES + token * HEAD_DIM * 2;
        let packed = PACKED + kind * PACKED_BYTES;
        unroll!(I < 2; {
            let i = first + I;
            let fragments = if kind == 0 {
                keys_from(PageLayout::CACHE, raw, WARP_KEYS - 1, lane)(i)
            } else {
                values_from(PageLayout::CACHE, raw, WARP_KEYS - 1, lane)(i)
            };
            Group::new(fragments, found.base(kind)).store(Group::at(packed, token, lane, i as u32));
        });
        thread::sync_threads();
        copy_out(PACKED, PACKED_BYTES, page);
    }
}

/// Unpacks packed pages where they lie.
#[kernel(threads = 256)]
pub unsafe fn unpack_pages(p: PackPages) {
    // SAFETY: the launcher's word: memory is as the parameter block says.
    unsafe {
        let (_, page, form) = p.block();
        let found = Form(form.load(0));
        if !found.is_packed() {
            return;
        }
        let (lane, warp_id) = (thread::lane_id(), thread::warp_id());
        let mut kind = 0;
        while kind < 2 {
            let mut at = thread::thread_idx_x() * 4;
            while at < PACKED_BYTES / 4 {
                let words = page.load16((kind * RAW_BYTES / 4 + at) as usize);
                shared::dynamic::<u32>(PACKED + kind * PACKED_BYTES).store16(at as usize, words);
                at += THREADS * 4;
            }
            kind += 1;
        }
        thread::sync_threads();
        let (kind, token, first) = part(warp_id);
        let packed = PACKED + kind * PACKED_BYTES;
        let raw = shared::dynamic::<bf16>(kind * RAW_BYTES + token * HEAD_DIM * 2);
        let (g, t) = (lane / 4, lane % 4);
        unroll!(I < 2; {
            let i = first + I;
            let fragments = Group::load(Group::at(packed, token, lane, i as u32)).fragments(found.base(kind));
            unroll!(J < 4; {
                if kind == 0 {
                    let key = TILE_KEYS[J] + g;
                    unroll!(W < 4; {
                        let d = 32 * i as u32 + 8 * W as u32 + 2 * t;
                        raw.cast::<u32>().store((key * HEAD_DIM + place(key, d)) as usize / 2, fragments[J][W]);
                    });
                } else {
                    // A word has the values of two keys at one dimension.
                    let d = 8 * (4 * i + J) as u32 + g;
                    unroll!(W < 4; {
                        unroll!(H < 2; {
                            let key = TILE_KEYS[W] + 2 * t + H as u32;
                            let value = bf16::from_bits((fragments[J][W] >> (16 * H)) as u16);
                            raw.store((key * HEAD_DIM + place(key, d)) as usize, value);
                        });
                    });
                }
            });
        });
        thread::sync_threads();
        copy_out(0, RAW_BYTES, page);
    }
}

/// Copies `bytes` of keys and as many of values to the page, by the whole CTA. They follow each other from byte `from`
/// of shared memory on.
///
/// # Safety
/// The whole CTA calls it, and has synchronised since these bytes were written. The page is the CTA's.
#[device]
unsafe fn copy_out(from: u32, bytes: u32, page: GlobalMut<u32>) {
    // SAFETY: the caller's word.
    unsafe {
        let mut kind = 0;
        while kind < 2 {
            let words = shared::dynamic::<u32>(from + kind * bytes);
            let mut at = thread::thread_idx_x() * 4;
            while at < bytes / 4 {
                page.store16((kind * RAW_BYTES / 4 + at) as usize, words.load16(at as usize));
                at += THREADS * 4;
            }
            kind += 1;
        }
    }
}
