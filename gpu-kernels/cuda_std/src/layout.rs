//! A hash of a type's layout in memory, so that host and device can tell whether they agree on it.
//!
//! Kernels are compiled apart from the host program, and may come from a file. A launch passes raw bytes: if the two
//! sides disagree on the fields, the kernel reads nonsense without an error. So each kernel's PTX carries the
//! [digest](Layout::DIGEST) of its parameter block, and whoever loads the PTX compares it with the host's.

use crate::{Global, GlobalMut, bf16, f16};

/// A type that host and device lay out alike: numbers, addresses, arrays of such types, and types that derive `Layout`.
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
/// assert_ne!(Old::DIGEST, New::DIGEST);
/// assert_eq!(size_of::<Old>(), size_of::<New>());
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` reaches a kernel, and has no digest that says what it looks like in memory",
    label = "add `#[derive(cuda_std::Layout)]` to `{Self}`"
)]
pub trait Layout {
    /// A hash of size, alignment, and each field's name, offset and layout. For an address it includes the layout of
    /// what is stored there.
    const DIGEST: u64;
}

/// A digest under construction (FNV-1a). `#[derive(Layout)]` builds one.
#[derive(Clone, Copy, Debug)]
pub struct Digest(u64);

impl Digest {
    /// Starts a digest with `T`'s size and alignment.
    #[must_use]
    pub const fn of<T>() -> Self {
        Self(0xcbf2_9ce4_8422_2325).number(size_of::<T>() as u64).number(align_of::<T>() as u64)
    }

    /// Adds a field: its name, its offset in bytes, and the digest of its type.
    #[must_use]
    pub const fn field(self, name: &str, offset: usize, layout: u64) -> Self {
        self.text(name).number(offset as u64).number(layout)
    }

    /// Adds a text, its length first.
    #[must_use]
    pub const fn text(self, text: &str) -> Self {
        let (mut digest, mut i) = (self.number(text.len() as u64), 0);
        while i < text.len() {
            digest = digest.byte(text.as_bytes()[i]);
            i += 1;
        }
        digest
    }

    /// Adds a number.
    #[must_use]
    pub const fn number(self, number: u64) -> Self {
        let (bytes, mut digest, mut i) = (number.to_le_bytes(), self, 0);
        while i < bytes.len() {
            digest = digest.byte(bytes[i]);
            i += 1;
        }
        digest
    }

    /// The finished digest.
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
            const DIGEST: u64 = Digest::of::<Self>().text(stringify!($number)).finish();
        }
    )* };
}

numbers!(u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 bf16 f16);

impl<T: Layout> Layout for Global<T> {
    const DIGEST: u64 = Digest::of::<Self>().field("read", 0, T::DIGEST).finish();
}

impl<T: Layout> Layout for GlobalMut<T> {
    const DIGEST: u64 = Digest::of::<Self>().field("write", 0, T::DIGEST).finish();
}

impl<T: Layout, const N: usize> Layout for [T; N] {
    const DIGEST: u64 = Digest::of::<Self>().field("each", N, T::DIGEST).finish();
}
