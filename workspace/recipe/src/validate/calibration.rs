//! The limits of `moh.calibration`: the stages that it can measure, and the stages that keep its choices.

use moh_model::{ModelConfig, RouterKind};
use serde_json::json;

use super::{Faults, MAX_TOKENS, stage_key};
use crate::{AttentionKind, Recipe, Stage};

/// Checks the options of a stage's calibration, as far as they do not depend on the model.
pub(super) fn check(faults: &mut Faults, stage: &Stage) {
    let key = |rest: &str| stage_key(stage, &format!("moh.calibration{rest}"));
    let Some(calibration) = stage.calibration() else { return };
    faults.within(&key(".tokens"), calibration.tokens, MAX_TOKENS);
    faults.within(&key(".search_tokens"), calibration.search_tokens as u64, MAX_TOKENS);
    if !faults.is_complete(&stage_key(stage, "moh")) {
        return;
    }
    let has_ids = stage.moh.as_ref().is_some_and(|moh| moh.shared_head_ids.is_some());
    if has_ids && calibration.chooses_heads() {
        let reason =
            "chooses the heads that shared_head_ids names: leave these out, or set it to \"given\"";
        faults.check(false, &key(".shared"), json!(calibration.shared), reason);
    }
    let fits = stage.moh.as_ref().and_then(|moh| moh.router).is_some_and(RouterKind::has_matrices);
    if !calibration.chooses_heads() && !calibration.refit && !fits {
        let reason = "changes nothing with shared = \"given\" and refit = false: leave it out";
        faults.add(&key(""), reason);
    }
}

/// Checks that a calibrated stage converts a dense model, with enough tokens for a fit.
pub(super) fn check_model(faults: &mut Faults, recipe: &Recipe, index: usize, model: &ModelConfig) {
    let stage = &recipe.stages[index];
    let key = |rest: &str| stage_key(stage, &format!("moh.calibration{rest}"));
    let Some(calibration) = stage.calibration() else { return };
    let converted = match index.checked_sub(1).map(|before| &recipe.stages[before]) {
        None => model.moh.as_ref().map(|_| "the run's model".to_owned()),
        Some(before) if before.attention == AttentionKind::Dense => None,
        Some(before) => Some(format!("the model of stage {}", before.name)),
    };
    if let Some(converted) = converted {
        let reason = format!(
            "{converted} is a Mixture-of-Head model already, and only a dense one is measured: leave it out"
        );
        faults.add(&key(""), reason);
    }
    let (length, width) = (recipe.stage_data(stage).sequence_length, model.query_width() as u64);
    // At least two thirds of the sequences are fitted to, and one is not.
    let least = (width + width.div_ceil(2)).div_ceil((length as u64).max(1)).max(3);
    let reason = format!(
        "must be at least {}: 3 sequences of {length} tokens, and 1.5 times as many tokens as all query heads are wide",
        least.saturating_mul(length as u64)
    );
    // No tokens at all are a fault already.
    let is_known = calibration.tokens > 0 && faults.is_known(&stage.data_key("sequence_length"));
    let fits = calibration.sequences(length) >= least;
    faults.check(fits || !is_known, &key(".tokens"), calibration.tokens, reason);
}

/// Checks that a stage after a calibrated stage can keep the calibrated heads, or names other heads.
pub(super) fn check_kept_heads(
    faults: &mut Faults,
    recipe: &Recipe,
    index: usize,
    model: &ModelConfig,
) {
    let stage = &recipe.stages[index];
    let calibrated = recipe.calibrated_stage(index).filter(|of| of.name != stage.name);
    let Some(calibrated) = calibrated else { return };
    let numbers = calibrated.calibration().is_some_and(|of| of.chooses_numbers());
    let heads = |stage: &Stage| {
        let moh = stage.moh_config(model).ok().flatten();
        moh.map(|moh| (moh.router, moh.shared_heads.counts(), numbers.then_some(moh.routed_top_k)))
    };
    // Heads that do not fit the model are a fault already.
    if let (Some(own), Some(kept)) = (heads(stage), heads(calibrated))
        && own != kept
    {
        let number = if numbers { "numbers of heads" } else { "number of shared heads" };
        let reason = format!(
            "the stage keeps the heads that stage {} calibrates, and so its router and its {number}: give these, or \
             other heads by shared_head_ids",
            calibrated.name
        );
        faults.add(&stage_key(stage, "moh"), reason);
    }
}
