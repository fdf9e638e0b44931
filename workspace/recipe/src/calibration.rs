//! `moh.calibration = { .. }` of a stage: a conversion by measurement. If the stage converts a dense model, the
//! calibration chooses the shared heads, the output projections and the matrices of a learned router. It measures
//! sequences that the stage does not train on.

use moh_model::SharedChoice;
use serde::{Deserialize, Serialize};

use crate::{AttentionKind, Recipe, Stage};

/// `moh.calibration = { .. }` of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CalibrationOptions {
    /// Tokens to measure, in whole sequences after the stage's last sequence; default: 65,536.
    pub tokens: u64,
    /// Tokens, among these, on which sets of shared heads are compared; default: 4,096.
    pub search_tokens: usize,
    /// Which heads are shared; default: the heads that measure best.
    pub shared: SharedChoice,
    /// Whether the output projections are refitted to the heads that tokens compute; default: true.
    pub refit: bool,
}

impl Default for CalibrationOptions {
    fn default() -> Self {
        CalibrationOptions {
            tokens: 1 << 16,
            search_tokens: 1 << 12,
            shared: SharedChoice::default(),
            refit: true,
        }
    }
}

impl CalibrationOptions {
    /// Returns whether the calibration chooses the shared heads.
    pub fn chooses_heads(&self) -> bool {
        self.shared != SharedChoice::Given
    }

    /// Returns whether the calibration chooses the number of shared heads.
    pub fn chooses_numbers(&self) -> bool {
        self.shared == SharedChoice::CalibratedNumber
    }

    /// Returns the number of measured sequences of `length` tokens.
    pub fn sequences(&self, length: usize) -> u64 {
        self.tokens / (length as u64).max(1)
    }
}

impl Stage {
    /// Returns the options of the stage's calibration, if it has one.
    pub fn calibration(&self) -> Option<CalibrationOptions> {
        let moh = self.moh.as_ref().filter(|_| self.attention == AttentionKind::Moh);
        moh.and_then(|moh| moh.calibration)
    }
}

impl Recipe {
    /// Returns the stage with the calibration that has chosen the shared heads of stage `index`. This is the stage
    /// itself, or an earlier stage if every stage after it has kept its heads.
    pub fn calibrated_stage(&self, index: usize) -> Option<&Stage> {
        for stage in self.stages.get(..=index)?.iter().rev() {
            let moh = stage.moh.as_ref().filter(|_| stage.attention == AttentionKind::Moh)?;
            if moh.calibration.is_some() {
                return Some(stage);
            }
            if moh.shared_head_ids.is_some() {
                return None;
            }
        }
        None
    }

    /// Returns whether one of the first `stages` stages has refitted output projections.
    pub fn has_refitted(&self, stages: usize) -> bool {
        let begun = self.stages.iter().take(stages);
        begun.filter_map(Stage::calibration).any(|calibration| calibration.refit)
    }
}
