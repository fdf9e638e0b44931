//! Locating models: a directory, or an id on the Hugging Face hub, downloaded to its cache.

mod client;
mod content;
mod environment;
mod error;
mod hub;

pub use error::Error;
pub use hub::{
    DownloadProgress, Hub, cached, commit_of, resolve, resolve_config, resolve_tokenizer,
};
