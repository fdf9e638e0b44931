//! The products of a fit, summed over passes on the device: f32 within a pass, f64 between passes.

use moh_kernels::linear::LinearBackwardWeight;
use moh_kernels::{Accumulation, Backend};
use ndarray::Array2;
use rayon::prelude::*;

use crate::Result;
use crate::ridge::Products;

/// Adds passes over `tokens` tokens to [`Products`].
pub(crate) struct ProductSums<'a, B: Backend> {
    backend: &'a B,
    sums: Products,
    inputs: B::Buffer<f32>,
    targets: B::Buffer<f32>,
    gram: B::Buffer<f32>,
    cross: B::Buffer<f32>,
    /// A product of a pass, on the host.
    host: Vec<f32>,
}

impl<'a, B: Backend> ProductSums<'a, B> {
    /// Buffers for passes over `tokens` tokens of `n` inputs and `m` targets.
    pub fn new(backend: &'a B, tokens: usize, n: usize, m: usize) -> Result<Self> {
        Ok(ProductSums {
            backend,
            sums: Products::zeros(n, m),
            inputs: backend.allocate(tokens * n)?,
            targets: backend.allocate(tokens * m)?,
            gram: backend.allocate(n * n)?,
            cross: backend.allocate(m * n)?,
            host: vec![0.0; n.max(m) * n],
        })
    }

    /// Adds the inputs `[tokens, n]` and targets `[tokens, m]` of a pass.
    pub fn add(&mut self, inputs: &[f32], targets: &[f32]) -> Result<()> {
        let n = self.sums.gram.nrows();
        self.backend.upload(inputs, B::whole_mut(&mut self.inputs))?;
        self.backend.upload(targets, B::whole_mut(&mut self.targets))?;
        for (outputs, product, sum) in [
            (&self.inputs, &mut self.gram, &mut self.sums.gram),
            (&self.targets, &mut self.cross, &mut self.sums.cross),
        ] {
            self.backend.linear_backward_weight(LinearBackwardWeight {
                inputs: n,
                x: B::whole(&self.inputs),
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

    /// The sums so far, which begin again at zero.
    pub fn take(&mut self) -> Products {
        let zeros = Products::zeros(self.sums.gram.nrows(), self.sums.cross.nrows());
        std::mem::replace(&mut self.sums, zeros)
    }
}

/// Adds a matrix, row by row.
fn add(sum: &mut Array2<f64>, values: &[f32]) {
    let columns = sum.ncols();
    let rows: Vec<_> = sum.rows_mut().into_iter().zip(values.chunks_exact(columns)).collect();
    rows.into_par_iter().with_min_len(16).for_each(|(mut sum, values)| {
        sum.iter_mut().zip(values).for_each(|(sum, &value)| *sum += f64::from(value));
    });
}
