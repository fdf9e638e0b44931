//! The number types that buffers hold, and those among them that operators compute in.

use bytemuck::Pod;
use half::bf16;

/// The type of a buffer's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// bfloat16: storage only, the arithmetic is f32.
    BF16,
    /// 64-bit float, for sums that must not lose digits.
    F64,
    /// 32-bit unsigned integer: token ids, positions, block numbers.
    U32,
    /// A byte: masks.
    U8,
}

/// A number that a buffer can hold.
pub trait Scalar: Pod + Send + Sync + std::fmt::Debug + PartialEq {
    /// Its type.
    const DTYPE: DType;
}

/// A number that weights, activations and gradients are stored in; arithmetic on it is f32.
pub trait Element: Scalar {
    /// Its value, exactly.
    fn to_f32(self) -> f32;
    /// The nearest representable number, ties to even.
    fn from_f32(value: f32) -> Self;
}

macro_rules! scalar {
    ($($type:ty => $dtype:ident),* $(,)?) => {
        $(impl Scalar for $type { const DTYPE: DType = DType::$dtype; })*
    };
}

scalar!(f32 => F32, bf16 => BF16, f64 => F64, u32 => U32, u8 => U8);

impl Element for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        bf16::from_f32(value)
    }
}
