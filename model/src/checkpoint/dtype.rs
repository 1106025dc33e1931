//! The number formats of stored tensors.

use std::fmt;

/// Number format of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// bfloat16: the upper half of an f32.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// FP8 with four bits of exponent and three of mantissa, without infinities: codes of a weight format.
    F8E4m3,
    /// Integers of 32 bits: packed codes of a weight format, or indices of groups.
    I32,
    /// Integers of 64 bits: sizes stored beside packed codes, or differences of token ids.
    I64,
    /// Booleans, one byte each: which tokens a draft head knows.
    Bool,
}

impl Dtype {
    /// Every format that warpdraft reads from a safetensors file.
    const ALL: [Self; 7] = [Self::Bf16, Self::F16, Self::F32, Self::F8E4m3, Self::I32, Self::I64, Self::Bool];

    /// The formats whose elements are weights by themselves.
    pub(crate) const FLOATS: [Self; 3] = [Self::Bf16, Self::F16, Self::F32];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F8E4m3 | Dtype::Bool => 1,
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::F32 | Dtype::I32 => 4,
            Dtype::I64 => 8,
        }
    }

    /// Whether elements are weights by themselves, not codes of a [weight format](crate::format).
    pub fn is_float(self) -> bool {
        Self::FLOATS.contains(&self)
    }

    /// The format by its name in a safetensors header, or `None` if warpdraft does not read it.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name)
    }

    /// Its name in a safetensors header.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "BF16",
            Dtype::F16 => "F16",
            Dtype::F32 => "F32",
            Dtype::F8E4m3 => "F8_E4M3",
            Dtype::I32 => "I32",
            Dtype::I64 => "I64",
            Dtype::Bool => "BOOL",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
