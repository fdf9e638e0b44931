//! The table of losses at the evaluations of the runs, side by side.

use maud::{Markup, html};
use moh_checkpoint::run_log::Evaluation;
use moh_checkpoint::run_log::label;
use moh_files::units::percent;

use crate::run_log::RunLog;

/// A loss in nats, and in bits per byte.
type Cell = (f64, Option<f64>);

/// A row: its label, whether its set is not the first, and the losses of the runs.
struct Row {
    label: String,
    is_other: bool,
    cells: Vec<Option<Cell>>,
}

/// Returns the table, or a sentence if there is no loss yet.
pub(super) fn section(logs: &[RunLog]) -> Markup {
    let rows = rows(logs);
    html! {
        section {
            h2 { "Losses before and after" }
            @if rows.is_empty() {
                p { "No evaluation has been recorded yet: a run records them with its checkpoints, if its recipe has \
                     validation data." }
            } @else {
                div class="scroll" tabindex="0" { (table(logs, &rows)) }
            }
        }
    }
}

fn table(logs: &[RunLog], rows: &[Row]) -> Markup {
    html! {
        table {
            thead {
                @if logs.len() > 1 { tr {
                    th {}
                    @for log in logs { th scope="colgroup" colspan="2" { (log.name) } }
                } }
                tr {
                    th {}
                    @for _ in logs { th scope="col" { "loss" } th scope="col" { "bits per byte" } }
                }
            }
            tbody {
                @for row in rows { tr {
                    th scope="row" class=[row.is_other.then_some("other")] { (row.label) }
                    @for cell in &row.cells { (numbers(*cell)) }
                } }
                @if logs.iter().any(|log| log.summary.recovered().is_some()) { tr {
                    th scope="row" { "conversion loss recovered by training" }
                    @for log in logs {
                        td colspan="2" {
                            @match log.summary.recovered() {
                                Some(share) => (percent(share)),
                                None => "-",
                            }
                        }
                    }
                } }
            }
        }
    }
}

/// Returns a loss or an error as text.
pub(super) fn shown(value: f64) -> String {
    match value.is_finite() {
        true => format!("{value:.4}"),
        false => "not finite".to_owned(),
    }
}

fn numbers(cell: Option<Cell>) -> Markup {
    let shown = |value: Option<f64>| value.map_or("-".to_owned(), shown);
    html! {
        td { (shown(cell.map(|cell| cell.0))) }
        td { (shown(cell.and_then(|cell| cell.1))) }
    }
}

/// Returns the evaluations of all runs, in the order of the first run that has each.
fn rows(logs: &[RunLog]) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for (column, log) in logs.iter().enumerate() {
        // A new row of this run goes after its last row.
        let mut next = 0;
        let lines = log.summary.evaluations.iter().flat_map(|evaluation| lines(log, evaluation));
        for (label, is_other, cell) in lines {
            let is_free = |row: &Row| {
                row.label == label
                    && row.is_other == is_other
                    && row.cells.get(column).is_some_and(Option::is_none)
            };
            let found = rows.iter().skip(next).position(is_free).map(|at| at + next);
            let at = found.unwrap_or_else(|| {
                rows.insert(next, Row { label, is_other, cells: vec![None; logs.len()] });
                next
            });
            if let Some(place) = rows.get_mut(at).and_then(|row| row.cells.get_mut(column)) {
                *place = Some(cell);
            }
            next = at + 1;
        }
    }
    rows
}

/// Returns the lines of an evaluation: the first set with the moment, the other sets with their names.
fn lines(log: &RunLog, evaluation: &Evaluation) -> Vec<(String, bool, Cell)> {
    let first = (evaluation.loss, evaluation.bits_per_byte);
    let others = evaluation.other_sets.iter();
    let name = |name: &str| evaluation.numbered_name(name, &log.summary.evaluations);
    let others = others.map(|(set, loss)| (name(set), true, (loss.loss, loss.bits_per_byte)));
    std::iter::once((label(&log.summary, evaluation), false, first)).chain(others).collect()
}
