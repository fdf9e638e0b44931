//! The relative squared error of rows and its gradient: e = |y - t|^2 / |t|^2 of each row y and its target t, and
//! d_y = scale de/dy = 2 scale (y - t) / |t|^2. A row whose target is 0 has no error, and no gradient.

mod cpu;
#[cfg(gpu)]
mod cuda;

use crate::{Element, Memory, Result, View, ViewMut, check_len, ensure};

/// Arguments of [`RelativeError::relative_error`].
pub struct RelativeErrorArgs<'a, M: Memory, T: Element> {
    /// Elements of a row, C.
    pub width: usize,
    /// Factor of the gradient.
    pub scale: f32,
    /// `[N, C]`.
    pub y: View<'a, M, T>,
    /// `[N, C]`.
    pub target: View<'a, M, T>,
    /// Overwritten; `[N, C]`.
    pub d_y: ViewMut<'a, M, T>,
    /// The errors of all rows are added, `[1]`.
    pub sum: ViewMut<'a, M, f64>,
}

/// The relative error as an operator of a device.
pub trait RelativeError: Memory {
    /// Adds `|y - target|^2 / |target|^2` of each row to `sum`, and writes its gradient times `scale` to `d_y`.
    fn relative_error<T: Element>(&self, args: RelativeErrorArgs<'_, Self, T>) -> Result<()>;
}

/// Checks the lengths; returns the number of rows.
fn check(width: usize, [y, target, d_y, sum]: [usize; 4]) -> Result<usize> {
    const NAME: &str = "relative_error";
    ensure(NAME, width > 0, || "the width is 0".into())?;
    let rows = y / width;
    check_len(NAME, "y", y, rows * width)?;
    check_len(NAME, "target", target, y)?;
    check_len(NAME, "d_y", d_y, y)?;
    check_len(NAME, "sum", sum, 1)?;
    Ok(rows)
}
