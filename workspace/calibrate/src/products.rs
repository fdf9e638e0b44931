//! The products of a fit, summed over passes on the device: f32 within a pass, f64 between passes.

use moh_kernels::linear::LinearBackwardWeight;
use moh_kernels::{Accumulation, Backend, Memory};
use moh_model::{ModelConfig, RouterKind};
use ndarray::Array2;
use rayon::prelude::*;

use crate::ridge::Products;
use crate::search::judged_outputs;
use crate::{Error, Result};

/// The operands and products of a pass on the device, of `n` inputs and `m` targets.
pub(crate) struct ProductBuffers<M: Memory> {
    n: usize,
    m: usize,
    inputs: M::Buffer<f32>,
    targets: M::Buffer<f32>,
    gram: M::Buffer<f32>,
    cross: M::Buffer<f32>,
}

impl<M: Memory> ProductBuffers<M> {
    /// Allocates the buffers for passes over `tokens` tokens of `n` inputs and `m` targets.
    pub fn new(memory: &M, tokens: usize, n: usize, m: usize) -> Result<Self, moh_kernels::Error> {
        Ok(ProductBuffers {
            n,
            m,
            inputs: memory.allocate(tokens * n)?,
            targets: memory.allocate(tokens * m)?,
            gram: memory.allocate(n * n)?,
            cross: memory.allocate(m * n)?,
        })
    }
}

/// The buffers of a calibration on its device, in addition to the buffers of passes.
pub struct CalibrationBuffers<M: Memory> {
    pub(crate) fit: ProductBuffers<M>,
    /// For the sums of outputs by which sets of shared heads are judged.
    pub(crate) search: ProductBuffers<M>,
    /// For the fit of a router's matrix.
    pub(crate) router: Option<ProductBuffers<M>>,
}

impl<M: Memory> CalibrationBuffers<M> {
    /// Allocates buffers for passes over `tokens` tokens of the model that `config` describes, and for this router.
    pub fn new(
        memory: &M,
        config: &ModelConfig,
        router: RouterKind,
        tokens: usize,
    ) -> Result<Self, moh_kernels::Error> {
        let (inputs, width) = (config.query_width(), config.hidden_size);
        let of_router = || ProductBuffers::new(memory, tokens, width, config.num_attention_heads);
        Ok(CalibrationBuffers {
            fit: ProductBuffers::new(memory, tokens, inputs, width)?,
            search: ProductBuffers::new(memory, tokens, inputs, judged_outputs(width))?,
            router: router.has_matrices().then(of_router).transpose()?,
        })
    }
}

/// Adds passes over `tokens` tokens to [`Products`].
pub(crate) struct ProductSums<'a, B: Backend> {
    backend: &'a B,
    sums: Products,
    buffers: ProductBuffers<B>,
    /// A product of a pass, on the host.
    host: Vec<f32>,
    is_stopped: IsStopped<'a>,
}

/// Returns whether the caller asks to stop.
pub(crate) type IsStopped<'a> = &'a (dyn Fn() -> bool + Sync);

impl<'a, B: Backend> ProductSums<'a, B> {
    pub fn new(backend: &'a B, buffers: ProductBuffers<B>, is_stopped: IsStopped<'a>) -> Self {
        let (n, m) = (buffers.n, buffers.m);
        let (sums, host) = (Products::zeros(n, m), vec![0.0; n.max(m) * n]);
        ProductSums { backend, sums, buffers, host, is_stopped }
    }

    /// Adds the inputs `[tokens, n]` and targets `[tokens, m]` of a pass, or fails if the caller asks to stop. Most of
    /// a calibration's time is between two calls of this function.
    pub fn add(&mut self, inputs: &[f32], targets: &[f32]) -> Result<()> {
        if (self.is_stopped)() {
            return Err(Error::Stopped);
        }
        let buffers = &mut self.buffers;
        self.backend.upload(inputs, B::whole_mut(&mut buffers.inputs))?;
        self.backend.upload(targets, B::whole_mut(&mut buffers.targets))?;
        for (outputs, product, sum) in [
            (&buffers.inputs, &mut buffers.gram, &mut self.sums.gram),
            (&buffers.targets, &mut buffers.cross, &mut self.sums.cross),
        ] {
            self.backend.linear_backward_weight(LinearBackwardWeight {
                inputs: buffers.n,
                x: B::whole(&buffers.inputs),
                d_y: B::whole(outputs),
                d_weight: B::whole_mut(product),
                accumulation: Accumulation::Overwrite,
            })?;
            let host = &mut self.host[..sum.len()];
            self.backend.download(B::whole(product), host)?;
            add(sum, host);
        }
        self.sums.target += targets.iter().map(|&y| f64::from(y) * f64::from(y)).sum::<f64>();
        Ok(())
    }

    /// Returns the sums so far, and resets them to zero.
    pub fn take(&mut self) -> Products {
        let zeros = Products::zeros(self.buffers.n, self.buffers.m);
        std::mem::replace(&mut self.sums, zeros)
    }
}

fn add(sum: &mut Array2<f64>, values: &[f32]) {
    let columns = sum.ncols();
    let rows: Vec<_> = sum.rows_mut().into_iter().zip(values.chunks_exact(columns)).collect();
    rows.into_par_iter().with_min_len(16).for_each(|(mut sum, values)| {
        sum.iter_mut().zip(values).for_each(|(sum, &value)| *sum += f64::from(value));
    });
}
