//! RMSNorm on a GPU.

use super::{RmsNorm, RmsNormBackward, RmsNormForward, check};
use crate::cuda::parameters::rms_norm::{Backward, Forward};
use crate::cuda::{Cuda, THREADS, name};
use crate::workspace::gpu::{NORM_GROUPS, norm_bytes};
use crate::{Element, Result, check_len};

/// Columns of a block of `rms_norm_backward_weight`.
const SUM_COLUMNS: usize = 8;
/// Bytes that a thread reads at once.
const WIDE_BYTES: u64 = 16;
/// Threads of a warp. A block is a multiple of it.
const WARP: usize = 32;
/// Maximum threads of a block of `rms_norm_backward_rows`.
const MAX_THREADS: usize = 1024;

impl RmsNorm for Cuda {
    fn rms_norm_forward<T: Element>(&self, args: RmsNormForward<'_, Self, T>) -> Result<()> {
        let RmsNormForward { eps, x, weight, y, inv_rms } = args;
        let width = check("rms_norm_forward", x.len, weight.len, inv_rms.len)?;
        check_len("rms_norm_forward", "y", y.len, x.len)?;
        let parameters = Forward {
            x: x.address,
            weight: weight.address,
            y: y.address,
            inv_rms: inv_rms.address,
            width: width as u64,
            eps,
        };
        self.launch(&name::<T>("rms_norm_forward"), [inv_rms.len, 1], 0, &parameters)
    }

    fn rms_norm_backward<T: Element, G: Element>(
        &self,
        args: RmsNormBackward<'_, Self, T, G>,
    ) -> Result<()> {
        let RmsNormBackward { x, weight, inv_rms, d_y, d_x, d_weight } = args;
        let width = check("rms_norm_backward", x.len, weight.len, inv_rms.len)?;
        check_len("rms_norm_backward", "d_y", d_y.len, x.len)?;
        check_len("rms_norm_backward", "d_x", d_x.len, x.len)?;
        check_len("rms_norm_backward", "d_weight", d_weight.len, width)?;
        let tokens = inv_rms.len;
        let groups = tokens.min(NORM_GROUPS);
        let parameters = Backward {
            x: x.address,
            weight: weight.address,
            inv_rms: inv_rms.address,
            d_y: d_y.address,
            d_x: d_x.address,
            partial: self.scratch(norm_bytes(tokens, width))?,
            d_weight: d_weight.address,
            tokens: tokens as u64,
            width: width as u64,
            groups: groups as u64,
        };
        if let Some(threads) = parameters.threads_of_row::<T>() {
            let kernel = name::<T>("rms_norm_backward_rows");
            let parameters = [bytemuck::bytes_of(&parameters)];
            self.launch_with(threads, &kernel, [groups, 1, 1], 0, &parameters)?;
        } else {
            let columns = [width.div_ceil(THREADS), groups];
            self.launch(&name::<T>("rms_norm_backward_input"), [tokens, 1], 0, &parameters)?;
            self.launch(&name::<T>("rms_norm_backward_partial"), columns, 0, &parameters)?;
        }
        let columns = [width.div_ceil(SUM_COLUMNS), 1];
        self.launch(&name::<G>("rms_norm_backward_weight"), columns, 0, &parameters)
    }
}

impl Backward {
    /// Returns the threads of a block in which each thread reads 16 bytes of a row; `None` if no block can.
    fn threads_of_row<T: Element>(&self) -> Option<usize> {
        let Backward { x, weight, d_y, d_x, partial, width, .. } = *self;
        let bytes = width * size_of::<T>() as u64;
        let aligned = [x, weight, d_y, d_x, partial, bytes].iter().all(|at| at % WIDE_BYTES == 0);
        let threads = ((bytes / WIDE_BYTES) as usize).next_multiple_of(WARP);
        (aligned && threads <= MAX_THREADS).then_some(threads)
    }
}
