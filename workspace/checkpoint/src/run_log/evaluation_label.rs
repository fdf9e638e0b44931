//! What an evaluation of a run is called in tables and charts.

use crate::run_log::{Evaluation, EvaluationPoint, Summary};

/// The moment of an evaluation, and its set where those of the run are of several.
pub fn label(summary: &Summary, evaluation: &Evaluation) -> String {
    let moment = describe(summary.heads, evaluation, &summary.evaluations);
    match evaluation.set_among(&summary.evaluations) {
        Some(set) => format!("{moment}, {set}"),
        None => moment,
    }
}

/// The moment of an evaluation, one of `all`, of a model with that many query heads.
fn describe(heads: usize, evaluation: &Evaluation, all: &[Evaluation]) -> String {
    match &evaluation.moment {
        EvaluationPoint::Loaded => "the model as loaded".to_owned(),
        EvaluationPoint::Trained { stage } if evaluation.is_repeated(all) => {
            format!("after stage {stage}, step {}", evaluation.step)
        }
        EvaluationPoint::Trained { stage } => format!("after stage {stage}"),
        EvaluationPoint::Converted { active_heads, .. } => {
            format!("converted, {active_heads} of {heads} heads active, not tuned")
        }
    }
}
