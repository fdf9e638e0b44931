//! Locates models: a directory, or an id on the Hugging Face hub, downloaded to the hub's cache. Also datasets of the
//! hub and their files.

mod cache;
mod client;
mod dataset;
mod environment;
mod model;
mod repository;

pub use cache::RemoteFile;
pub use dataset::Dataset;
pub use model::{FileSet, Hub};

/// Reads a page of the hub's listing of a repository, for tests with hostile input.
#[doc(hidden)]
pub fn read_listing(page: &[u8]) -> Result<Vec<RemoteFile>, String> {
    let mut found = Vec::new();
    client::add_page(&mut found, page).map(|()| found)
}
