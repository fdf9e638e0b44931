//! A token file that a command has copied documents to.

use std::path::Path;

use moh_data::TokenFileInfo;
use moh_program::counted;
use serde_json::{Value, json};

/// The file as a line.
pub fn line(prefix: &Path, info: &TokenFileInfo) -> String {
    let (documents, tokens) = (counted(info.documents, "document"), counted(info.tokens, "token"));
    format!("{}: {documents}, {tokens}", prefix.display())
}

/// The file, machine-readable.
pub fn to_json(prefix: &Path, info: &TokenFileInfo) -> Value {
    json!({
        "prefix": prefix, "documents": info.documents, "tokens": info.tokens, "dtype": info.dtype,
        "recorded": info,
    })
}
