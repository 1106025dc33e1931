//! Launches a kernel by hand: allocates memory on a device, fills in a parameter block, launches, and checks the
//! result.
//!
//! `cargo run --release --package host --example launch_kernel -- [cuda]` runs under the emulator, unless told
//! otherwise. There, a race or a stray access would be an error of the launch.

use cuda_std::GlobalMut;
use gpu_kernels::token_copy::{self, PAGE_RECORD_BYTES, Pairs, Regions, TokenCopy};
use host::device::Device;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = match std::env::args().nth(1).as_deref() {
        None => Device::emulator(1),
        Some("cuda") => Device::cuda(0)?,
        Some(other) => return Err(format!("{other}: say cuda, or nothing for the emulator").into()),
    };

    // Eight pages, of which page 5 is to go to place 0, page 2 to place 1, and so on. The last pair names a page that
    // does not exist, and is refused.
    let page = PAGE_RECORD_BYTES as usize;
    let pages: Vec<u8> = (0..8 * page).map(|i| (i / page * 31 + i % 251) as u8).collect();
    let (sources, places) = ([5, 2, 7, 2, 8], [0, 1, 2, 3, 0]);

    let from = device.upload(&pages)?;
    let to = device.zeroed::<u8>(4 * page)?;
    let (src, dst) = (device.upload(&sources)?, device.upload(&places)?);
    let refused = device.zeroed::<u32>(1)?;

    // The kernel's parameters, in a type that host and kernel share.
    let params = TokenCopy {
        pairs: Pairs {
            src: src.ptr(),
            dst: dst.ptr(),
            count: sources.len() as u64,
            src_records: 8,
            dst_records: 4,
            refused: refused.ptr_mut(),
        },
        regions: Regions {
            src: from.ptr(),
            dst: to.ptr_mut(),
            map: GlobalMut::default(),
            record_bytes: PAGE_RECORD_BYTES,
        },
    };
    let blocks = token_copy::blocks(sources.len() as u64, token_copy::THREADS, device.sms());
    // SAFETY: the addresses are those of buffers as large as the block says, which live until the result is read.
    unsafe { device.launch::<token_copy::token_copy_4096_i32>(blocks, 0, params)? };

    // Reading waits for the launch.
    let (mut found, mut count) = (vec![0; 4 * page], [0]);
    to.read(0, &mut found)?;
    refused.read(0, &mut count)?;
    let expected: Vec<u8> = sources[..4].iter().flat_map(|&s| &pages[s as usize * page..][..page]).copied().collect();
    if found != expected {
        return Err("the pages that arrived are not those that were asked for".into());
    }
    println!("{}: 4 pages copied, {} pair refused", device.name(), count[0]);
    Ok(())
}
