//! The end of a run: the table of its losses, its plot, and the next commands.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use moh_train::checkpoint::{Evaluation, Moment};
use moh_train::{RunDirectory, StepMetrics, Summary, metrics};

use crate::plot::{Curve, Mark, Plot};

/// The table of a run's losses on all validation sets, with the fraction of the conversion loss on the
/// first that training recovered; empty without validation.
pub fn table(summary: &Summary) -> String {
    let mut out = String::new();
    if summary.evaluations.is_empty() {
        return out;
    }
    let _ = writeln!(out, "{:<44} {:>9} {:>15}", "", "loss", "bits per byte");
    let mut line = |label: &str, loss: f64, bits_per_byte: Option<f64>| {
        let bits = bits_per_byte.map_or("-".to_owned(), |bits| format!("{bits:.4}"));
        let _ = writeln!(out, "{label:<44} {loss:>9.4} {bits:>15}");
    };
    for evaluation in &summary.evaluations {
        let label = describe(summary, evaluation);
        line(&label, evaluation.loss, evaluation.bits_per_byte);
        for (name, set) in &evaluation.other_sets {
            line(&format!("  {name}"), set.loss, set.bits_per_byte);
        }
    }
    if let Some(share) = summary.recovered() {
        let label = "conversion loss recovered by training";
        let _ = writeln!(out, "{label:<44} {:>8.1}%", 100.0 * share);
    }
    out
}

fn describe(summary: &Summary, evaluation: &Evaluation) -> String {
    match &evaluation.moment {
        Moment::Loaded => "the model as loaded".to_owned(),
        Moment::Trained { stage } => format!("after stage {stage}"),
        Moment::Converted { active_heads, .. } => {
            format!("converted, {active_heads} of {} heads active, not tuned", summary.heads)
        }
    }
}

/// Plots the run's losses to `run.svg` in its directory; returns the file.
pub fn draw(run: &RunDirectory, summary: &Summary) -> anyhow::Result<PathBuf> {
    let steps = metrics::read(&run.metrics())?;
    let numbered = || steps.iter().zip(1u32..).map(|(step, number)| (f64::from(number), step));
    let mut validation: Vec<(f64, f64)> = numbered()
        .filter_map(|(number, step)| Some((number, step.validation?.loss)))
        .chain(summary.evaluations.iter().map(|e| (e.step as f64, e.loss)))
        .collect();
    // The sort is stable: a conversion's loss stays after that of the stage before it.
    validation.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut curves = vec![
        Curve {
            label: "training".into(),
            points: smooth(numbered().map(|(number, step)| (number, step.loss))),
            dots: false,
        },
        Curve { label: "validation".into(), points: validation, dots: true },
    ];
    curves.extend(other_sets(&steps, summary));
    let plot = Plot {
        title: "Loss of the run".into(),
        unit: "cross-entropy, nats per token".into(),
        curves,
        marks: marks(&steps),
    };
    let path = run.root().join("run.svg");
    plot.write(&path)?;
    Ok(path)
}

/// Means of up to five steps.
fn smooth(points: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let points: Vec<_> = points.collect();
    let mean = |part: &[(f64, f64)]| {
        let count = part.len() as f64;
        let sum = part.iter().fold((0.0, 0.0), |sum, point| (sum.0 + point.0, sum.1 + point.1));
        (sum.0 / count, sum.1 / count)
    };
    points.chunks(5).map(mean).collect()
}

fn marks(steps: &[StepMetrics]) -> Vec<Mark> {
    let mut marks: Vec<Mark> = Vec::new();
    for (step, number) in steps.iter().zip(0u32..) {
        if marks.last().is_none_or(|mark| mark.label != step.stage) {
            marks.push(Mark { step: f64::from(number), label: step.stage.clone() });
        }
    }
    marks
}

/// The losses of the validation sets after the first: a curve for each.
fn other_sets(steps: &[StepMetrics], summary: &Summary) -> Vec<Curve> {
    let moments = summary.evaluations.iter();
    let names: BTreeSet<&String> = moments.flat_map(|e| e.other_sets.keys()).collect();
    let curve = |name: &&String| {
        let of_steps = steps.iter().zip(1u32..).filter_map(|(step, number)| {
            Some((f64::from(number), step.validation_sets.get(*name)?.loss))
        });
        let moments = summary.evaluations.iter();
        let of_moments =
            moments.filter_map(|e| Some((e.step as f64, e.other_sets.get(*name)?.loss)));
        let mut points: Vec<(f64, f64)> = of_steps.chain(of_moments).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        Curve { label: format!("validation, {name}"), points, dots: true }
    };
    names.iter().map(curve).collect()
}

/// The command of another program: through cargo if this one was started so, or else by name.
pub fn invocation(program: &str) -> String {
    let from_cargo = std::env::var_os("CARGO").is_some() && Path::new("Cargo.toml").is_file();
    if from_cargo { format!("cargo run --release --bin {program} --") } else { program.to_owned() }
}

#[cfg(test)]
mod tests {
    use moh_train::Validation;

    use super::*;

    #[test]
    fn the_table_has_a_line_for_each_set() {
        let other_sets = [("code".to_owned(), Validation { loss: 1.5, bits_per_byte: Some(0.75) })];
        let summary = Summary {
            steps: 1,
            tokens: 8,
            heads: 4,
            evaluations: vec![Evaluation {
                moment: Moment::Loaded,
                step: 0,
                loss: 2.0,
                bits_per_byte: None,
                other_sets: other_sets.into(),
            }],
        };
        let shown = table(&summary);
        let lines: Vec<Vec<&str>> =
            shown.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines,
            [vec!["the", "model", "as", "loaded", "2.0000", "-"], vec!["code", "1.5000", "0.7500"]]
        );
        let curves = other_sets_of(&summary);
        assert_eq!(curves, ["validation, code"]);
    }

    fn other_sets_of(summary: &Summary) -> Vec<String> {
        other_sets(&[], summary).into_iter().map(|curve| curve.label).collect()
    }
}
