//! What a type looks like in memory, as a number, so that host and device can tell whether they mean the same.
//!
//! Kernels are compiled apart from the host, and may come from a file. A launch hands over bytes: if the two sides have
//! different fields in mind, the kernel reads nonsense and says nothing. Each kernel's PTX carries the
//! [stamp](Layout::STAMP) of its parameter block, and whoever loads it compares that with the host's.

use crate::{Global, GlobalMut, bf16, f16};

/// A type with a layout that both sides share: numbers, addresses, and what derives it.
///
/// ```
/// use cuda_std::{Global, Layout};
///
/// #[repr(C)]
/// #[derive(Clone, Copy, Layout)]
/// struct Old { x: Global<f32>, rows: u32, columns: u32 }
/// #[repr(C)]
/// #[derive(Clone, Copy, Layout)]
/// struct New { x: Global<f32>, columns: u32, rows: u32 }
///
/// assert_ne!(Old::STAMP, New::STAMP);
/// assert_eq!(size_of::<Old>(), size_of::<New>());
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` reaches a kernel, and has no stamp that says what it looks like in memory",
    label = "add `#[derive(cuda_std::Layout)]` to `{Self}`"
)]
pub trait Layout {
    /// A hash of size, alignment, and each field's name, offset and layout; through addresses, of what lies there.
    const STAMP: u64;
}

/// A stamp in the making (FNV-1a).
#[derive(Clone, Copy, Debug)]
pub struct Stamp(u64);

impl Stamp {
    /// Of a type of `T`'s size and alignment.
    #[must_use]
    pub const fn of<T>() -> Self {
        Self(0xcbf2_9ce4_8422_2325).number(size_of::<T>() as u64).number(align_of::<T>() as u64)
    }

    /// With a field.
    #[must_use]
    pub const fn field(self, name: &str, offset: usize, layout: u64) -> Self {
        self.text(name).number(offset as u64).number(layout)
    }

    /// With a name.
    #[must_use]
    pub const fn text(self, text: &str) -> Self {
        let (mut stamp, mut i) = (self.number(text.len() as u64), 0);
        while i < text.len() {
            stamp = stamp.byte(text.as_bytes()[i]);
            i += 1;
        }
        stamp
    }

    /// With a number.
    #[must_use]
    pub const fn number(self, number: u64) -> Self {
        let (bytes, mut stamp, mut i) = (number.to_le_bytes(), self, 0);
        while i < bytes.len() {
            stamp = stamp.byte(bytes[i]);
            i += 1;
        }
        stamp
    }

    /// Done.
    #[must_use]
    pub const fn finish(self) -> u64 {
        self.0
    }

    const fn byte(self, byte: u8) -> Self {
        Self((self.0 ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3))
    }
}

macro_rules! numbers {
    ($($number:ident)*) => { $(
        impl Layout for $number {
            const STAMP: u64 = Stamp::of::<Self>().text(stringify!($number)).finish();
        }
    )* };
}

numbers!(u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 bf16 f16);

impl<T: Layout> Layout for Global<T> {
    const STAMP: u64 = Stamp::of::<Self>().field("read", 0, T::STAMP).finish();
}

impl<T: Layout> Layout for GlobalMut<T> {
    const STAMP: u64 = Stamp::of::<Self>().field("write", 0, T::STAMP).finish();
}

impl<T: Layout, const N: usize> Layout for [T; N] {
    const STAMP: u64 = Stamp::of::<Self>().field("each", N, T::STAMP).finish();
}
