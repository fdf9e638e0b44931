//! The relative error on a GPU.

use super::{RelativeError, RelativeErrorArgs, check};
use crate::adamw::cuda::sum;
use crate::cuda::parameters::relative_error::Parameters;
use crate::cuda::{Cuda, name};
use crate::workspace::gpu::row_loss_bytes;
use crate::{Element, Result};

impl RelativeError for Cuda {
    fn relative_error<T: Element>(&self, args: RelativeErrorArgs<'_, Self, T>) -> Result<()> {
        let RelativeErrorArgs { width, scale, y, target, d_y, sum: out } = args;
        let rows = check(width, [y.len, target.len, d_y.len, out.len])?;
        let errors = self.scratch(row_loss_bytes(rows))?;
        let parameters = Parameters {
            y: y.address,
            target: target.address,
            d_y: d_y.address,
            errors,
            width: width as u64,
            scale,
            padding: 0,
        };
        self.launch(&name::<T>("relative_error"), [rows, 1], 0, &parameters)?;
        sum(self, errors, rows, 1.0, out)
    }
}
