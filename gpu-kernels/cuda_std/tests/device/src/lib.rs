//! The kernels of `cuda_std`'s tests as a crate for the device.
#![no_std]
#![feature(abi_ptx, asm_experimental_arch)]

pub mod kernels;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    cuda_std::thread::trap()
}
