//! Preparation: text in any of its usual files becomes token files.

#[allow(dead_code)]
mod decode;
mod encode;
mod error;
#[allow(dead_code)]
mod fields;
#[allow(dead_code, unused_imports)]
mod reader;

pub use error::{Error, Place, Result};
pub use reader::Format;
#[doc(hidden)]
pub use reader::read_documents;
