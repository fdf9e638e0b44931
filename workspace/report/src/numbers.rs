//! The numbers behind the curves: a table of steps for each run.

use maud::{Markup, html};
use moh_model::AuxiliaryLoss;

use crate::chart::scale::short;
use crate::run_log::{RunLog, Step, StepValue};

/// The most rows of a table, evenly spaced, with the first and the last step.
const ROWS: usize = 40;

/// Returns the columns of a run's steps: names and values. Distillation has a column if a stage has a teacher.
fn columns(log: &RunLog) -> Vec<(String, Box<StepValue>)> {
    fn column(name: &str, value: impl Fn(&Step) -> f64 + 'static) -> (String, Box<StepValue>) {
        (name.to_owned(), Box::new(value))
    }
    let mut columns = vec![column("tokens", |step| step.tokens), column("loss", |step| step.loss)];
    let has = |loss| log.steps.has(move |step: &Step| step.auxiliary[loss]);
    let shown = |loss: &AuxiliaryLoss| *loss == AuxiliaryLoss::Balance || has(*loss);
    columns.extend(
        (AuxiliaryLoss::ALL.into_iter().filter(shown))
            .map(|loss| column(&loss.name().replace('_', " "), move |step| step.auxiliary[loss])),
    );
    columns.push(column("learning rate", |step| step.learning_rate));
    columns.push(column("gradient norm", |step| step.grad_norm));
    columns.push(column("tokens/s", |step| step.tokens_per_second));
    columns
}

/// Returns the section: tables of steps and of validation losses.
pub(super) fn section(logs: &[RunLog]) -> Markup {
    html! {
        section {
            h2 { "Numbers" }
            @for log in logs {
                details {
                    summary { "Steps" @if logs.len() > 1 { " of " (log.name) } }
                    div class="scroll" tabindex="0" { (steps(log)) }
                }
                details {
                    summary { "Validation losses" @if logs.len() > 1 { " of " (log.name) } }
                    div class="scroll" tabindex="0" { (validation(log)) }
                }
            }
        }
    }
}

/// Returns the indices of at most [`ROWS`] of `count` values.
fn picked(count: usize) -> Vec<usize> {
    let last = count.saturating_sub(1);
    let mut picked: Vec<usize> = match count {
        0 => Vec::new(),
        count if count <= ROWS => (0..count).collect(),
        _ => (0..ROWS)
            .map(|row| (row as u128 * last as u128 / (ROWS as u128 - 1)) as usize)
            .collect(),
    };
    picked.dedup();
    picked
}

fn steps(log: &RunLog) -> Markup {
    let (all, columns) = (&log.steps.all, columns(log));
    let stage = |index: usize| {
        let stages = log.steps.stages.iter();
        stages.rev().find(|stage| stage.first <= index).map_or("", |stage| stage.name.as_str())
    };
    html! {
        table {
            caption {
                @if all.len() > ROWS { (ROWS) " of " (all.len()) " steps" } @else { "All steps" }
            }
            thead { tr {
                th scope="col" { "step" } th scope="col" { "stage" }
                @for (name, _) in &columns { th scope="col" { (name) } }
            } }
            tbody { @for index in picked(all.len()) { @if let Some(step) = all.get(index) { tr {
                th scope="row" { (log.number(step)) }
                td { (stage(index)) }
                @for (_, value) in &columns { td { (short(value(step))) } }
            } } } }
        }
    }
}

fn validation(log: &RunLog) -> Markup {
    html! {
        @for (name, losses) in log.validation() {
            table {
                caption {
                    (name)
                    @if losses.len() > ROWS { ": " (ROWS) " of " (losses.len()) " evaluations" }
                }
                thead { tr { th scope="col" { "tokens" } th scope="col" { "loss" } } }
                tbody { @for index in picked(losses.len()) { @if let Some((tokens, loss)) = losses.get(index) { tr {
                    th scope="row" { (short(*tokens)) }
                    td { (short(*loss)) }
                } } } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_evenly_apart_and_have_both_ends() {
        assert_eq!(picked(0), Vec::<usize>::new());
        assert_eq!(picked(3), [0, 1, 2]);
        let many = picked(1_000_000);
        assert_eq!((many.len(), many[0], many[ROWS - 1]), (ROWS, 0, 999_999));
    }
}
