//! Hugging Face's formats: configuration files, weight files and model directories. Models on the hub, and in its
//! cache.
//!
//! [`StoredModel`] opens a directory, checks and maps its files, and loads the model to a
//! device. This example writes a random Mixture-of-Head model and loads it:
//!
//! ```
//! use std::path::Path;
//!
//! use moh_hf::{ConfigFile, Error, StoredModel, write_random_model};
//! use moh_kernels::{Cpu, DType, ElementType};
//!
//! # fn main() -> Result<(), Error> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let out = folder.path().join("model");
//! let fields = serde_json::json!({
//!     "model_type": "moh_llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64,
//!     "num_hidden_layers": 2, "num_attention_heads": 4, "moh_shared_heads": 1,
//!     "moh_routed_top_k": 1, "moh_router": "query-norm",
//! });
//! let file = ConfigFile::from_value(fields, Path::new("config.json"))?;
//! write_random_model(&out, &file, DType::BF16, u64::MAX, 1)?;
//!
//! let mut model = StoredModel::open(&out)?.load(Cpu, ElementType::F32, 16)?;
//! let output = model.run(&[vec![5, 17, 42]])?;
//! assert_eq!(output.active_heads(0, 0, 2).len(), 2);
//! # Ok(())
//! # }
//! ```

pub mod config_file;
mod destination;
mod error;
mod generation_file;
#[cfg(feature = "hub")]
pub mod hub;
pub mod hub_cache;
pub mod model_card;
pub mod model_directory;
mod other_formats;
mod stored_model;
mod transformers_code;
pub mod weight_files;

pub use config_file::ConfigFile;
pub use destination::check_destination;
pub use error::Error;
pub use generation_file::end_tokens;
pub use model_card::{ModelCard, is_base_model, is_hub_id, is_license_id, is_terms_file};
pub use model_directory::{
    Contents, PendingModel, TensorSpec, Written, prepare_model, write_model, write_random_model,
};
pub use stored_model::StoredModel;
pub use weight_files::{TensorBytes, WeightFiles};
