//! The element types of buffers and files, and the subset that operators compute in.

use bytemuck::Pod;
use half::{bf16, f16};

/// The type of an element. Every other list of element types is a subset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// 16-bit float (IEEE): only weights in files, no operator computes in it.
    F16,
    /// bfloat16: storage only, the arithmetic is f32.
    BF16,
    /// 64-bit float, for sums that must not lose digits.
    F64,
    /// 32-bit unsigned integer: token ids, positions, indices of blocks.
    U32,
    /// 16-bit integer: remainders of the weights' rounding.
    I16,
    /// A byte: masks.
    U8,
}

impl DType {
    /// Returns the bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 | DType::U32 => 4,
            DType::F16 | DType::BF16 | DType::I16 => 2,
            DType::U8 => 1,
        }
    }

    /// Every type.
    const ALL: [DType; 7] =
        [DType::F32, DType::F16, DType::BF16, DType::F64, DType::U32, DType::I16, DType::U8];

    /// Returns the type with this short or PyTorch name; `None` if no type has it.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| [dtype.name(), dtype.torch_name()].contains(&name))
    }

    /// Returns the name in PyTorch and in `config.json`. Recipes and the command line also accept it.
    pub const fn torch_name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            DType::F64 => "float64",
            DType::U32 => "uint32",
            DType::I16 => "int16",
            DType::U8 => "uint8",
        }
    }

    /// Returns the short name, as in Rust, in recipes and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F64 => "f64",
            DType::U32 => "u32",
            DType::I16 => "i16",
            DType::U8 => "u8",
        }
    }
}

/// The types of [`DType`] that operators compute in: the types `T` that implement [`Element`]. A
/// match on it selects the generic instantiation for a type that is known only at run time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// `f32`.
    F32,
    /// `bf16`.
    BF16,
}

impl ElementType {
    /// All element types.
    pub const ALL: [ElementType; 2] = [ElementType::F32, ElementType::BF16];

    /// Returns the type of an element.
    pub const fn dtype(self) -> DType {
        match self {
            ElementType::F32 => DType::F32,
            ElementType::BF16 => DType::BF16,
        }
    }

    /// Returns the bytes of one element.
    pub const fn bytes(self) -> usize {
        self.dtype().bytes()
    }

    /// Returns the name in recipes and on the command line.
    pub const fn name(self) -> &'static str {
        self.dtype().name()
    }

    /// Returns the type with this short or PyTorch name; `None` if no type has it.
    pub fn from_name(name: &str) -> Option<Self> {
        let dtype = DType::from_name(name)?;
        Self::ALL.into_iter().find(|element| element.dtype() == dtype)
    }
}

/// An element type of buffers.
pub trait Scalar: Pod + Send + Sync + std::fmt::Debug + PartialEq {
    /// The scalar's type.
    const DTYPE: DType;
}

/// An element type of weights, activations and gradients; arithmetic on it is f32.
pub trait Element: crate::Stored {
    /// The element's type, among the types that operators compute in.
    const ELEMENT: ElementType;
    /// Returns the exact value.
    fn to_f32(self) -> f32;
    /// Returns the nearest representable value, ties to even.
    fn from_f32(value: f32) -> Self;
}

macro_rules! scalar {
    ($($type:ty => $dtype:ident),* $(,)?) => {
        $(impl Scalar for $type { const DTYPE: DType = DType::$dtype; })*
    };
}

scalar!(f32 => F32, f16 => F16, bf16 => BF16, f64 => F64, u32 => U32, i16 => I16, u8 => U8);

impl Element for f32 {
    const ELEMENT: ElementType = ElementType::F32;
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
    const ELEMENT: ElementType = ElementType::BF16;
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    /// Computes the same as [`bf16::from_f32`], without a branch, so that loops over it vectorise.
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        bf16::from_bits(if value.is_nan() { quiet as u16 } else { rounded as u16 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_types_of_elements_lead_to_each_other() {
        for dtype in ElementType::ALL {
            assert_eq!(ElementType::from_name(dtype.name()), Some(dtype));
            assert_eq!(ElementType::from_name(dtype.dtype().torch_name()), Some(dtype));
        }
        assert_eq!([ElementType::from_name("f16"), ElementType::from_name("float16")], [None; 2]);
        assert_eq!(DType::from_name("float16"), Some(DType::F16));
        assert_eq!(DType::from_name("float8"), None);
        assert_eq!((f32::ELEMENT.dtype(), bf16::ELEMENT.dtype()), (f32::DTYPE, bf16::DTYPE));
    }

    #[test]
    fn bf16_rounds_as_the_crate_half_does() {
        for high in 0..=u32::from(u16::MAX) {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(high << 16 | low);
                let (ours, theirs) = (<bf16 as Element>::from_f32(value), bf16::from_f32(value));
                assert_eq!(ours.to_bits(), theirs.to_bits(), "{value} ({:#x})", value.to_bits());
            }
        }
    }
}
