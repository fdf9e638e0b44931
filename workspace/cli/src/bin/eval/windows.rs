//! The windows of token files, on which models are measured.

use std::path::Path;

use moh_data::{TokenFile, Windows};
use moh_program::models::NamedModel;
use moh_program::{counted, exit};

/// Default tokens of a window, unless a model's context is shorter.
const DEFAULT_LENGTH: usize = 2048;

/// Returns the windows of a token file for a model.
pub(crate) fn windows(
    model: &NamedModel,
    prefix: &Path,
    length: usize,
    allow_other_tokenizer: bool,
) -> anyhow::Result<Windows> {
    let mut file = TokenFile::open(prefix)?;
    file.limit_vocabulary(model.config.vocab_size);
    if let Some(tokenizer) = model.tokenizer()? {
        let found = tokenizer.check_file(&file, allow_other_tokenizer)?;
        if let Some(remark) = found.remark() {
            let (path, data) = (tokenizer.path().display(), prefix.display());
            exit::stderr_line(format_args!("note: {path}: {remark}: {data}"));
        }
    }
    Windows::new(file, length).map_err(|error| error.with_length("--sequence-length").into())
}

/// Returns the given window length, or the default. Rejects lengths that a model does not support.
pub(crate) fn window_length(models: &[NamedModel], given: Option<usize>) -> anyhow::Result<usize> {
    let context = shortest_context(models);
    let length = given.unwrap_or(context.min(DEFAULT_LENGTH));
    if !(2..=context).contains(&length) {
        let message = format!(
            "--sequence-length {length}: must be 2 to {context}, the model's context length"
        );
        return Err(exit::Usage(message).into());
    }
    Ok(length)
}

fn shortest_context(models: &[NamedModel]) -> usize {
    let contexts = models.iter().map(|model| model.config.max_position_embeddings);
    contexts.min().unwrap_or(DEFAULT_LENGTH)
}

/// Prints a remark on the default length.
pub(crate) fn say_length(length: usize, models: &[NamedModel]) {
    let why = match shortest_context(models) {
        context if length < context => format!("of the model's context of {context}"),
        _ => "the model's context".to_owned(),
    };
    let tokens = counted(length as u64, "token");
    exit::stderr_line(format_args!("windows of {tokens}, {why}; --sequence-length changes that"));
}
