//! A layer's tensors on their way into the block: the source's, and those that a calibration computes.

use moh_kernels::Backend;
use moh_model::tensors::{OUTPUT_PROJECTION, ROUTER, ROUTER_STAGES, in_layer, layer_and_name};
use ndarray::{Array2, ArrayView2};

use super::{Job, Streams};
use crate::ridge::Products;
use crate::router_fit::{RouterFit, contributions};
use crate::{Error, RIDGE, Result, matrix};

impl<B: Backend + Clone, E: From<Error> + From<moh_model::Error>> Job<'_, B, E> {
    /// Loads a layer of the source into the block; its output projection.
    pub(super) fn load_source(&mut self, layer: usize) -> Result<Vec<f32>, E> {
        let mut projection = vec![0f32; self.config.hidden_size * self.config.query_width()];
        (self.weights)(&in_layer(layer, OUTPUT_PROJECTION), &mut projection)?;
        self.load(layer, None, None)?;
        Ok(projection)
    }

    /// Loads a layer into the block, with this output projection in place of the source's, and this matrix of a learned
    /// router, zeros if there is none.
    pub(super) fn load(
        &mut self,
        layer: usize,
        projection: Option<&[f32]>,
        router: Option<&RouterFit>,
    ) -> Result<(), E> {
        self.block.load::<E>(layer, |tensor, values| {
            let name = layer_and_name(tensor).map(|(_, name)| name);
            match (name, projection, router) {
                (Some(OUTPUT_PROJECTION), Some(new), _) => values.copy_from_slice(new),
                (Some(ROUTER), _, Some(fit)) => values.copy_from_slice(&fit.rows),
                // The source is a dense model.
                (Some(ROUTER), _, None) | (Some(ROUTER_STAGES), ..) => values.fill(0.0),
                _ => return (self.weights)(tensor, values),
            }
            Ok(())
        })
    }

    /// Fits the router's matrix to a layer of the source that the block has, and loads it; `None` of a router
    /// without one. What the heads contribute is that of the dense model: it is what the converted one
    /// should keep, while its own activations tell what the router will read.
    pub(super) fn fit_router(
        &mut self,
        layer: usize,
        projection: &[f32],
    ) -> Result<Option<RouterFit>, E> {
        let Some(sums) = &mut self.router_sums else { return Ok(None) };
        let elements = self.tokens.pass() * self.config.hidden_size;
        let weight: Array2<f32> = matrix(projection, self.config.query_width());
        let Streams { dense, calibrated, .. } = &self.streams;
        for (dense, x) in dense.chunks_exact(elements).zip(calibrated.chunks_exact(elements)) {
            self.block.project(dense)?;
            let outputs = self.block.attend()?;
            let norms = contributions(&outputs, weight.view(), self.config.num_attention_heads);
            self.block.project(x)?;
            sums.add(&self.block.normed()?, &norms)?;
        }
        let mut fit = sums.take().map_err(|error| error.in_layer(layer))?;
        self.options.round(&mut fit.rows);
        self.load(layer, None, Some(&fit))?;
        Ok(Some(fit))
    }

    /// Refits the output projection of a layer that the block has, `old`, and loads it; the new one, and the error that
    /// it leaves. `None` if projections stay.
    pub(super) fn refit(
        &mut self,
        layer: usize,
        products: &Products,
        old: ArrayView2<'_, f64>,
        router: Option<&RouterFit>,
    ) -> Result<Option<(Vec<f32>, f64)>, E> {
        if !self.options.refit {
            return Ok(None);
        }
        let fit = products.fit(old, RIDGE).map_err(|error| error.in_layer(layer))?;
        let mut new: Vec<f32> = fit.weight.iter().map(|&weight| weight as f32).collect();
        self.options.round(&mut new);
        self.load(layer, Some(&new), router)?;
        Ok(Some((new, fit.error)))
    }
}
