//! Divides a token file as [`crate::prepare`] with a split divides the documents that it writes.

use std::path::Path;

use crate::{PreparedFile, Result, Split};

/// Writes the documents of the token file `input` to the token files `PREFIX-train` and `PREFIX-validation`,
/// which a preparation with this split would have written. `progress` gets the bytes of tokens that were
/// copied, and of all.
///
/// # Errors
/// Fails if the input is not a token file, if a part would have no document, if an output is the input, or
/// exists and may not be replaced, or if the disk is full. No output is left then.
pub fn split_token_file(
    split: Split,
    input: &Path,
    prefix: &Path,
    overwrite: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<PreparedFile>> {
    let prefixes = Split::prefixes(prefix);
    let part = |number| split.part(number) as usize;
    let infos = moh_data::divide(input, &prefixes, overwrite, &part, progress)?;
    let files = prefixes.into_iter().zip(infos);
    Ok(files.map(|(prefix, info)| PreparedFile { prefix, info }).collect())
}
