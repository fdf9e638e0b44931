//! Charts of curves over tokens: a single run in detail, or several runs together.

use std::collections::BTreeSet;

use maud::{Markup, html};
use moh_model::AuxiliaryLoss;

use super::figure;
use crate::chart::{Line, LineChart, Look, Mark, shorten};
use crate::loss_chart::{converted, describe, loss_chart, marks, over_steps, skipped, smoothed};
use crate::run_log::{RunLog, Step, StepValue};

const NAME_CHARACTERS: usize = 28;

/// A quantity of each step, with its chart.
struct Quantity {
    title: String,
    unit: &'static str,
    from_zero: bool,
    /// Whether it is planned and not measured. Then the chart shows all values.
    is_planned: bool,
    /// Whether its logarithmic axis is of use.
    log_values: bool,
    value: Box<StepValue>,
}

/// Returns the name of an auxiliary loss, with spaces and a capital letter.
fn title(loss: AuxiliaryLoss) -> String {
    let (first, others) = loss.name().split_at(1);
    first.to_uppercase() + &others.replace('_', " ")
}

/// Returns the end of a name, at most the length of a label. The ends of paths tell them apart.
pub(super) fn label(name: &str) -> String {
    let reversed = |text: &str| text.chars().rev().collect::<String>();
    reversed(&shorten(&reversed(name), NAME_CHARACTERS))
}

pub(super) fn losses(logs: &[RunLog]) -> Markup {
    match logs {
        [log] => figure::wide(&loss_chart(log)),
        logs => html! {
            (figure::wide(&training_losses(logs)))
            @for chart in validation_losses(logs) { (figure::wide(&chart)) }
        },
    }
}

/// Returns charts of the other quantities that any run has.
pub(super) fn quantities(logs: &[RunLog]) -> Markup {
    let quantities = Quantity::all();
    let charts = quantities.iter().map(|quantity| (quantity.chart(logs), quantity));
    let charts: Vec<(LineChart, &Quantity)> =
        charts.filter(|(chart, _)| !chart.is_empty()).collect();
    html! {
        div class="panels" {
            @for (chart, quantity) in &charts { (figure::panel_over_tokens(chart, quantity.log_values)) }
        }
    }
}

impl Quantity {
    /// Returns a measured quantity.
    fn new(title: &str, unit: &'static str, value: impl Fn(&Step) -> f64 + 'static) -> Self {
        let (title, value) = (title.to_owned(), Box::new(value));
        Quantity { title, unit, from_zero: true, is_planned: false, log_values: false, value }
    }

    /// Returns the quantities with charts: the auxiliary losses, then quantities of every run.
    fn all() -> Vec<Self> {
        let auxiliary = AuxiliaryLoss::ALL.map(|loss| {
            let value = move |step: &Step| step.auxiliary[loss];
            let unit = "before its weight";
            Quantity { from_zero: false, ..Self::new(&title(loss), unit, value) }
        });
        let learning_rate = Self::new("Learning rate", "", |step| step.learning_rate);
        let norm = Self::new("Gradient norm", "before clipping", |step| step.grad_norm);
        let speed = |step: &Step| step.tokens_per_second;
        let mfu = |step: &Step| 100.0 * step.mfu;
        let others = [
            Quantity { is_planned: true, ..learning_rate },
            Quantity { log_values: true, ..norm },
            Self::new("Speed", "tokens per second, all ranks", speed),
            Self::new("Model FLOPs utilization", "percent of the device's peak", mfu),
        ];
        auxiliary.into_iter().chain(others).collect()
    }

    fn chart(&self, logs: &[RunLog]) -> LineChart {
        let has = |log: &&RunLog| log.steps.has(&self.value);
        let lines = each(logs)
            .filter(|(_, log)| has(log))
            .flat_map(|(look, log)| self.lines(look, log, logs.len() > 1));
        let chart = over_tokens(logs, &self.title, self.unit, lines.collect(), self.from_zero);
        LineChart { all_seen: self.is_planned, ..chart }
    }

    /// Returns the curves of a run. If several runs are compared, a long run has only its means, because backgrounds
    /// would cover each other.
    fn lines(&self, look: Look, log: &RunLog, compares: bool) -> Vec<Line> {
        let label = label(&log.name);
        match self.is_planned {
            true => vec![Line { label, points: log.steps.curve(&self.value), look }],
            false if compares => vec![smooth(log, label, look, &self.value)],
            false => over_steps(log, &label, look, &self.value),
        }
    }
}

fn training_losses(logs: &[RunLog]) -> LineChart {
    let lines =
        each(logs).map(|(look, log)| smooth(log, label(&log.name), look, &|step| step.loss));
    over_tokens(logs, "Training loss", "cross-entropy, nats per token", lines.collect(), false)
}

/// Returns the curve of a quantity without its noise.
fn smooth(log: &RunLog, label: String, look: Look, value: &StepValue) -> Line {
    let points = smoothed(log, value).unwrap_or_else(|| log.steps.curve(value));
    Line { label, points, look }
}

/// Returns charts of the losses on each validation set that any run has.
fn validation_losses(logs: &[RunLog]) -> Vec<LineChart> {
    let of_runs: Vec<_> = logs.iter().map(RunLog::validation).collect();
    let names: BTreeSet<&str> = of_runs.iter().flatten().map(|(name, _)| name.as_str()).collect();
    let chart = |name: &str| {
        let lines = each(logs).zip(&of_runs).filter_map(|((look, log), sets)| {
            let (_, losses) = sets.iter().find(|(known, _)| known == name)?;
            let (label, points) = (label(&log.name), losses.clone());
            Some(Line { label, points, look: Look { dots: true, ..look } })
        });
        let title = match name {
            "validation" => "Validation loss".to_owned(),
            name => format!("Validation loss, {name}"),
        };
        let unit = "cross-entropy, nats per token";
        let seen = logs.iter().flat_map(|log| converted(log, name)).collect();
        LineChart { seen, ..over_tokens(logs, &title, unit, lines.collect(), false) }
    };
    names.into_iter().map(chart).collect()
}

/// Returns the runs with their looks, which are the same in all charts.
pub(super) fn each(logs: &[RunLog]) -> impl Iterator<Item = (Look, &RunLog)> {
    logs.iter().enumerate().map(|(index, log)| (Look::nth(index), log))
}

/// Returns the label and the look of curve `place` of a run, of the validation set `set`. If there are several runs,
/// the label has the run's name.
pub(super) fn series(
    logs: &[RunLog],
    log: &RunLog,
    run_look: Look,
    set: &str,
    place: usize,
) -> (String, Look) {
    match logs.len() {
        1 => (set.to_owned(), Look::nth(place)),
        _ => (format!("{}, {set}", label(&log.name)), Look { dash: place, ..run_look }),
    }
}

/// Returns a chart of `lines` over the tokens of runs, with a title and a unit.
pub(super) fn over_tokens(
    logs: &[RunLog],
    title: &str,
    unit: &str,
    lines: Vec<Line>,
    from_zero: bool,
) -> LineChart {
    let skipped = match logs {
        [log] => skipped(log),
        _ => Vec::new(),
    };
    LineChart {
        title: title.to_owned(),
        unit: unit.to_owned(),
        description: describe(&lines),
        across: "tokens trained on".to_owned(),
        marks: common_marks(logs),
        compares: logs.len() > 1,
        from_zero,
        lines,
        skipped,
        ..LineChart::default()
    }
}

/// Returns the marks that all runs share, by stage and place. A single run has all of its marks.
fn common_marks(logs: &[RunLog]) -> Vec<Mark> {
    let Some((first, others)) = logs.split_first() else { return Vec::new() };
    // Only the name, because runs may convert to different heads.
    let name = |mark: Mark| match mark.label.split_once(':') {
        Some((name, _)) => Mark { label: name.to_owned(), ..mark },
        None => mark,
    };
    let of_run = |log| marks(log).into_iter().map(name).collect::<Vec<Mark>>();
    let others: Vec<Vec<Mark>> = others.iter().map(of_run).collect();
    let is_shared = |mark: &Mark| others.iter().all(|marks| marks.contains(mark));
    of_run(first).into_iter().filter(is_shared).collect()
}

#[cfg(test)]
mod tests {
    use super::label;

    #[test]
    fn a_long_name_keeps_its_end() {
        assert_eq!(label("runs/a"), "runs/a");
        let long = format!("/somewhere/{}/moh", "x".repeat(40));
        let shown = label(&long);
        assert!(shown.chars().count() == 28 && shown.ends_with("x/moh") && !shown.starts_with('/'));
    }
}
