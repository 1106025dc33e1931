//! Adds up numbers on the first card.

use cuda_std::{Global, GlobalMut, Kernel};
use cust::memory::{CopyDestination, DeviceBuffer, DeviceCopy};
use cust::module::Module;
use cust::stream::{Stream, StreamFlags};
use first_kernel::{PTX, SHARED_BYTES, Sum, THREADS, sum};

/// `Sum`, as `cust` passes it: by its bytes.
#[repr(transparent)]
#[derive(Clone, Copy)]
struct Params(#[allow(dead_code)] Sum);

// SAFETY: two addresses of device memory, and nothing that belongs to the host.
unsafe impl DeviceCopy for Params {}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const BLOCKS: u32 = 1000;
    if let Err(reason) = driver_link::available() {
        return Err(format!("there is no CUDA driver ({reason}); `cargo test` runs the kernel without one").into());
    }
    let _context = cust::quick_init()?;
    let module = Module::from_ptx(PTX, &[])?;
    let function = module.get_function(<sum as Kernel>::NAME)?;
    let stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;

    let numbers: Vec<f32> = (0..BLOCKS * THREADS).map(|i| (i % 7) as f32).collect();
    let input = DeviceBuffer::from_slice(&numbers)?;
    let sums = DeviceBuffer::from_slice(&[0.0f32; BLOCKS as usize])?;
    // SAFETY: the buffers hold a number for each thread and a place for each block, and outlive the launch.
    unsafe {
        let params = Params(Sum {
            input: Global::from_raw(input.as_device_ptr().as_raw()),
            sums: GlobalMut::from_raw(sums.as_device_ptr().as_raw()),
        });
        cust::launch!(function<<<BLOCKS, THREADS, SHARED_BYTES, stream>>>(params))?;
    }
    stream.synchronize()?;

    let mut found = vec![0.0; BLOCKS as usize];
    sums.copy_to(&mut found)?;
    // Small whole numbers: their sums are exact in any order.
    let total: f32 = found.iter().sum();
    assert_eq!(total, numbers.iter().sum());
    println!("{} numbers add up to {total}", numbers.len());
    Ok(())
}
