//! The choice of the implementation that multiplies bf16 matrices.

use std::fmt;
use std::sync::OnceLock;

use crate::{Cpu, Error, Result};

/// How the CPU multiplies bf16 matrices.
///
/// The choice depends only on the processor and on [`VARIABLE`](Self::VARIABLE), never on a
/// measurement: a resumed run computes the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bf16Path {
    /// AVX512-BF16: `vdpbf16ps`.
    Avx512,
    /// Elements are converted to f32 while they are packed, and multiplied as f32 matrices.
    F32,
}

impl Bf16Path {
    /// The environment variable that names the first implementation to try.
    pub const VARIABLE: &str = "MOH_BF16";

    /// Returns the implementation that this process uses.
    pub fn in_use() -> Self {
        static IN_USE: OnceLock<Bf16Path> = OnceLock::new();
        *IN_USE.get_or_init(|| Self::from_environment().unwrap_or_else(|_| Self::of_processor()))
    }

    /// Returns the implementation that the environment variable `MOH_BF16` names. If the variable is not set, or if
    /// the processor lacks the named implementation, returns the processor's default.
    ///
    /// # Errors
    /// Fails if the variable is neither `avx512` nor `f32`.
    pub fn from_environment() -> Result<Self> {
        match std::env::var_os(Self::VARIABLE).filter(|name| !name.is_empty()) {
            None => Ok(Self::of_processor()),
            Some(name) => Self::named(&name.to_string_lossy()),
        }
    }

    fn named(name: &str) -> Result<Self> {
        match name {
            #[cfg(target_arch = "x86_64")]
            "avx512" if super::avx512::available() => Ok(Self::Avx512),
            "avx512" | "f32" => Ok(Self::F32),
            _ => {
                let reason = format!("{} = {name:?}: expected avx512 or f32", Self::VARIABLE);
                Err(Error::device("the CPU", "start", reason))
            }
        }
    }

    fn of_processor() -> Self {
        #[cfg(target_arch = "x86_64")]
        if super::avx512::available() && has_full_rate() {
            return Self::Avx512;
        }
        Self::F32
    }
}

impl Cpu {
    /// Returns the CPU; fails if the environment's settings for it are invalid.
    pub fn open() -> Result<Self> {
        Bf16Path::from_environment().map(|_| Cpu)
    }
}

impl fmt::Display for Bf16Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Avx512 => "avx512",
            Self::F32 => "f32",
        })
    }
}

/// Returns whether `vdpbf16ps` multiplies more terms in the same time than the f32 instruction. On
/// Intel's processors its rate is half as high, and packing pairs does not pay off.
#[cfg(target_arch = "x86_64")]
fn has_full_rate() -> bool {
    let leaf = std::arch::x86_64::__cpuid(0);
    let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
    vendor.as_flattened() != b"GenuineIntel"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_chooses_the_implementation() {
        #[cfg(target_arch = "x86_64")]
        let has_avx512 = crate::matmul::avx512::available();
        #[cfg(not(target_arch = "x86_64"))]
        let has_avx512 = false;
        assert_eq!(Bf16Path::named("f32").unwrap(), Bf16Path::F32);
        let expected = if has_avx512 { Bf16Path::Avx512 } else { Bf16Path::F32 };
        assert_eq!(Bf16Path::named("avx512").unwrap(), expected);
        assert!(has_avx512 || Bf16Path::of_processor() == Bf16Path::F32);
        let error = Bf16Path::named("fast").unwrap_err().to_string();
        assert!(error.contains("MOH_BF16 = \"fast\": expected avx512 or f32"), "{error}");
    }
}
