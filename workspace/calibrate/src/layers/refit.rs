//! Fits a layer's output projection and its router's matrix, and loads the layer's tensors into the block: the source's,
//! and those that a calibration computes.

use moh_kernels::Backend;
use moh_model::tensors::{OUTPUT_PROJECTION, ROUTER, ROUTER_STAGES, in_layer, layer_and_name};
use ndarray::{Array2, ArrayView2};

use super::{Job, Measured};
use crate::router_fit::{RouterFit, contributions};
use crate::{Error, Result, matrix};

/// A new output projection.
pub(super) struct Refit {
    /// `[hidden_size, heads * head_dim]`.
    pub projection: Vec<f32>,
    /// Lambda of the fit, in means of the diagonal of F^T F.
    pub ridge: f64,
    /// |Y - F W_O^T|^2 / |Y|^2 on the held-out tokens.
    pub error: f64,
}

impl<B: Backend + Clone, E: From<Error> + From<moh_model::Error>> Job<'_, B, E> {
    /// Loads a layer of the source into the block, and returns its output projection.
    pub(super) fn load_source(&mut self, layer: usize) -> Result<Vec<f32>, E> {
        let mut projection = vec![0f32; self.config.hidden_size * self.config.query_width()];
        (self.weights)(&in_layer(layer, OUTPUT_PROJECTION), &mut projection)?;
        self.load(layer, None, None)?;
        Ok(projection)
    }

    /// Loads a layer into the block. `projection` replaces the source's output projection, and `router` is the matrix
    /// of a learned router, zeros without it.
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

    /// Fits the router's matrix to the source's layer in the block, and loads it. Returns `None` if the router has no
    /// matrix. The heads' contributions are the dense model's, which the converted model should keep. The inputs are
    /// the converted model's activations, which the router will read.
    pub(super) fn fit_router(
        &mut self,
        layer: usize,
        projection: &[f32],
    ) -> Result<Option<RouterFit>, E> {
        let Some(sums) = &mut self.router_sums else { return Ok(None) };
        let weight: Array2<f32> = matrix(projection, self.config.query_width());
        for pass in self.tokens.passes.fitted() {
            let stream = self.tokens.passes.elements(pass, self.config.hidden_size);
            self.block.project(&self.streams.dense[stream.clone()])?;
            let outputs = self.block.attend()?;
            let norms = contributions(&outputs, weight.view(), self.config.num_attention_heads);
            self.block.project(&self.streams.calibrated[stream])?;
            sums.add(&self.block.normed()?, &norms)?;
        }
        let mut fit = sums.take().map_err(|error| error.in_layer(layer))?;
        self.options.round(&mut fit.rows);
        self.load(layer, None, Some(&fit))?;
        Ok(Some(fit))
    }

    /// Refits the output projection `old` of the layer in the block, and loads it. Returns `None` if projections are
    /// not refitted.
    pub(super) fn refit(
        &mut self,
        layer: usize,
        measured: Measured,
        old: ArrayView2<'_, f64>,
        router: Option<&RouterFit>,
    ) -> Result<Option<Refit>, E> {
        if !self.options.refit {
            return Ok(None);
        }
        let Measured { fit, ridge: others, held_out } = measured;
        let fit = || {
            let ridge = fit.best_ridge(old, &others)?;
            Ok((fit.and(&others).fit(old, ridge)?, ridge))
        };
        let (fitted, ridge) = fit().map_err(|error: Error| error.in_layer(layer))?;
        let mut new: Vec<f32> = fitted.iter().map(|&weight| weight as f32).collect();
        self.options.round(&mut new);
        self.load(layer, Some(&new), router)?;
        let error = held_out.error(matrix(&new, self.config.query_width()).view());
        Ok(Some(Refit { projection: new, ridge, error }))
    }
}
