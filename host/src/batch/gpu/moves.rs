//! Moves of pages: to the host tier, from it, and within the device. A page is moved as a list of records, by the
//! gather of `gpu_kernels::token_copy`.

use std::sync::mpsc::{Receiver, TryRecvError, channel};

use cuda_std::{Global, GlobalMut};
use gpu_kernels::batch::{self, ListRecords, PageRecords};
use gpu_kernels::token_copy::{self as kernels, PAGE_RECORD_BYTES, Pairs, Regions, TokenCopy};
use half::bf16;

use crate::Error;
use crate::cache::KvCache;
use crate::device::{Buffer, Device, Pinned};

/// Pages whose records are listed and copied at a time.
const AT_ONCE: usize = 64;

/// The host tier, and the moves from and to it.
pub struct Mover {
    device: Device,
    tier: HostTier,
    /// Pages that the tier has, once it is there.
    tier_pages: usize,
    src: Buffer<i32>,
    dst: Buffer<i32>,
    layers: u32,
    /// Records of a page in one layer.
    records: u32,
}

/// The memory of the host tier, `[pages, layers, page]`. Pinning it takes the driver seconds, in which it does little
/// else. So it is pinned only when it may be needed.
enum HostTier {
    /// The tier was not needed so far.
    Unwanted,
    /// Another thread is pinning it.
    Coming(Receiver<Result<Pinned<u8>, Error>>),
    There(Pinned<u8>),
    /// It could not be pinned.
    Missing,
}

/// The direction of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the device to the host.
    Out,
    /// On the device.
    Within,
    /// From the host to the device.
    In,
}

impl Mover {
    /// A mover for the pages of `cache`. The host tier has `host_pages` pages. If `is_there`, it is pinned at once,
    /// otherwise when it may be needed.
    ///
    /// # Errors
    /// Not enough memory that can be pinned, if the tier is pinned at once; a driver error.
    pub fn new(device: &Device, cache: &KvCache, host_pages: usize, is_there: bool) -> Result<Self, Error> {
        let page_bytes = cache.layer_len() / cache.pages().max(1) * size_of::<bf16>();
        let records = page_bytes / PAGE_RECORD_BYTES as usize;
        let listed = AT_ONCE * cache.layers() * records;
        let bytes = host_pages * cache.layers() * page_bytes;
        Ok(Self {
            device: device.clone(),
            tier: if is_there { HostTier::There(device.pinned(bytes)?) } else { HostTier::Unwanted },
            tier_pages: host_pages,
            src: device.zeroed(listed)?,
            dst: device.zeroed(listed)?,
            layers: cache.layers() as u32,
            records: records as u32,
        })
    }

    /// Pages of the host tier that can be used: none or all. If they `are_wanted` and there are none, begins to pin
    /// them.
    pub fn host_pages(&mut self, are_wanted: bool) -> usize {
        match &self.tier {
            HostTier::Unwanted if are_wanted => {
                let (send, coming) = channel();
                let (device, bytes) = (self.device.clone(), self.tier_pages * self.page_bytes() as usize);
                // Nobody waits for this thread: the job may end before it does.
                std::thread::spawn(move || drop(send.send(device.pinned(bytes))));
                self.tier = HostTier::Coming(coming);
            }
            HostTier::Coming(coming) => match coming.try_recv() {
                Ok(Ok(memory)) => self.tier = HostTier::There(memory),
                Ok(Err(error)) => {
                    tracing::warn!("no host tier, requests are computed again instead: {error}");
                    self.tier = HostTier::Missing;
                }
                Err(TryRecvError::Disconnected) => self.tier = HostTier::Missing,
                Err(TryRecvError::Empty) => {}
            },
            HostTier::Unwanted | HostTier::There(_) | HostTier::Missing => {}
        }
        if matches!(self.tier, HostTier::There(_)) { self.tier_pages } else { 0 }
    }

    /// Bytes of a page in all layers.
    pub fn page_bytes(&self) -> u64 {
        u64::from(self.layers * self.records) * u64::from(PAGE_RECORD_BYTES)
    }

    /// Enqueues moves of `count` pages. `moves` is `[count, 2]`: the page to move, and its new place.
    ///
    /// # Safety
    /// When it runs, there is such a list. The list lives until the device is done.
    ///
    /// # Errors
    /// A refused launch.
    pub unsafe fn enqueue(&self, cache: &KvCache, way: Way, moves: Global<u32>, count: usize) -> Result<(), Error> {
        let (layers, records) = (self.layers, self.records);
        let on_device = PageRecords { page: records, layer: cache.pages() as u32 * records };
        let on_host = PageRecords { page: layers * records, layer: records };
        let device_region = (cache.elements().ptr_mut().cast(), on_device, cache.pages());
        let host_region = match &self.tier {
            HostTier::There(memory) => (memory.ptr_mut(), on_host, self.tier_pages),
            _ => (GlobalMut::default(), on_host, 0),
        };
        let (from, to) = match way {
            Way::Out => (device_region, host_region),
            Way::Within => (device_region, device_region),
            Way::In => (host_region, device_region),
        };
        let all = |pages: usize| (pages * (layers * records) as usize) as u64;
        // More SMs would not make transfers over the bus faster.
        let most = if way == Way::Within {
            u32::MAX
        } else {
            self.device.capabilities().tuning().copy_sms.min(self.device.sms())
        };
        for first in (0..count).step_by(AT_ONCE) {
            let pages = (count - first).min(AT_ONCE);
            let pairs = all(pages);
            let list = ListRecords {
                // SAFETY: within the list.
                moves: unsafe { moves.at(2 * first) },
                from: from.1,
                to: to.1,
                src: self.src.ptr_mut(),
                dst: self.dst.ptr_mut(),
                moves_count: pages as u32,
                layers,
                records,
            };
            let copy = TokenCopy {
                pairs: Pairs {
                    src: self.src.ptr(),
                    dst: self.dst.ptr(),
                    count: pairs,
                    src_records: all(from.2),
                    dst_records: all(to.2),
                    refused: GlobalMut::default(),
                },
                regions: Regions {
                    src: from.0.read(),
                    dst: to.0,
                    map: GlobalMut::default(),
                    record_bytes: PAGE_RECORD_BYTES,
                },
            };
            let blocks = kernels::blocks(pairs, kernels::THREADS, most);
            // SAFETY: the lists have room for so many pages. Both regions are as large as said, and records outside of
            // them are not copied. No page is a source and a target.
            unsafe {
                self.device.launch::<batch::list_records>(batch::blocks(pairs as usize), 0, list)?;
                self.device.launch::<kernels::token_copy_4096_i32>(blocks, 0, copy)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use model::Config;

    use super::*;

    #[test]
    fn pages_arrive_whole_in_every_layer() {
        pages_arrive(true);
        pages_arrive(false);
    }

    /// `is_there`: whether the tier is pinned at once, or when it is needed.
    fn pages_arrive(is_there: bool) {
        let shape = Config::published("0.6B").unwrap();
        let mut config = Config { num_hidden_layers: 3, ..shape };
        config.plan.attention.key_value_heads = 2;
        let device = Device::emulator(1);
        let mut cache = KvCache::new(&device, &config, 70).unwrap();
        // Finite values, because NaN does not equal itself.
        let noise = |i: usize| bf16::from_bits(model::sampling::random(1, i as u64) as u16 & 0xbfff);
        cache.fill(&(0..cache.elements().len()).map(noise).collect::<Vec<_>>()).unwrap();
        let mut mover = Mover::new(&device, &cache, 68, is_there).unwrap();
        assert_eq!(mover.host_pages(false), if is_there { 68 } else { 0 });
        while mover.host_pages(true) == 0 {
            assert!(!matches!(mover.tier, HostTier::Missing | HostTier::Unwanted));
            std::thread::yield_now();
        }
        assert_eq!(mover.host_pages(false), 68);
        assert_eq!(mover.page_bytes(), KvCache::page_bytes(&config) as u64);

        let len = KvCache::page_len(&config);
        // Each page's contents, by layer.
        let read = || {
            let mut all = vec![bf16::ZERO; cache.elements().len()];
            cache.elements().read(0, &mut all).unwrap();
            let page = |layer: usize, page: usize| all[(layer * 70 + page) * len..][..len].to_vec();
            (0..70).map(|p| (0..3).map(|l| page(l, p)).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        let go = |way: Way, moves: &[[u32; 2]]| {
            let list = device.upload(&moves.concat()).unwrap();
            // SAFETY: the list is of the size said.
            unsafe { mover.enqueue(&cache, way, list.ptr(), moves.len()).unwrap() };
        };
        let before = read();
        // More pages than are moved at a time.
        go(Way::Out, &(0..67).map(|p| [p, 67 - p]).collect::<Vec<_>>());
        go(Way::Within, &[[69, 0], [68, 5]]);
        go(Way::In, &[[67, 1], [3, 2], [60, 69]]);
        let mut expected = before.clone();
        for (to, from) in [(0, 69), (5, 68), (1, 0), (2, 64), (69, 7)] {
            expected[to] = before[from].clone();
        }
        assert!(read() == expected);
    }
}
