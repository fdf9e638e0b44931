//! The card of a converted model: the origin of the source, and its changes.

use std::path::Path;

use indicatif::HumanCount;
use moh_hf::Origin;
use moh_model::ModelConfig;
use moh_train::model_card;

use crate::convert::ConversionOptions;
use crate::{CalibrationReceipt, Error};

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
    origin
        .made
        .extend(options.calibrated.as_ref().map(|calibrated| measured(&calibrated.receipt())));
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

/// What a measurement has chosen.
fn measured(receipt: &CalibrationReceipt) -> String {
    let CalibrationReceipt { text, tokens, loss_dense, loss_given, loss, refit, .. } = receipt;
    let tokens = HumanCount(*tokens as u64);
    let refitted = match refit {
        true => {
            " and refitted the output projections to the heads that tokens compute: with all heads active this is \
             not the source's model"
        }
        false => "",
    };
    format!(
        "`moh-convert` measured the heads on {tokens} tokens of `{text}`{refitted}. On these tokens the loss is \
         {loss:.4}; it is {loss_dense:.4} of the dense model, and {loss_given:.4} of as many heads without the \
         measurement."
    )
}

/// What a conversion has changed; nothing if it kept the attention and the vocabulary.
fn conversion(source: &ModelConfig, output: &ModelConfig) -> Vec<String> {
    let mut made = Vec::new();
    if output.moh.is_none() && source.moh.is_some() {
        made.push(
            "`moh-convert` made every head serve every token, and trained nothing.".to_owned(),
        );
    } else if source.moh != output.moh {
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
