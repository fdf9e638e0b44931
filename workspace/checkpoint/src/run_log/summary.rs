//! `summary.json`: the results of a finished run. The file marks the run as finished.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::run_log::{Evaluation, EvaluationPoint, StageCalibration};

const MAX_BYTES: u64 = 64 << 20;

/// The results of a finished run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Summary {
    /// Steps, over all stages.
    pub steps: u64,
    /// Tokens trained on.
    pub tokens: u64,
    /// Query heads of the exported model.
    pub heads: usize,
    /// The losses at the moments of the run, in order.
    pub evaluations: Vec<Evaluation>,
    /// The calibrations of conversions, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub calibrations: Vec<StageCalibration>,
}

impl Summary {
    /// Reads a summary. Returns `None` if the file is missing.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let bytes = moh_files::read_bounded_if_any(path, MAX_BYTES, "a summary")?;
        let Some(bytes) = bytes else { return Ok(None) };
        let summary = serde_json::from_slice(&bytes);
        Ok(summary.map_err(|error| moh_files::unusable(path, format!("not a summary: {error}")))?)
    }

    /// Writes a summary, replacing the whole file.
    pub fn write(&self, path: &Path) -> Result<()> {
        let io = moh_files::io(path);
        let text = serde_json::to_vec_pretty(self).map_err(|error| io(error.into()))?;
        Ok(moh_files::write(path, &text).map_err(io)?)
    }

    /// Returns the fraction of a conversion's loss that the training of its stage recovered, for the last conversion.
    /// Returns `None` unless the losses before, at and after it are of the same validation set. An extended stage has a
    /// loss after each of its ends, and the last loss counts.
    pub fn recovered(&self) -> Option<f64> {
        self.recovered_of(|evaluation| Some(evaluation.loss))
    }

    /// Returns the recovered fraction for each other validation set, by its name.
    pub fn recovered_of_others(&self) -> Vec<(&str, f64)> {
        let names = self.evaluations.last().map(|evaluation| evaluation.other_sets.keys());
        let share = |name: &String| {
            self.recovered_of(|evaluation| evaluation.other_sets.get(name).map(|set| set.loss))
        };
        names.into_iter().flatten().filter_map(|name| Some((&name[..], share(name)?))).collect()
    }

    fn recovered_of(&self, loss: impl Fn(&Evaluation) -> Option<f64>) -> Option<f64> {
        let evaluations = &self.evaluations;
        let (converted, at, converted_stage) =
            evaluations.iter().enumerate().rev().find_map(|(index, at)| match &at.moment {
                EvaluationPoint::Converted { stage, .. } => Some((index, at, stage)),
                _ => None,
            })?;
        let before = evaluations.get(converted.checked_sub(1)?)?;
        let is_end = |evaluation: &&Evaluation| match &evaluation.moment {
            EvaluationPoint::Trained { stage } => stage == converted_stage,
            _ => false,
        };
        let after = evaluations[converted..].iter().rfind(is_end)?;
        if !before.is_comparable(at) || !after.is_comparable(at) {
            return None;
        }
        let (before, at, after) = (loss(before)?, loss(at)?, loss(after)?);
        (at > before).then(|| (at - after) / (at - before))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_log::EvaluatedText;

    fn summary(losses: [f64; 4]) -> Summary {
        let stage = |name: &str| name.to_owned();
        let moments = [
            EvaluationPoint::Loaded,
            EvaluationPoint::Trained { stage: stage("adapt") },
            EvaluationPoint::Converted { stage: stage("moh"), active_heads: 6.into() },
            EvaluationPoint::Trained { stage: stage("moh") },
        ];
        let evaluations = moments.into_iter().zip(losses);
        let evaluations =
            evaluations.map(|(moment, loss)| Evaluation::new(moment, 0, loss)).collect();
        Summary { steps: 2, tokens: 64, heads: 8, evaluations, calibrations: Vec::new() }
    }

    #[test]
    fn the_share_won_back_compares_conversion_with_before_and_after() {
        assert_eq!(summary([3.0, 1.0, 2.0, 1.25]).recovered(), Some(0.75));
        assert_eq!(summary([3.0, 2.0, 2.0, 1.5]).recovered(), None);
        let mut longer = summary([3.0, 1.0, 2.0, 1.25]);
        let end = longer.evaluations[3].clone();
        longer.evaluations.push(Evaluation { loss: 1.0, ..end });
        assert_eq!(longer.recovered(), Some(1.0));
        for (evaluation, loss) in longer.evaluations.iter_mut().zip([4.0, 2.0, 4.0, 9.0, 3.5]) {
            let measured = crate::run_log::Validation { loss, bits_per_byte: None };
            evaluation.other_sets = [("code".to_owned(), measured)].into();
        }
        assert_eq!(longer.recovered_of_others(), [("code", 0.25)]);
        longer.evaluations[1].other_sets.clear();
        assert_eq!(longer.recovered_of_others(), []);
    }

    #[test]
    fn losses_of_other_sets_are_not_compared() {
        for other in 1..4 {
            let mut summary = summary([3.0, 1.0, 2.0, 1.25]);
            for evaluation in &mut summary.evaluations {
                evaluation.set = Some("text".into());
            }
            assert_eq!(summary.recovered(), Some(0.75));
            assert_eq!(summary.evaluations[0].set_among(&summary.evaluations), None);
            summary.evaluations[other].set = Some("code".into());
            assert_eq!(summary.recovered(), None);
            let all = &summary.evaluations;
            assert_eq!(all[0].set_among(all).as_deref(), Some("text"));
        }
    }

    #[test]
    fn losses_of_other_texts_are_not_compared_whatever_their_names_are() {
        let text = |content: &str, targets| EvaluatedText { content: content.into(), targets };
        for (other, is_same) in
            [(text("a", 64), true), (text("b", 64), false), (text("a", 128), false)]
        {
            let mut summary = summary([3.0, 1.0, 2.0, 1.25]);
            for evaluation in &mut summary.evaluations {
                evaluation.set = Some("validation".into());
                evaluation.texts = [("validation".to_owned(), text("a", 64))].into();
            }
            summary.evaluations[3].texts = [("validation".to_owned(), other)].into();
            assert_eq!(summary.recovered(), Some(0.75).filter(|_| is_same));
            let all = &summary.evaluations;
            let names = [1, 3].map(|index: usize| all[index].set_among(all));
            let expected =
                [Some("validation"), Some("validation (2)")].map(|name| name.filter(|_| !is_same));
            assert_eq!(names.each_ref().map(Option::as_deref), expected);
            // A version that did not record the text.
            summary.evaluations[3].texts.clear();
            assert_eq!(summary.recovered(), Some(0.75));
        }
    }

    /// A resumed run reads its earlier losses from a checkpoint.
    #[test]
    fn every_loss_reads_back_exactly() {
        for number in 1..5000u32 {
            let loss = f64::from(number).sqrt();
            let written = summary([loss, loss.ln(), loss / 7.0, loss.exp()]);
            let text = serde_json::to_string(&written).unwrap();
            assert_eq!(serde_json::from_str::<Summary>(&text).unwrap(), written);
        }
    }

    #[test]
    fn a_loss_that_is_not_finite_is_null_and_reads_back() {
        let written = summary([3.0, f64::NAN, f64::INFINITY, 1.0]);
        let text = serde_json::to_string(&written).unwrap();
        assert!(text.contains("\"loss\":null"), "{text}");
        let read: Summary = serde_json::from_str(&text).unwrap();
        assert!(read.evaluations[1].loss.is_nan() && read.evaluations[2].loss.is_nan());
        assert_eq!(read.evaluations[3].loss, 1.0);
        assert_eq!(read.recovered(), None);
    }

    #[test]
    fn a_summary_reads_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("summary.json");
        assert_eq!(Summary::read(&path).unwrap(), None);
        let written = summary([3.0, 1.0, 2.0, 1.25]);
        written.write(&path).unwrap();
        assert_eq!(Summary::read(&path).unwrap(), Some(written));
        std::fs::write(&path, "{").unwrap();
        assert!(Summary::read(&path).is_err());
    }
}
