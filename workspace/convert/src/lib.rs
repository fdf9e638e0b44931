//! Conversion to Mixture-of-Head.

mod candle;
pub mod convert;
mod error;
pub mod verify;

pub use convert::{Attention, Options, Receipt, convert};
pub use error::Error;
pub use verify::{Independent, Verification, verify};
