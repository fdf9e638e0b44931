//! Hub download, conversion to Mixture-of-Head, vocabulary expansion and export.

pub mod convert;
mod error;
pub mod hf_directory;
pub mod hub;
pub mod random_model;
mod spelling;
pub mod verify;
pub mod vocabulary;

pub use convert::{Attention, Options, Receipt, convert};
pub use error::Error;
pub use hf_directory::{Model, TensorSpec, Written, write_model};
pub use hub::resolve;
pub use random_model::write_random_model;
pub use verify::{Verification, verify};
pub use vocabulary::Expansion;
