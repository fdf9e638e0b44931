//! Elements as files store them: little-endian bytes, not necessarily aligned.

use half::{bf16, f16};

use crate::scalar::DType;

impl DType {
    /// Returns the index of the first element that is infinite or not a number.
    pub fn first_not_finite(self, bytes: &[u8]) -> Option<usize> {
        match self {
            DType::F32 => {
                first(bytes, |b: [u8; 4]| u32::from_le_bytes(b) & 0x7f80_0000 == 0x7f80_0000)
            }
            DType::F16 => first(bytes, |b: [u8; 2]| u16::from_le_bytes(b) & 0x7c00 == 0x7c00),
            DType::BF16 => first(bytes, |b: [u8; 2]| u16::from_le_bytes(b) & 0x7f80 == 0x7f80),
            DType::F64 => first(bytes, |b: [u8; 8]| !f64::from_le_bytes(b).is_finite()),
            DType::U32 | DType::I16 | DType::U8 => None,
        }
    }

    /// Converts elements to f32, exactly for floats of up to 32 bits; the shorter of the two slices
    /// determines their number.
    pub fn read(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            DType::F32 => read(bytes, out, f32::from_le_bytes),
            DType::F16 => read(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            DType::BF16 => read(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            DType::F64 => read(bytes, out, |b| f64::from_le_bytes(b) as f32),
            DType::U32 => read(bytes, out, |b| u32::from_le_bytes(b) as f32),
            DType::I16 => read(bytes, out, |b| f32::from(i16::from_le_bytes(b))),
            DType::U8 => read(bytes, out, |[b]: [u8; 1]| f32::from(b)),
        }
    }

    /// Rounds f32 values to this type (floats to nearest, ties to even); the shorter of the two
    /// slices determines their number. Values outside the range become infinite for floats, and
    /// saturate for integers.
    pub fn write(self, values: &[f32], out: &mut [u8]) {
        match self {
            DType::F32 => write(values, out, f32::to_le_bytes),
            DType::F16 => write(values, out, |value| f16::from_f32(value).to_le_bytes()),
            DType::BF16 => write(values, out, |value| bf16::from_f32(value).to_le_bytes()),
            DType::F64 => write(values, out, |value| f64::from(value).to_le_bytes()),
            DType::U32 => write(values, out, |value| (value.round() as u32).to_le_bytes()),
            DType::I16 => write(values, out, |value| (value.round() as i16).to_le_bytes()),
            DType::U8 => write(values, out, |value| [value.round() as u8]),
        }
    }

    /// Rounds f32 values to this type in place, as [`write`](Self::write) and then [`read`](Self::read) do.
    pub fn round(self, values: &mut [f32]) {
        if self == DType::F32 {
            return;
        }
        let mut bytes = vec![0; values.len() * self.bytes()];
        self.write(values, &mut bytes);
        self.read(&bytes, values);
    }
}

#[inline(always)]
fn read<const N: usize>(bytes: &[u8], out: &mut [f32], convert: impl Fn([u8; N]) -> f32) {
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = convert(*bytes);
    }
}

#[inline(always)]
fn write<const N: usize>(values: &[f32], out: &mut [u8], convert: impl Fn(f32) -> [u8; N]) {
    for (bytes, value) in out.as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *bytes = convert(*value);
    }
}

/// Returns the index of the first element that is `bad`. Whole blocks are tested without a branch, so that the
/// test is limited by memory bandwidth.
fn first<const N: usize>(bytes: &[u8], bad: impl Fn([u8; N]) -> bool) -> Option<usize> {
    const BLOCK: usize = 1024;
    let (elements, _) = bytes.as_chunks::<N>();
    for (block, elements) in elements.chunks(BLOCK).enumerate() {
        if elements.iter().fold(false, |any, element| any | bad(*element)) {
            let within = elements.iter().position(|element| bad(*element))?;
            return Some(block * BLOCK + within);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_whole_numbers_survive_every_type() {
        let values = [0.0, 1.0, 7.0, 100.0];
        for dtype in
            [DType::F32, DType::F16, DType::BF16, DType::F64, DType::U32, DType::I16, DType::U8]
        {
            let mut bytes = vec![0; values.len() * dtype.bytes()];
            dtype.write(&values, &mut bytes);
            let mut read = [0f32; 4];
            dtype.read(&bytes, &mut read);
            assert_eq!(read, values, "{dtype:?}");
            assert_eq!(dtype.first_not_finite(&bytes), None);
        }
    }

    #[test]
    fn every_type_finds_its_first_value_that_is_not_finite() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for position in [0, 7, 1023, 1024, 2999] {
                    let mut values = vec![-60000.0f32; 3000];
                    let mut bytes = vec![0; 3000 * dtype.bytes()];
                    dtype.write(&values, &mut bytes);
                    assert_eq!(dtype.first_not_finite(&bytes), None);
                    values[position] = bad;
                    dtype.write(&values, &mut bytes);
                    assert_eq!(dtype.first_not_finite(&bytes), Some(position));
                }
            }
        }
    }
}
