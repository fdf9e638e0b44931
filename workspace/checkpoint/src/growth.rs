//! Stages that have become longer while their run was under way.

use moh_recipe::Stage;
use serde::{Deserialize, Serialize};

/// A stage's new length, and the step from which it applies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageExtension {
    /// The stage's name.
    pub stage: String,
    /// Steps over all stages that were done when the stage grew.
    pub step: u64,
    /// The stage's `tokens` before that step.
    pub before: u64,
    /// The stage's `tokens` from that step on.
    pub tokens: u64,
}

/// Returns the steps of `stage`, as known after `step` steps over all stages.
pub fn steps_at(stage: &Stage, growth: &[StageExtension], step: u64) -> u64 {
    let own = || growth.iter().filter(|growth| growth.stage == stage.name);
    let first = own().map(|growth| growth.before).min().unwrap_or(stage.tokens);
    let grown = own().filter(|growth| growth.step <= step).map(|growth| growth.tokens);
    stage.steps_of(grown.fold(first, u64::max))
}
