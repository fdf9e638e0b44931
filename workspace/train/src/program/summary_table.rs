//! The table of losses at the end of a run.

use moh_checkpoint::run_log::Summary;
use moh_checkpoint::run_log::label;
use moh_files::units::percent;
use moh_program::table::aligned;

/// Returns the table of a run's losses on all validation sets, with the fraction of the conversion loss that training
/// recovered. The table is empty without validation.
pub fn table(summary: &Summary) -> String {
    if summary.evaluations.is_empty() {
        return String::new();
    }
    let row = |label, loss, bits: Option<f64>| {
        let bits = bits.map_or("-".to_owned(), |bits| format!("{bits:.4}"));
        vec![label, format!("{loss:.4}"), bits]
    };
    let mut rows = Vec::new();
    for evaluation in &summary.evaluations {
        rows.push(row(label(summary, evaluation), evaluation.loss, evaluation.bits_per_byte));
        for (name, set) in &evaluation.other_sets {
            let name = evaluation.numbered_name(name, &summary.evaluations);
            rows.push(row(format!("  {name}"), set.loss, set.bits_per_byte));
        }
    }
    for of in &summary.calibrations {
        let others = format!("(dense {:.4})", of.loss_dense);
        let label = format!("stage {}'s calibration, held out", of.stage);
        rows.push(vec![label, format!("{:.4}", of.loss), String::new(), others]);
    }
    if let Some(share) = summary.recovered() {
        rows.push(vec!["conversion loss recovered by training".to_owned(), percent(share)]);
    }
    for (name, share) in summary.recovered_of_others() {
        rows.push(vec![format!("  {name}"), percent(share)]);
    }
    aligned(["", "loss", "bits per byte"], rows, &[0, 3])
}

#[cfg(test)]
mod tests {
    use super::*;
    use moh_checkpoint::run_log::{Evaluation, EvaluationPoint, Validation};

    #[test]
    fn the_table_has_a_line_for_each_set() {
        let other_sets = [("code".to_owned(), Validation { loss: 1.5, bits_per_byte: Some(0.75) })];
        let mut summary = Summary {
            steps: 1,
            tokens: 8,
            heads: 4,
            evaluations: vec![Evaluation {
                set: Some("text".to_owned()),
                other_sets: other_sets.into(),
                ..Evaluation::new(EvaluationPoint::Loaded, 0, 2.0)
            }],
            calibrations: Vec::new(),
        };
        let shown = table(&summary);
        let lines: Vec<Vec<&str>> =
            shown.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines,
            [vec!["the", "model", "as", "loaded", "2.0000", "-"], vec!["code", "1.5000", "0.7500"]]
        );
        // From here on another set is the first set.
        let later = Evaluation { set: Some("code".to_owned()), ..summary.evaluations[0].clone() };
        summary.evaluations.push(later);
        let shown = table(&summary);
        assert!(shown.contains("the model as loaded, text "), "{shown}");
        assert!(shown.contains("the model as loaded, code "), "{shown}");
        // Columns stay aligned with the longest label.
        summary.evaluations[0].set = Some("a-set-with-a-name-of-many-letters".to_owned());
        let shown = table(&summary);
        let mut lengths = shown.lines().map(|line| line.chars().count());
        let first = lengths.next();
        assert!(lengths.all(|length| Some(length) == first), "{shown}");
    }

    #[test]
    fn the_ends_of_a_stage_that_went_on_are_told_apart() {
        let ended = |stage: &str, step| {
            Evaluation::new(EvaluationPoint::Trained { stage: stage.to_owned() }, step, 2.0)
        };
        let evaluations = vec![ended("adapt", 4), ended("moh", 8), ended("moh", 12)];
        let calibrations = Vec::new();
        let shown = table(&Summary { steps: 12, tokens: 8, heads: 4, evaluations, calibrations });
        let labels: Vec<&str> =
            shown.lines().skip(1).filter_map(|line| line.split("  ").next()).take(3).collect();
        let expected = ["after stage adapt", "after stage moh, step 8", "after stage moh, step 12"];
        assert_eq!(labels, expected);
    }
}
