//! Measurements of a run when a stage converts its model: `moh.calibration` of a recipe.

use moh_step::finite_or_nan;
use serde::{Deserialize, Serialize};

/// The calibration of a stage's conversion.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StageCalibration {
    /// The stage's name.
    pub stage: String,
    /// Steps done before the stage, over all stages.
    pub step: u64,
    /// Calibration tokens.
    pub tokens: u64,
    /// Calibration tokens that no fit used. 0 in logs of versions that fitted to all tokens.
    #[serde(default)]
    pub held_out_tokens: u64,
    /// Mean cross-entropy of the dense model over the held-out tokens, in nats. Null in JSON if it is not finite.
    #[serde(deserialize_with = "finite_or_nan")]
    pub loss_dense: f64,
    /// The same of the model with which the stage begins.
    #[serde(deserialize_with = "finite_or_nan")]
    pub loss: f64,
    /// Whether the output projections are refitted.
    pub refit: bool,
    /// Each layer, in order.
    pub layers: Vec<CalibratedLayer>,
}

impl StageCalibration {
    /// Returns whether the matrices of a learned router were fitted.
    pub fn has_fitted_router(&self) -> bool {
        self.layers.iter().any(|layer| layer.router_explained.is_some())
    }
}

/// The choices of a calibration for a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CalibratedLayer {
    /// The shared heads, ascending.
    pub shared_heads: Vec<usize>,
    /// Routed heads that a token selects.
    pub routed_top_k: usize,
    /// The relative squared error of the attention output with the dense model's output projection.
    #[serde(deserialize_with = "finite_or_nan")]
    pub error_before: f64,
    /// The same error with the refitted projection, if it is refitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<f64>,
    /// The ridge of the refit, in means of the diagonal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ridge: Option<f64>,
    /// The share of the heads' contributions, except each token's mean, that the fit of a learned router explains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub router_explained: Option<f64>,
}
