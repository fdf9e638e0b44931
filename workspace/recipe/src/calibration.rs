//! `moh.calibration = { .. }` of a stage: a conversion by measurement. Where the stage converts a dense model, its
//! shared heads, output projections and the matrices of a learned router are chosen by sequences that the stage does not train on.

use moh_model::SharedChoice;
use serde::{Deserialize, Serialize};

use crate::{AttentionKind, Recipe, Stage};

/// `moh.calibration = { .. }` of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CalibrationOptions {
    /// Tokens of the sequences after the stage's last one, in whole sequences; default: 65,536.
    pub tokens: u64,
    /// Tokens of them on which sets of shared heads are compared; default: 4,096.
    pub search_tokens: usize,
    /// Which heads are shared; default: those that are measured to be best.
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
    /// Returns whether it chooses the shared heads.
    pub fn chooses_heads(&self) -> bool {
        self.shared != SharedChoice::Given
    }

    /// Returns whether it chooses how many heads are shared.
    pub fn chooses_numbers(&self) -> bool {
        self.shared == SharedChoice::CalibratedNumber
    }

    /// Returns the sequences of `length` tokens that are measured.
    pub fn sequences(&self, length: usize) -> u64 {
        self.tokens / (length as u64).max(1)
    }
}

impl Stage {
    /// How the stage's conversion is measured, if it is.
    pub fn calibration(&self) -> Option<CalibrationOptions> {
        let moh = self.moh.as_ref().filter(|_| self.attention == AttentionKind::Moh);
        moh.and_then(|moh| moh.calibration)
    }
}

impl Recipe {
    /// Returns the stage whose calibration has chosen the shared heads of the stage `index`: itself, or one before it,
    /// after which every stage has kept them.
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
