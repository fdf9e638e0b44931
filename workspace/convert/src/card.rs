//! What the card of a converted model says: where the source comes from, and what became of it.

use std::path::Path;

use moh_hf::Origin;
use moh_model::ModelConfig;
use moh_train::model_card;

use crate::Error;
use crate::convert::Options;

/// Where the output of a conversion comes from.
pub(crate) fn origin(
    options: &Options,
    source: &ModelConfig,
    output: &ModelConfig,
) -> Result<Origin, Error> {
    let mut origin = match &options.checkpoint {
        Some(checkpoint) => model_card::of_run(&checkpoint.run, checkpoint.step)?,
        None => {
            let directory: &Path = &options.source;
            let name =
                options.name.clone().unwrap_or_else(|| directory.to_string_lossy().into_owned());
            Origin::read(Some(&name), directory)?
        }
    };
    origin.made.extend(conversion(source, output));
    Ok(origin)
}

/// What a conversion has changed; nothing if it kept the attention and the vocabulary.
fn conversion(source: &ModelConfig, output: &ModelConfig) -> Vec<String> {
    let mut made = Vec::new();
    if source.moh != output.moh {
        made.push(
            "`moh-convert` gave it these heads and trained nothing: until it is tuned, it is worse than the model \
             before."
                .to_owned(),
        );
    }
    if source.vocab_size != output.vocab_size {
        made.push(format!(
            "`moh-convert` grew the vocabulary from {} to {} rows.",
            source.vocab_size, output.vocab_size
        ));
    }
    made
}
