//! The losses of a run by tokens, in all of its stages: `run.svg`, and the first chart of its page.

use moh_checkpoint::run_log::{Evaluation, EvaluationPoint};
use moh_model::HeadCounts;

use crate::chart::scale::short;
use crate::chart::thin::means;
use crate::chart::{Line, LineChart, Look, Mark};
use crate::curves::over_tokens;
use crate::run_log::{RunLog, StageSteps, StepValue};
use moh_program::counted;

const SMOOTH_POINTS: usize = 150;

pub(super) fn loss_chart(log: &RunLog) -> LineChart {
    let mut lines = over_steps(log, "training", Look::nth(0), &|step| step.loss);
    for (index, (name, losses)) in log.validation().into_iter().enumerate() {
        let label = match index == 0 && name == "validation" {
            true => name,
            false => format!("validation, {name}"),
        };
        lines.push(Line {
            label,
            points: losses,
            look: Look { dots: true, ..Look::nth(index + 1) },
        });
    }
    let (title, unit) = ("Training and validation loss", "cross-entropy, nats per token");
    LineChart {
        marks: marks(log),
        seen: log.validation().iter().flat_map(|(set, _)| converted(log, set)).collect(),
        ..over_tokens(std::slice::from_ref(log), title, unit, lines, false)
    }
}

/// Returns a quantity of each step. Of a long run, returns its means over a faint curve of all steps.
pub(super) fn over_steps(log: &RunLog, label: &str, look: Look, value: &StepValue) -> Vec<Line> {
    let points = log.steps.curve(value);
    let label = label.to_owned();
    match smoothed(log, value) {
        None => vec![Line { label, points, look }],
        Some(smooth) => {
            let faint = Look { faint: true, ..look };
            let means = Line { label: label.clone(), points: smooth, look };
            vec![Line { label, points, look: faint }, means]
        }
    }
}

/// Returns means of a quantity. No mean spans the start of a stage. Returns `None` for a run with few steps.
pub(super) fn smoothed(log: &RunLog, value: &StepValue) -> Option<Vec<(f64, f64)>> {
    let count = log.steps.all.len().div_ceil(SMOOTH_POINTS);
    if count < 2 {
        return None;
    }
    let points = log.steps.curve(value);
    let of_stage = |stage: &StageSteps| {
        let steps = points.get(stage.first..stage.first + stage.count).unwrap_or_default();
        means(steps, count)
    };
    Some(log.steps.stages.iter().flat_map(of_stage).collect())
}

pub(super) fn marks(log: &RunLog) -> Vec<Mark> {
    let start = |stage: &StageSteps| {
        let before = stage.first.checked_sub(1).and_then(|index| log.steps.all.get(index));
        let at = before.map_or(0.0, |step| step.tokens);
        Mark { at, label: stage_label(log, &stage.name) }
    };
    log.steps.stages.iter().map(start).collect()
}

/// Returns the losses on a set after conversions, which the chart must show.
pub(super) fn converted(log: &RunLog, set: &str) -> Vec<f64> {
    let is_its =
        |evaluation: &Evaluation| evaluation.set.as_deref().unwrap_or(&log.first_set) == set;
    let loss = |evaluation: &Evaluation| match evaluation.moment {
        EvaluationPoint::Converted { .. } if is_its(evaluation) => Some(evaluation.loss),
        EvaluationPoint::Converted { .. } => evaluation.other_sets.get(set).map(|set| set.loss),
        _ => None,
    };
    log.summary.evaluations.iter().filter_map(loss).collect()
}

/// Returns the label of a stage, with the attention to which it converts.
fn stage_label(log: &RunLog, name: &str) -> String {
    let converted =
        log.summary.evaluations.iter().find_map(|evaluation| match &evaluation.moment {
            EvaluationPoint::Converted { stage, active_heads } if stage == name => {
                Some(active_heads)
            }
            _ => None,
        });
    let heads = log.summary.heads;
    match converted {
        None => name.to_owned(),
        Some(active) if *active == HeadCounts::All(heads) => format!("{name}: converted to dense"),
        Some(active) => format!("{name}: converted to {active} of {heads} heads"),
    }
}

/// Returns the places of steps that were not applied.
pub(super) fn skipped(log: &RunLog) -> Vec<f64> {
    let steps = log.steps.skipped.iter().filter_map(|(index, _)| log.steps.all.get(*index));
    steps.map(|step| step.tokens).collect()
}

/// Returns the first and last values of curves in words.
pub(super) fn describe(lines: &[Line]) -> String {
    let described = lines.iter().filter(|line| !line.look.faint).filter_map(|line| {
        let finite = || line.points.iter().map(|point| point.1).filter(|value| value.is_finite());
        let (first, last) = (finite().next()?, finite().next_back()?);
        let points = counted(finite().count() as u64, "value");
        Some(format!("{}: {points}, from {} to {}", line.label, short(first), short(last)))
    });
    let described: Vec<String> = described.collect();
    match described.is_empty() {
        true => "No values yet.".to_owned(),
        false => format!("{}.", described.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_are_described_by_their_ends() {
        let line = |label: &str, values: &[f64], faint| Line {
            label: label.to_owned(),
            points: (0..).map(f64::from).zip(values.iter().copied()).collect(),
            look: Look { faint, ..Look::default() },
        };
        let lines = [
            line("training", &[f64::NAN, 7.1, 0.5, f64::NAN], false),
            line("training", &[9.0], true),
            line("validation", &[0.25], false),
        ];
        assert_eq!(
            describe(&lines),
            "training: 2 values, from 7.100 to 0.5000; validation: 1 value, from 0.2500 to 0.2500."
        );
        assert_eq!(describe(&[]), "No values yet.");
    }

    #[test]
    fn no_mean_spans_two_stages() {
        let dir = tempfile::tempdir().unwrap();
        let mut text = String::new();
        for step in 1..=301 {
            let (stage, loss) = if step <= 151 { ("one", 1.0) } else { ("two", 3.0) };
            text += &format!(
                "{{\"stage\":\"{stage}\",\"step\":{step},\"tokens\":{step},\"loss\":{loss},\
                 \"balance_loss\":null,\"learning_rate\":1.0,\"grad_norm\":1.0,\"tokens_per_second\":1.0}}\n"
            );
        }
        std::fs::write(dir.path().join(".moh-run"), "").unwrap();
        std::fs::write(dir.path().join("metrics.jsonl"), text).unwrap();
        let log = RunLog::read(dir.path()).unwrap();
        let means = smoothed(&log, &|step| step.loss).unwrap();
        assert!(means.iter().all(|point| point.1 == 1.0 || point.1 == 3.0), "{means:?}");
        assert!(means.len() < 125, "{}", means.len());
        let chart = loss_chart(&log);
        let marks: Vec<(f64, &str)> =
            chart.marks.iter().map(|mark| (mark.at, mark.label.as_str())).collect();
        assert_eq!(marks, [(0.0, "one"), (151.0, "two")]);
    }
}
