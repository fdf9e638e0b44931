//! The end of a run: the table of its losses, its plot, and the next commands.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use moh_train::checkpoint::{Evaluation, Moment};
use moh_train::{RunDirectory, StepMetrics, Summary, metrics};

use crate::plot::{Curve, Mark, Plot};

/// The table of a run's losses, with the fraction of the conversion loss that training recovered;
/// empty without validation.
pub fn table(summary: &Summary) -> String {
    let mut out = String::new();
    if summary.evaluations.is_empty() {
        return out;
    }
    let _ = writeln!(out, "{:<44} {:>9} {:>15}", "", "loss", "bits per byte");
    for evaluation in &summary.evaluations {
        let bits = evaluation.bits_per_byte.map_or("-".to_owned(), |bits| format!("{bits:.4}"));
        let _ = writeln!(
            out,
            "{:<44} {:>9.4} {bits:>15}",
            describe(summary, evaluation),
            evaluation.loss
        );
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
    let plot = Plot {
        title: "Loss of the run".into(),
        unit: "cross-entropy, nats per token".into(),
        curves: vec![
            Curve {
                label: "training".into(),
                points: smooth(numbered().map(|(number, step)| (number, step.loss))),
                dots: false,
            },
            Curve { label: "validation".into(), points: validation, dots: true },
        ],
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

/// The command of another program: through cargo if this one was started so, or else by name.
pub fn invocation(program: &str) -> String {
    let from_cargo = std::env::var_os("CARGO").is_some() && Path::new("Cargo.toml").is_file();
    if from_cargo { format!("cargo run --release --bin {program} --") } else { program.to_owned() }
}
