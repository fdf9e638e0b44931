//! What the stepper makes of a recipe.

use moh_model::AuxiliaryLosses;
use moh_recipe::{MohOptions, Recipe, Stage};
use moh_step::StepConfig;

/// The settings of the steps of `stage` of `recipe`.
pub fn step_config(recipe: &Recipe, stage: &Stage) -> StepConfig {
    let data = recipe.stage_data(stage);
    let tokens = stage.micro_batch * data.sequence_length;
    StepConfig {
        stage: stage.name.clone(),
        sequence_length: data.sequence_length,
        micro_batch: stage.micro_batch,
        micro_batches: stage.batch_tokens / tokens as u64,
        document_mask: data.document_mask,
        recompute: recipe.memory.recompute,
        auxiliary_weights: (stage.moh.as_ref())
            .map_or(AuxiliaryLosses::all(0.0), MohOptions::auxiliary_weights),
        distillation: stage.distillation(),
        optimizer: stage.optimizer,
        reduce: recipe.precision.reduce,
    }
}
