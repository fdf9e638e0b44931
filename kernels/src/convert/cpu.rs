//! The CPU body of the conversion.

use rayon::prelude::*;

use crate::error::{Result, check_len};
use crate::scalar::Element;
use crate::simd::vectorized;

/// Numbers of one task.
const PART: usize = 64 * 1024;

pub(crate) fn convert<X: Element, Y: Element>(x: &[X], y: &mut [Y]) -> Result<()> {
    check_len("convert", "y", y.len(), x.len())?;
    let parts = y.par_chunks_mut(PART).zip(x.par_chunks(PART));
    parts.for_each(|(y, x)| vectorized!(convert_part(x, y)));
    Ok(())
}

#[inline(always)]
fn convert_part<X: Element, Y: Element>(x: &[X], y: &mut [Y]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = Y::from_f32(x.to_f32());
    }
}
