//! The card of a converted model: the origin of the source, and its changes.

use std::path::Path;

use moh_hf::Origin;
use moh_model::ModelConfig;
use moh_train::model_card;

use crate::Error;
use crate::convert::ConversionOptions;

/// Where the output of a conversion comes from.
pub(crate) fn origin(
    options: &ConversionOptions,
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
    if !options.base_models.is_empty() {
        origin.bases = options.base_models.clone();
    }
    if let Some(id) = &options.license {
        origin.set_license(id);
    }
    origin.made.extend(conversion(source, output));
    Ok(origin)
}

/// The heads of every layer, in words.
fn heads(config: &ModelConfig) -> String {
    let first = config.layer_heads(0);
    match (1..config.num_hidden_layers).all(|layer| config.layer_heads(layer) == first) {
        true if config.routed_heads(0) == 0 => "all heads as shared ones".to_owned(),
        true => format!(
            "{} shared heads and {} of {} routed ones",
            first.shared.len(),
            first.top_k,
            config.routed_heads(0)
        ),
        false => "the heads of each layer".to_owned(),
    }
}

/// What a conversion has changed; nothing if it kept the attention and the vocabulary.
fn conversion(source: &ModelConfig, output: &ModelConfig) -> Vec<String> {
    let mut made = Vec::new();
    if source.moh != output.moh {
        made.push(format!(
            "`moh-convert` set {}, and trained nothing. With fewer heads than it was trained with, a model is worse \
             until it is tuned.",
            heads(output)
        ));
    }
    if source.vocab_size != output.vocab_size {
        made.push(format!(
            "`moh-convert` grew the vocabulary from {} to {} rows.",
            source.vocab_size, output.vocab_size
        ));
    }
    made
}
