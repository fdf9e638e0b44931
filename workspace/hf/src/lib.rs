//! Hugging Face's formats: configuration files, weight files, model directories, and growing a
//! vocabulary to a larger tokenizer's.

pub mod config_file;
mod destination;
mod error;
mod front_matter;
mod generation_file;
pub mod model_card;
pub mod model_directory;
mod origin;
mod random_model;
mod read_back;
mod shard;
mod special_tokens;
mod spelling;
mod stored_model;
mod transformers_code;
pub mod vocabulary;
pub mod weight_files;

pub use config_file::ConfigFile;
pub use destination::check_destination;
pub use error::Error;
pub use generation_file::end_tokens;
pub use model_directory::{
    Contents, PendingModel, ReadBack, TensorSpec, Written, prepare_model, write_model,
};
pub use origin::{Base, Origin, is_hub_id, is_license_id, is_terms_file};
pub use random_model::write_random_model;
pub use special_tokens::SpecialTokens;
pub use stored_model::StoredModel;
pub use vocabulary::Expansion;
pub use weight_files::{TensorBytes, WeightFiles};
