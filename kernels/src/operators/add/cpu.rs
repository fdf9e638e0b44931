//! The CPU body of the addition.

use rayon::prelude::*;

use super::{Add, check};
use crate::compiled::compiled;
use crate::simd::vectorized;
use crate::{Cpu, Element, Result};

/// Elements of one task.
const PART: usize = 64 * 1024;

impl Add for Cpu {
    fn add<T: Element>(&self, x: &[T], y: &[T], out: &mut [T]) -> Result<()> {
        compiled!(add::<T>(x: &[T], y: &[T], out: &mut [T]))
    }
}

fn add<T: Element>(x: &[T], y: &[T], out: &mut [T]) -> Result<()> {
    check([x.len(), y.len(), out.len()])?;
    let parts = out.par_chunks_mut(PART).zip(x.par_chunks(PART)).zip(y.par_chunks(PART));
    parts.for_each(|((out, x), y)| vectorized!(add_part(x, y, out)));
    Ok(())
}

#[inline(always)]
fn add_part<T: Element>(x: &[T], y: &[T], out: &mut [T]) {
    for ((out, x), y) in out.iter_mut().zip(x).zip(y) {
        *out = T::from_f32(x.to_f32() + y.to_f32());
    }
}
