//! Conversion to Mixture-of-Head.

pub mod calibrated;
mod candle;
mod card;
pub mod convert;
mod error;
mod read_ahead;
mod receipt;
mod source;
mod spelling;
pub mod verify;
mod vocabulary;
mod weights;

pub use calibrated::{Calibrated, CalibrationReceipt, TextReceipt, beside};
pub use convert::{Conversion, ConversionOptions, TargetAttention, convert};
pub use error::Error;
pub use receipt::{Receipt, TensorReceipt};
pub use verify::Verification;
pub use weights::Rounding;
