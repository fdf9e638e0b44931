//! The CPU body of the conversion.

use rayon::prelude::*;

use super::Convert;
use crate::compiled::compiled;
use crate::simd::vectorized;
use crate::{Cpu, Element, Result, check_len};

/// Elements of one task.
const PART: usize = 64 * 1024;

impl Convert for Cpu {
    fn convert<X: Element, Y: Element>(&self, x: &[X], y: &mut [Y]) -> Result<()> {
        compiled!(convert::<X, Y>(x: &[X], y: &mut [Y]))
    }
}

fn convert<X: Element, Y: Element>(x: &[X], y: &mut [Y]) -> Result<()> {
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
