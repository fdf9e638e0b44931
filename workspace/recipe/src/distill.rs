//! `distill = { .. }` of a stage: the stage learns a teacher's distribution in addition to its targets.

use moh_model::Distillation;
use serde::{Deserialize, Serialize};

use crate::Stage;

/// The teacher that is the run's own model as it was loaded.
pub const START: &str = "start";

/// `distill = { .. }` of a stage. The loss is `cross_entropy` x the cross-entropy + `weight` x T^2
/// KL(teacher || model), both softmaxes of logits over T, the `temperature`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DistillOptions {
    /// `"start"` for the run's own model as it was loaded, a model directory, or the checkpoint `RUN@STEP` of
    /// another run.
    pub teacher: String,
    /// Weight of the distillation loss.
    #[serde(default = "one")]
    pub weight: f64,
    /// Weight of the cross-entropy; 0 learns from the teacher alone.
    #[serde(default = "one")]
    pub cross_entropy: f64,
    /// The temperature, T.
    #[serde(default = "one")]
    pub temperature: f64,
}

fn one() -> f64 {
    1.0
}

impl DistillOptions {
    /// Returns whether the teacher is the run's own model as it was loaded.
    pub fn is_start(&self) -> bool {
        self.teacher == START
    }
}

impl Stage {
    /// Returns the settings of the stage's distillation, if it has a teacher.
    pub fn distillation(&self) -> Option<Distillation> {
        let &DistillOptions { weight, cross_entropy, temperature, .. } = self.distill.as_ref()?;
        Some(Distillation { weight, cross_entropy, temperature })
    }

    /// Returns the key of the stage's teacher.
    pub fn teacher_key(&self) -> String {
        format!("stage.{}.distill.teacher", self.name)
    }
}
