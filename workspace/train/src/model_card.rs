//! The model card of a run's model: its source's card, its stages and its losses.

use std::borrow::Cow;
use std::fmt::Write;
use std::path::Path;

use moh_checkpoint::run_log::{Evaluation, EvaluationPoint, StageCalibration};
use moh_checkpoint::{RunDirectory, RunState, steps_at};
use moh_data::Source;
use moh_files::units::group_digits;
use moh_hf::ModelCard;
use moh_recipe::{AttentionKind, DistillOptions, Recipe, Stage};

use crate::Result;

/// Describes the model of a run after `step` steps.
pub fn of_run(run: &RunDirectory, step: u64) -> Result<ModelCard> {
    let recipe = run.stored_recipe()?;
    let stored = run.stored(step)?;
    Ok(trained(&of_kept(&recipe, &run.model())?, &recipe, &stored.manifest().state))
}

/// Describes the model that `recipe` starts from, by the files that a run keeps in the directory `kept`.
pub(crate) fn of_kept(recipe: &Recipe, kept: &Path) -> Result<ModelCard> {
    Ok(match &recipe.model.from {
        Some(from) => ModelCard::of_source(Path::new(from), kept)?,
        None => ModelCard::default(),
    })
}

pub(crate) fn trained(source: &ModelCard, recipe: &Recipe, state: &RunState) -> ModelCard {
    let mut card = source.clone();
    if state.step > 0 {
        let begun = recipe.stages.len().min(state.stage + usize::from(state.stage_step > 0));
        let stages = recipe.stages[..begun].iter();
        let mut lengths: Vec<usize> =
            stages.map(|stage| recipe.stage_data(stage).sequence_length).collect();
        lengths.dedup();
        let lengths = lengths.into_iter().map(|length| group_digits(length as u64));
        card.made.push(format!(
            "`moh-train` trained it on {} tokens in {} steps, on sequences of {} tokens:",
            group_digits(state.tokens),
            group_digits(state.step),
            lengths.collect::<Vec<_>>().join(" and then ")
        ));
        card.made.push(self::stages(recipe, state));
        card.made.extend(recipe.stages[..begun].iter().filter_map(teacher));
        card.made.extend(state.calibrations.iter().map(calibration));
    }
    if !state.evaluations.is_empty() {
        card.made.push("Losses on held-out text, in nats per token and bits per byte:".to_owned());
        card.made.push(losses(&state.evaluations));
    }
    card
}

/// Describes a calibration.
fn calibration(found: &StageCalibration) -> String {
    let StageCalibration { stage, tokens, held_out_tokens, loss_dense, loss, refit, .. } = found;
    let refitted = match refit {
        true => {
            ", and its output projections were refitted to the heads that tokens compute: with all heads active this \
             is another model"
        }
        false => "",
    };
    let held_out = match held_out_tokens {
        // Earlier versions measured the loss on all tokens.
        0 => " On these tokens".to_owned(),
        tokens => format!(" On {} of them, which nothing was fitted to,", group_digits(*tokens)),
    };
    let fitted = match found.has_fitted_router() {
        true => " The router's matrices were fitted to what the heads contribute.",
        false => "",
    };
    format!(
        "Before stage {stage} the heads were measured on {} tokens of its training data{refitted}.{fitted}{held_out} \
         the loss was then {loss:.4}; it was {loss_dense:.4} of the dense model.",
        group_digits(*tokens)
    )
}

/// Describes a stage's teacher, if it has one.
fn teacher(stage: &Stage) -> Option<String> {
    let options = stage.distill.as_ref()?;
    let DistillOptions { teacher, weight, cross_entropy, temperature, .. } = options;
    let teacher = match options.is_start() {
        true => "the model as it was loaded".to_owned(),
        false => format!("`{}`", file_name(Path::new(teacher))),
    };
    Some(format!(
        "Stage {} learned the distribution of a teacher, {teacher}: {weight} x its KL divergence at temperature \
         {temperature} + {cross_entropy} x the cross-entropy.",
        stage.name
    ))
}

/// Returns the token files of a stage, with their weights if there are several.
fn text(sources: &[Source]) -> String {
    let of_source = |Source { path, weight }: &Source| match sources.len() {
        1 => format!("`{}`", file_name(path)),
        _ => format!("`{}` x {weight}", file_name(path)),
    };
    sources.iter().map(of_source).collect::<Vec<_>>().join(", ")
}

fn file_name(path: &Path) -> Cow<'_, str> {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy()
}

/// Returns a table of the stages, with the tokens of each so far.
fn stages(recipe: &Recipe, state: &RunState) -> String {
    let mut table = "| stage | attention | text | tokens | tokens of a step | learning rate |\n\
                     |---|---|---|---|---|---|"
        .to_owned();
    for (index, stage) in recipe.stages.iter().enumerate().take(state.stage + 1) {
        let steps = match index < state.stage {
            true => steps_at(stage, &state.growth, state.step),
            false => state.stage_step,
        };
        if steps == 0 {
            continue;
        }
        let Stage { name, batch_tokens, learning_rate, .. } = stage;
        let attention = match stage.attention {
            AttentionKind::Dense => "dense",
            AttentionKind::Moh => "Mixture-of-Head",
        };
        // Writing to a string cannot fail.
        let _ = write!(
            table,
            "\n| {name} | {attention} | {} | {} | {} | {:e} to {:e} |",
            text(recipe.stage_data(stage).sources),
            group_digits(steps.saturating_mul(*batch_tokens)),
            group_digits(*batch_tokens),
            learning_rate.max,
            learning_rate.min
        );
    }
    table
}

fn losses(evaluations: &[Evaluation]) -> String {
    let mut table = "| | loss | bits per byte |\n|---|---|---|".to_owned();
    for evaluation in evaluations {
        let Evaluation { moment, step, loss, bits_per_byte, .. } = evaluation;
        let set = evaluation.set_among(evaluations).map_or(String::new(), |set| format!(", {set}"));
        let moment = match moment {
            EvaluationPoint::Loaded => "as loaded".to_owned(),
            EvaluationPoint::Converted { active_heads, .. } => {
                format!("converted, {active_heads} heads active, not tuned")
            }
            EvaluationPoint::Trained { stage } if evaluation.is_repeated(evaluations) => {
                format!("after stage {stage}, step {step}")
            }
            EvaluationPoint::Trained { stage } => format!("after stage {stage}"),
        };
        let bits = bits_per_byte.map_or(String::new(), |bits| format!("{bits:.4}"));
        // Writing to a string cannot fail.
        let _ = write!(table, "\n| {moment}{set} | {loss:.4} | {bits} |");
    }
    table
}
