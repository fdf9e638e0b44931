//! AdamW and the squared norm on a GPU.
//!
//! The norm needs one launch per [`SEGMENTS`] segments, with their table in the kernel's
//! parameters, and one final sum.

use bytemuck::Zeroable;

use super::{AdamWUpdate, Constants, Optimizer};
use crate::cuda::parameters::adamw::{Segment, SquaredNorms, Sum, Update};
use crate::cuda::{Cuda, CudaView, CudaViewMut, THREADS, blocks, name};
use crate::{Element, Result, check_len};

/// Segments per launch: a kernel accepts 4 KiB of parameters.
const SEGMENTS: usize = 128;
const MIN_BLOCK_ELEMENTS: usize = 8 * THREADS;

/// Returns the table of up to [`SEGMENTS`] segments, with one block per `of_block` elements of each segment, and
/// the total number of blocks.
fn table<G: Element>(xs: &[CudaView<'_, G>], of_block: usize) -> ([Segment; SEGMENTS], usize) {
    let mut segments = [Segment::zeroed(); SEGMENTS];
    let mut first = 0;
    for (segment, x) in segments.iter_mut().zip(xs) {
        let blocks = x.len.div_ceil(of_block);
        *segment = Segment {
            x: x.address,
            count: x.len as u64,
            first_block: first as u32,
            blocks: blocks as u32,
        };
        first += blocks;
    }
    (segments, first)
}

/// Computes `out[0] += scale * sum(x)`, where `x` is `count` f64 in scratch memory.
pub(crate) fn sum(
    cuda: &Cuda,
    x: u64,
    count: usize,
    scale: f64,
    out: CudaViewMut<'_, f64>,
) -> Result<()> {
    let parameters = Sum { x, out: out.address, count: count as u64, scale };
    cuda.launch("sum_f64", [1, 1], 0, &parameters)
}

impl Optimizer for Cuda {
    fn squared_norms<G: Element>(
        &self,
        xs: &[CudaView<'_, G>],
        out: CudaViewMut<'_, f64>,
    ) -> Result<()> {
        check_len("squared_norms", "out", out.len, 1)?;
        let xs: Vec<_> = xs.iter().filter(|x| x.len > 0).copied().collect();
        let elements: usize = xs.iter().map(|x| x.len).sum();
        let of_block = elements.div_ceil(blocks(elements)).max(MIN_BLOCK_ELEMENTS);
        let parts = xs.iter().map(|x| x.len.div_ceil(of_block)).sum();
        let partial = self.scratch(parts * size_of::<f64>())?;
        let mut done = 0;
        for xs in xs.chunks(SEGMENTS) {
            let (segments, blocks) = table(xs, of_block);
            let partial = partial + (done * size_of::<f64>()) as u64;
            let parameters = SquaredNorms { partial, count: xs.len() as u64, segments };
            self.launch(&name::<G>("squared_norms"), [blocks, 1], 0, &parameters)?;
            done += blocks;
        }
        sum(self, partial, parts, 1.0, out)
    }

    fn adamw<T: Element, G: Element, S: Element>(
        &self,
        args: AdamWUpdate<'_, Self, T, G, S>,
    ) -> Result<()> {
        args.check()?;
        let AdamWUpdate { step, gradients, weights, remainder, .. } = args;
        let AdamWUpdate { first_moment, second_moment, .. } = args;
        let constants = Constants::new(step);
        let Constants { clip, keep, rate, root_correction, .. } = constants;
        let Constants { beta1, beta2, share1, share2, eps, .. } = constants;
        let parameters = Update {
            gradients: gradients.address,
            weights: weights.address,
            remainder: remainder.map_or(0, |remainder| remainder.address),
            first_moment: first_moment.address,
            second_moment: second_moment.address,
            count: gradients.len as u64,
            clip,
            keep,
            rate,
            root_correction,
            beta1,
            beta2,
            share1,
            share2,
            eps,
            padding: 0,
        };
        let kernel = name::<S>(&name::<G>(&name::<T>("adamw")));
        self.launch(&kernel, [blocks(gradients.len), 1], 0, &parameters)
    }
}
