//! The limits of a stage's keys.

use std::path::Path;

use moh_kernels::ElementType;
use moh_step::{GroupFactors, Hyperparameters};

use super::{BOTH_SHARED, Faults, MAX_TOKENS, calibration, stage_key};
use crate::{DistillOptions, LearningRateOptions, ModelOptions, ParallelOptions, Recipe, Stage};

/// Highest temperature: both distributions are then nearly uniform, and its square is a weight.
const MAX_TEMPERATURE: f64 = 100.0;
/// Largest factor of a group's learning rate.
const MAX_FACTOR: f64 = 1e4;

/// Checks a stage alone, without its data.
pub(super) fn check(faults: &mut Faults, recipe: &Recipe, stage: &Stage) {
    let key = |rest: &str| stage_key(stage, rest);
    faults.within(&key("tokens"), stage.tokens, MAX_TOKENS);
    faults.within(&key("batch_tokens"), stage.batch_tokens, MAX_TOKENS);
    faults.at_least_one(&key("micro_batch"), stage.micro_batch as u64);
    check_learning_rate(faults, stage);
    check_optimizer(faults, stage);
    check_parallel(faults, stage.parallel, &key("parallel"));
    check_routing(faults, stage);
    calibration::check(faults, stage);
    check_distill(faults, stage, &recipe.model);
    check_moments(faults, stage, recipe.precision.moments);
}

fn check_learning_rate(faults: &mut Faults, stage: &Stage) {
    let key = |rest: &str| stage_key(stage, rest);
    let LearningRateOptions { max, min, warmup_steps, decay, decay_steps } = stage.learning_rate;
    let positive = faults.positive(&key("learning_rate.max"), max);
    let reason = format!("must be a number from 0 to max = {max}");
    let bounded = positive && faults.is_known(&key("learning_rate.max"));
    let fine = min >= 0.0 && (min <= max || !bounded) && min.is_finite();
    faults.check(fine, &key("learning_rate.min"), min, reason);
    let steps = stage.num_steps();
    // A stage without tokens or batches is refused above.
    if steps > 0 && faults.is_known(&key("tokens")) && faults.is_known(&key("batch_tokens")) {
        faults.check(
            warmup_steps <= steps,
            &key("learning_rate.warmup_steps"),
            warmup_steps,
            format!(
                "must be at most the stage's {steps} steps (tokens / batch_tokens, rounded up)"
            ),
        );
        if let Some(decay_steps) = decay_steps {
            let most = steps.saturating_sub(warmup_steps);
            let reason = format!("must be from 1 to {most}, the stage's steps after the warm-up");
            let fine = (1..=most).contains(&decay_steps);
            faults.check(fine, &key("learning_rate.decay_steps"), decay_steps, reason);
        }
    }
    if let Some(decay_steps) = decay_steps {
        let reason = "is for decays that end: cosine, linear and sqrt; leave it out";
        faults.check(decay.has_end(), &key("learning_rate.decay_steps"), decay_steps, reason);
    }
}

fn check_optimizer(faults: &mut Faults, stage: &Stage) {
    let key = |rest: &str| stage_key(stage, rest);
    let Hyperparameters { beta1, beta2, eps, weight_decay, clip_norm, groups } = stage.optimizer;
    for (rest, beta) in [("beta1", beta1), ("beta2", beta2)] {
        let reason = "must be a number from 0 to below 1";
        let fine = (0.0..1.0).contains(&beta);
        faults.check(fine, &key(&format!("optimizer.{rest}")), beta, reason);
    }
    for (rest, value) in [("eps", eps), ("clip_norm", clip_norm)] {
        faults.positive(&key(&format!("optimizer.{rest}")), value);
    }
    faults.not_negative(&key("optimizer.weight_decay"), weight_decay);
    let GroupFactors { attention, router, rest } = groups;
    for (rest, factor) in [("attention", attention), ("router", router), ("rest", rest)] {
        let reason = format!("must be a number from 0, which freezes the group, to {MAX_FACTOR}");
        let fine = (0.0..=MAX_FACTOR).contains(&factor);
        faults.check(fine, &key(&format!("optimizer.groups.{rest}")), factor, reason);
    }
    if [attention, router, rest] == [0.0; 3] && faults.is_complete(&key("optimizer")) {
        faults.add(&key("optimizer.groups"), "freezes all groups: leave one to train");
    }
}

fn check_routing(faults: &mut Faults, stage: &Stage) {
    let Some(moh) = &stage.moh else { return };
    let one = moh.shared_heads.is_none() || moh.shared_head_ids.is_none();
    faults.check(one, &stage_key(stage, "moh.shared_head_ids"), "[..]", BOTH_SHARED);
    for (loss, weight) in moh.auxiliary_weights().iter() {
        faults.not_negative(&stage_key(stage, &format!("moh.{}_weight", loss.name())), weight);
    }
}

/// Checks a stage's teacher, and the weights and temperature of its loss.
fn check_distill(faults: &mut Faults, stage: &Stage, model: &ModelOptions) {
    let Some(distill) = &stage.distill else { return };
    let key = |rest: &str| stage_key(stage, &format!("distill.{rest}"));
    let &DistillOptions { weight, cross_entropy, temperature, .. } = distill;
    faults.path(&key("teacher"), Path::new(&distill.teacher));
    let is_new = model.new.is_some() && faults.is_known("model.new");
    if distill.is_start() && is_new && faults.is_known(&key("teacher")) {
        let reason =
            "is a new model, which has learned nothing: name a model directory or RUN@STEP";
        faults.check(false, &key("teacher"), "\"start\"", reason);
    }
    faults.positive(&key("weight"), weight);
    faults.not_negative(&key("cross_entropy"), cross_entropy);
    let fine = temperature > 0.0 && temperature <= MAX_TEMPERATURE;
    let reason = format!("must be a number above 0, at most {MAX_TEMPERATURE}");
    faults.check(fine, &key("temperature"), temperature, reason);
}

/// Rejects second moments that rounding would freeze. A step decays a moment by at most the fraction 1 - beta2.
/// Neighbouring bf16 values differ by at least 1/256, so above 0.99 most of the decay is rounded away.
fn check_moments(faults: &mut Faults, stage: &Stage, moments: ElementType) {
    const MAX_BETA2: f64 = 0.99;
    let key = stage_key(stage, "optimizer.beta2");
    let beta2 = stage.optimizer.beta2;
    let rounds = moments == ElementType::BF16 && faults.is_known("precision.moments");
    if rounds && beta2 > MAX_BETA2 && beta2 < 1.0 {
        let reason = format!(
            "must be at most {MAX_BETA2} with precision.moments = \"bf16\", whose rounding keeps second \
             moments from following smaller gradients: use \"f32\" or a lower beta2"
        );
        faults.check(false, &key, beta2, reason);
    }
}

/// Checks the numbers of ranks. Virtual stages require a pipeline.
fn check_parallel(faults: &mut Faults, parallel: ParallelOptions, key: &str) {
    let ParallelOptions { tensor, pipeline, virtual_stages } = parallel;
    for (rest, value) in
        [("tensor", tensor), ("pipeline", pipeline), ("virtual_stages", virtual_stages)]
    {
        faults.at_least_one(&format!("{key}.{rest}"), value as u64);
    }
    faults.check(
        virtual_stages <= 1 || pipeline != 1 || !faults.is_known(&format!("{key}.pipeline")),
        &format!("{key}.virtual_stages"),
        virtual_stages,
        "needs a pipeline: set parallel.pipeline to 2 or more, or leave it out",
    );
}

/// Checks that a batch consists of whole micro-batches.
pub(super) fn check_batch(faults: &mut Faults, stage: &Stage, sequence_length: usize) {
    let Stage { batch_tokens, micro_batch, .. } = *stage;
    if !faults.is_known(&stage_key(stage, "micro_batch")) {
        return;
    }
    let unit = (sequence_length as u64).checked_mul(micro_batch as u64);
    let described = format!(
        "sequence_length x micro_batch = {sequence_length} x {micro_batch} = {}",
        unit.map_or("too large".to_string(), |unit| unit.to_string())
    );
    let reason = match unit {
        Some(0) => return,
        Some(unit) if batch_tokens.is_multiple_of(unit) => return,
        Some(unit) if unit <= MAX_TOKENS && batch_tokens <= MAX_TOKENS => {
            let below = batch_tokens / unit * unit;
            let above = below + unit;
            let nearest = match below {
                0 => above.to_string(),
                below => format!("{below} and {above}"),
            };
            format!("must be a multiple of {described}: nearest {nearest}")
        }
        _ => format!("must be a multiple of {described}"),
    };
    faults.check(false, &stage_key(stage, "batch_tokens"), batch_tokens, reason);
}
