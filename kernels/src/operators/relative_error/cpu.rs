//! The CPU body of the relative error.

use rayon::prelude::*;

use super::{RelativeError, RelativeErrorArgs, check};
use crate::compiled::compiled;
use crate::math::{sum_of_squares, total};
use crate::simd::vectorized;
use crate::{Cpu, Element, Result};

const ROWS: usize = 16;
/// Elements processed at a time.
const BLOCK: usize = 16;

impl RelativeError for Cpu {
    fn relative_error<T: Element>(&self, args: RelativeErrorArgs<'_, Self, T>) -> Result<()> {
        compiled!(relative_error::<T>(args: RelativeErrorArgs<'_, Cpu, T>))
    }
}

fn relative_error<T: Element>(args: RelativeErrorArgs<'_, Cpu, T>) -> Result<()> {
    let RelativeErrorArgs { width, scale, y, target, d_y, sum } = args;
    check(width, [y.len(), target.len(), d_y.len(), sum.len()])?;
    let part = ROWS * width;
    // Each task's errors, added in order: the same bits on any number of threads.
    let errors: Vec<f64> = (y.par_chunks(part), target.par_chunks(part), d_y.par_chunks_mut(part))
        .into_par_iter()
        .map(|(y, target, d_y)| vectorized!(rows(width, scale, y, target, d_y)))
        .collect();
    sum[0] += errors.iter().sum::<f64>();
    Ok(())
}

#[inline(always)]
fn rows<T: Element>(width: usize, scale: f32, y: &[T], target: &[T], d_y: &mut [T]) -> f64 {
    let rows =
        y.chunks_exact(width).zip(target.chunks_exact(width)).zip(d_y.chunks_exact_mut(width));
    rows.map(|((y, target), d_y)| row(scale, y, target, d_y)).sum()
}

/// Writes the gradient of a row, and returns its error.
#[inline(always)]
fn row<T: Element>(scale: f32, y: &[T], target: &[T], d_y: &mut [T]) -> f64 {
    let size = sum_of_squares::<16, _>(target);
    let inverse = if size > 0.0 { size.recip() } else { 0.0 };
    let factor = (2.0 * f64::from(scale) * inverse) as f32;
    let mut squares = [0f32; BLOCK];
    let parts = y.chunks(BLOCK).zip(target.chunks(BLOCK)).zip(d_y.chunks_mut(BLOCK));
    for ((y, target), d_y) in parts {
        for (((y, target), d_y), squares) in y.iter().zip(target).zip(d_y).zip(&mut squares) {
            let difference = y.to_f32() - target.to_f32();
            *squares += difference * difference;
            *d_y = T::from_f32(factor * difference);
        }
    }
    f64::from(total(squares)) * inverse
}
