//! Compares the weights of a conversion with the source's, both as stored in their files.
//!
//! Weights in the source's element type must have its bits. Weights in another type may differ by the
//! rounding error: half a unit in the last place of that type, at the weight's magnitude.

use std::collections::HashSet;

use moh_hf::{TensorBytes, WeightFiles};
use moh_kernels::DType;
use moh_model::ModelConfig;
use moh_model::tensors::{has_vocabulary_rows, tensor_shapes};

use crate::Error;

/// Elements that are compared at a time.
const BLOCK_ELEMENTS: usize = 1 << 20;

/// The change of the weights by rounding to another element type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rounding {
    /// The element type of the output.
    pub dtype: DType,
    /// The largest absolute difference of a weight to the source's, in the source's type.
    pub largest_difference: f64,
}

/// Compares the tensors that both configurations have, except tensors that are `refitted`. If a tensor has a row
/// for each token, compares its first `kept_rows` rows. Returns `None` if every tensor has the source's element type.
pub(crate) fn compare(
    source: &WeightFiles,
    output: &WeightFiles,
    [config, of_output]: [&ModelConfig; 2],
    kept_rows: usize,
    refitted: impl Fn(&str) -> bool,
) -> Result<Option<Rounding>, Error> {
    let mut found: Option<Rounding> = None;
    let written: HashSet<String> = tensor_shapes(of_output).into_iter().map(|it| it.0).collect();
    let tensors = tensor_shapes(config).into_iter();
    for (name, shape) in tensors.filter(|(name, _)| written.contains(name) && !refitted(name)) {
        let rows = if has_vocabulary_rows(&name) { kept_rows } else { shape[0] };
        let elements = rows * shape[1..].iter().product::<usize>();
        let (before, after) = (source.get(&name)?, output.get(&name)?);
        let difference = compare_tensor(&before, &after, elements).map_err(|element| {
            let reason = format!(
                "verification failed: element {element} of {name} differs from the source's by more \
                 than rounding to {} explains",
                after.dtype.torch_name()
            );
            Error::file(source.file_of(&name), reason)
        })?;
        if before.dtype != after.dtype {
            let largest = found.map_or(0.0, |found| found.largest_difference).max(difference);
            found = Some(Rounding { dtype: after.dtype, largest_difference: largest });
        }
        source.release(&name, 0..before.bytes.len());
        output.release(&name, 0..after.bytes.len());
    }
    Ok(found)
}

/// Returns the largest difference of the first elements. Fails with the index of the first element that differs by
/// more than the rounding error.
fn compare_tensor(
    before: &TensorBytes<'_>,
    after: &TensorBytes<'_>,
    elements: usize,
) -> Result<f64, usize> {
    let (mut largest, mut start) = (0f64, 0);
    let (mut a, mut b) = (Vec::new(), Vec::new());
    while start < elements {
        let end = (start + BLOCK_ELEMENTS).min(elements);
        let part = |tensor: &TensorBytes<'_>, out: &mut Vec<f32>| {
            let size = tensor.dtype.bytes();
            out.resize(end - start, 0.0);
            tensor.dtype.read(&tensor.bytes[start * size..end * size], out);
        };
        part(before, &mut a);
        part(after, &mut b);
        for (index, (&a, &b)) in a.iter().zip(&b).enumerate() {
            let difference = (f64::from(a) - f64::from(b)).abs();
            let allowed = match before.dtype == after.dtype {
                true if a.to_bits() == b.to_bits() => 0.0,
                true => return Err(start + index),
                false => half_unit(after.dtype, a),
            };
            if difference > allowed || difference.is_nan() {
                return Err(start + index);
            }
            largest = largest.max(difference);
        }
        start = end;
    }
    Ok(largest)
}

/// Returns half a unit in the last place of a floating-point type, at the magnitude of a value.
fn half_unit(dtype: DType, value: f32) -> f64 {
    let (fraction_bits, least_exponent) = match dtype {
        DType::BF16 => (7, -126),
        DType::F16 => (10, -14),
        _ => (23, -126),
    };
    // Every f32 but 0 is a normal f64.
    let exponent = (f64::from(value.abs()).to_bits() >> 52) as i32 - 1023;
    2f64.powi(exponent.max(least_exponent) - fraction_bits - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_moves_a_value_by_at_most_half_a_unit_in_the_last_place() {
        for (dtype, value, expected) in [
            (DType::BF16, 1.0, 2f64.powi(-8)),
            (DType::BF16, -1.99, 2f64.powi(-8)),
            (DType::BF16, 2.0, 2f64.powi(-7)),
            (DType::F16, 1.0, 2f64.powi(-11)),
            (DType::F16, 1e-7, 2f64.powi(-25)),
            (DType::BF16, 0.0, 2f64.powi(-134)),
        ] {
            assert_eq!(half_unit(dtype, value), expected, "{dtype:?} {value}");
        }
        for dtype in [DType::BF16, DType::F16, DType::F32] {
            for step in 0..100_000 {
                let value = (step as f32 * 0.618).sin() * 2f32.powi(step % 30 - 26);
                let mut rounded = [value];
                dtype.round(&mut rounded);
                let difference = (f64::from(value) - f64::from(rounded[0])).abs();
                assert!(difference <= half_unit(dtype, value), "{dtype:?} {value}");
            }
        }
    }

    #[test]
    fn a_difference_beyond_rounding_is_found() {
        let tensor = |dtype: DType, values: &[f32]| {
            let mut bytes = vec![0; values.len() * dtype.bytes()];
            dtype.write(values, &mut bytes);
            bytes
        };
        let shape = [3];
        let source = tensor(DType::F32, &[1.0, 1.0 + 2f32.powi(-8), 3.0]);
        let before = TensorBytes { dtype: DType::F32, shape: &shape, bytes: &source };
        for (dtype, values, expected) in [
            (DType::F32, [1.0, 1.0 + 2f32.powi(-8), 3.0], Ok(0.0)),
            (DType::F32, [1.0, 1.0, 3.0], Err(1)),
            (DType::BF16, [1.0, 1.0, 3.0], Ok(2f64.powi(-8))),
            // A whole unit instead of half a unit.
            (DType::BF16, [1.0, 1.0, 3.015_625], Err(2)),
        ] {
            let bytes = tensor(dtype, &values);
            let after = TensorBytes { dtype, shape: &shape, bytes: &bytes };
            assert_eq!(compare_tensor(&before, &after, 3), expected, "{dtype:?} {values:?}");
        }
        let other = tensor(DType::F32, &[1.0, 1.0 + 2f32.powi(-8), 9.0]);
        let after = TensorBytes { dtype: DType::F32, shape: &shape, bytes: &other };
        assert_eq!(compare_tensor(&before, &after, 2), Ok(0.0));
    }
}
