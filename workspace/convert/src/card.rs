//! The card of a converted model: the content of its source's card, and the changes by the conversion.

use indicatif::HumanCount;
use moh_hf::ModelCard;
use moh_train::model_card;

use crate::convert::Plan;
use crate::{CalibrationReceipt, Error};

pub(crate) fn card(plan: &Plan<'_>) -> Result<ModelCard, Error> {
    let Plan { options, config: output, .. } = plan;
    let source = &plan.source.file.config;
    let mut card = match &options.checkpoint {
        Some(checkpoint) => model_card::of_run(&checkpoint.run, checkpoint.step)?,
        None => ModelCard::of_source(&options.source, &options.source)?,
    };
    if !options.base_models.is_empty() {
        card.base_models.clone_from(&options.base_models);
    }
    if let Some(id) = &options.license {
        card.set_license(id);
    }
    if output.moh.is_none() && source.moh.is_some() {
        card.made.push(
            "`moh-convert` made every head serve every token, and trained nothing.".to_owned(),
        );
    } else if source.moh != output.moh {
        card.made.push(
            "`moh-convert` set the heads of each layer, and trained nothing. With fewer heads than it was trained \
             with, a model is worse until it is tuned."
                .to_owned(),
        );
    }
    if plan.is_source_refitted() {
        card.made.push(
            "The source's output projections were refitted to the heads that tokens compute: with all heads active \
             it is not the dense model that it was converted from."
                .to_owned(),
        );
    }
    if source.vocab_size != output.vocab_size {
        card.made.push(format!(
            "`moh-convert` grew the vocabulary from {} to {} rows.",
            source.vocab_size, output.vocab_size
        ));
    }
    let receipt = options.calibrated.as_ref().map(|calibrated| calibrated.receipt());
    card.made.extend(receipt.as_ref().map(measured));
    Ok(card)
}

fn measured(receipt: &CalibrationReceipt) -> String {
    let CalibrationReceipt { texts, tokens, held_out_tokens, loss_dense, loss, refit, .. } =
        receipt;
    let [tokens, held_out] = [*tokens, *held_out_tokens].map(|tokens| HumanCount(tokens as u64));
    let names: Vec<String> = texts.iter().map(|text| format!("`{}`", text.text)).collect();
    let names = names.join(" and ");
    let by_text = texts.iter().filter_map(|text| {
        Some(format!(" Of `{}`: {:.4} and {:.4}.", text.text, text.loss?, text.loss_dense?))
    });
    let by_text: String = by_text.collect();
    let refitted = match refit {
        true => {
            " and refitted the output projections to the heads that tokens compute: with all heads active this is \
             not the source's model"
        }
        false => "",
    };
    format!(
        "`moh-convert` measured the heads on {tokens} tokens of {names}{refitted}. On {held_out} of them, which nothing \
         was fitted to, the loss is {loss:.4}; it is {loss_dense:.4} of the dense model.{by_text}"
    )
}
