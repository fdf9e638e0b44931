//! Conversion by measurement: chooses the shared heads of each layer, and refits output projections in closed form,
//! from a model's activations on some text. `docs/design.md` has the steps and their formulas.
//!
//! Only one layer of the model and the residual streams of the calibration tokens are in memory. The same tokens give
//! the same bits on a CPU, on any number of threads.

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
    Calibration, CalibrationOptions, FoundLayer, LayerCalibration, LayerStore, Losses, Watch,
    calibrate,
};
pub use products::CalibrationBuffers;
pub use router_fit::RouterFit;
pub use search::{FITS as MOST_FITS, judged_outputs};
pub use tokens::{CalibrationPasses, CalibrationTokens};

/// Lambda of a router's fit, in means of the diagonal of F^T F.
pub(crate) const RIDGE: f64 = 1e-3;

pub(crate) fn matrix<V: From<f32>>(values: &[f32], columns: usize) -> ndarray::Array2<V> {
    let shape = (values.len() / columns, columns);
    ndarray::Array2::from_shape_fn(shape, |(row, column)| values[row * columns + column].into())
}
