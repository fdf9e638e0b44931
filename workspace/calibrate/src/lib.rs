//! Conversion by measurement: which heads of a layer are shared, and output projections refitted in closed
//! form, from a model's activations on some text.
//!
//! Layers are converted in order, each on the activations of the layers that are converted already:
//!
//! 1. The set of shared heads is the one with which the layer's attention output, computed by the heads
//!    that each token then computes and by the best output projection for them, is nearest to the dense
//!    layer's.
//! 2. The output projection W_O is refitted: with F the outputs of the computed heads in the converted
//!    model, and Y the dense model's residual stream after attention less the converted one's before it,
//!    the ridge least-squares solution of F W_O^T = Y nearest to the old W_O (module `ridge`).
//!
//! Before both, the matrix of a learned router is fitted. And before all, each layer's number of active heads can be
//! chosen by what other numbers cost in loss.
//!
//! A layer and the residual streams of the calibration tokens are in memory, nothing else of the model.
//! The same tokens give the same bits on a CPU, on any number of threads.

mod budget;
mod error;
mod head_grams;
mod layers;
mod products;
mod ridge;
mod router_fit;
mod search;
mod selection;
mod tokens;

pub use error::{Error, Result};
pub use layers::{
    Calibration, CalibrationOptions, Division, LayerCalibration, Losses, Shared, calibrate,
};
pub use products::CalibrationBuffers;
pub use router_fit::RouterFit;
pub use tokens::CalibrationTokens;

/// Lambda of the fits, in means of the diagonal of F^T F.
pub(crate) const RIDGE: f64 = 1e-3;

/// A matrix with `columns` columns of values row by row.
pub(crate) fn matrix<V: From<f32>>(values: &[f32], columns: usize) -> ndarray::Array2<V> {
    let shape = (values.len() / columns, columns);
    ndarray::Array2::from_shape_fn(shape, |(row, column)| values[row * columns + column].into())
}
