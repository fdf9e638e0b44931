//! The losses of a run at its points, and the conditions under which they can be compared.

use std::collections::BTreeMap;

use moh_model::HeadCounts;
use moh_step::finite_or_nan;
use serde::{Deserialize, Serialize};

use crate::run_log::{Summary, Validation};

/// A loss at a point of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Evaluation {
    /// The point of the run.
    pub moment: EvaluationPoint,
    /// Steps done at that point, over all stages.
    pub step: u64,
    /// Mean cross-entropy, in nats per token. Null in JSON if it is not finite.
    #[serde(deserialize_with = "finite_or_nan")]
    pub loss: f64,
    /// The loss in bits per byte of the decoded targets. `None` without a tokenizer.
    pub bits_per_byte: Option<f64>,
    /// The validation set of both losses: the recipe's first set at that point. `None` in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<String>,
    /// The losses of the validation sets after the first, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub other_sets: BTreeMap<String, Validation>,
    /// The evaluated text of each of these sets, by name. Empty in files of earlier versions.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub texts: BTreeMap<String, EvaluatedText>,
}

/// The evaluated text of a validation set. Losses of equal texts can be compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvaluatedText {
    /// blake3 of the identity of its token file's content, in hexadecimal.
    pub content: String,
    /// The tokens that the model predicted.
    pub targets: u64,
}

impl Evaluation {
    /// Creates an evaluation with only a loss.
    pub fn new(moment: EvaluationPoint, step: u64, loss: f64) -> Self {
        let (other_sets, texts) = (BTreeMap::new(), BTreeMap::new());
        Evaluation { moment, step, loss, bits_per_byte: None, set: None, other_sets, texts }
    }

    /// Returns whether `all` has another evaluation at this point: an extended stage has several ends.
    pub fn is_repeated(&self, all: &[Evaluation]) -> bool {
        all.iter().filter(|other| other.moment == self.moment).count() > 1
    }

    /// Returns whether the losses are of the same text. If a text is not known, compares the names of the sets.
    pub fn is_comparable(&self, other: &Evaluation) -> bool {
        let text = |of: &Evaluation| Some(of.texts.get(of.set.as_ref()?)?.clone());
        match (text(self), text(other)) {
            (Some(ours), Some(theirs)) => ours == theirs,
            _ => self.set.is_none() || other.set.is_none() || self.set == other.set,
        }
    }

    /// Returns the set's name, if `all` contains an evaluation of another set.
    pub fn set_among(&self, all: &[Evaluation]) -> Option<String> {
        let is_needed = all.iter().any(|other| !other.is_comparable(self));
        self.set.as_deref().filter(|_| is_needed).map(|set| self.numbered_name(set, all))
    }

    /// Returns the name of a set. Appends a number from 2 on if earlier sets in `all` had this name and other texts.
    pub fn numbered_name(&self, set: &str, all: &[Evaluation]) -> String {
        let mut texts: Vec<&EvaluatedText> = Vec::new();
        for text in all.iter().filter_map(|evaluation| evaluation.texts.get(set)) {
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        let own = self.texts.get(set);
        match texts.iter().position(|text| Some(*text) == own) {
            Some(before @ 1..) => format!("{set} ({})", before + 1),
            _ => set.to_owned(),
        }
    }
}

/// A point of a run at which the model is evaluated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvaluationPoint {
    /// Before the first step.
    Loaded,
    /// At the start of a stage that changes the attention, before its first step.
    Converted {
        /// The stage's name.
        stage: String,
        /// Active heads per token from here on.
        active_heads: HeadCounts,
    },
    /// After a stage.
    Trained {
        /// The stage's name.
        stage: String,
    },
}

/// Returns the label of an evaluation in tables and charts: its moment, and its set if the run's sets differ.
pub fn label(summary: &Summary, evaluation: &Evaluation) -> String {
    let moment = describe(summary.heads, evaluation, &summary.evaluations);
    match evaluation.set_among(&summary.evaluations) {
        Some(set) => format!("{moment}, {set}"),
        None => moment,
    }
}

/// Returns the moment of an evaluation, one of `all`, of a model with `heads` query heads.
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
