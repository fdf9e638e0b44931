//! Steps that were not applied, and returns to earlier steps.

use maud::{Markup, html};

use crate::run_log::RunLog;
use moh_program::counted;

/// Steps that the table lists; the charts show the others.
const LISTED: usize = 50;

/// The section; nothing for runs without such steps.
pub(super) fn section(logs: &[RunLog]) -> Markup {
    let affected: Vec<&RunLog> = logs
        .iter()
        .filter(|log| !log.steps.skipped.is_empty() || !log.rewinds.is_empty())
        .collect();
    html! {
        @if !affected.is_empty() {
            section {
                h2 { "Steps that were not applied" }
                @for log in affected {
                    @if logs.len() > 1 { h3 { (log.name) } }
                    (of_run(log))
                }
            }
        }
    }
}

fn of_run(log: &RunLog) -> Markup {
    let (skipped, rewinds) = (&log.steps.skipped, &log.rewinds);
    html! {
        p {
            (counted(skipped.len() as u64, "step")) " of this path " (if skipped.len() == 1 { "was" } else { "were" })
            " not applied, short lines at the bottom of the charts; "
            (counted(rewinds.len() as u64, "return")) " to an earlier step."
        }
        @if !rewinds.is_empty() {
            div class="scroll" tabindex="0" { table {
                thead { tr {
                    th scope="col" { "return" } th scope="col" { "after steps" } th scope="col" { "to step" }
                    th scope="col" { "samples passed over" } th scope="col" { "attempt" }
                } }
                tbody { @for rewind in rewinds.iter().rev().take(LISTED) { tr {
                    th scope="row" { (rewind.number) }
                    td { (range(rewind.skipped_steps)) }
                    td { (rewind.step) @if rewind.initial { " (the initial model)" } }
                    td { (range(rewind.samples)) }
                    td { (rewind.attempt) }
                } } }
            } }
            (last_of(rewinds.len()))
        }
        @if !skipped.is_empty() {
            div class="scroll" tabindex="0" { table {
                thead { tr { th scope="col" { "step" } th scope="col" { "reason" } th scope="col" { "samples" } } }
                tbody { @for step in skipped.iter().rev().take(LISTED) { tr {
                    th scope="row" { @if let Some(step) = log.steps.all.get(step.index) { (log.number(step)) } }
                    td { (step.reason) }
                    td { (range(step.samples)) }
                } } }
            } }
            (last_of(skipped.len()))
        }
    }
}

/// What a table of `count` rows leaves out.
fn last_of(count: usize) -> Markup {
    html! { @if count > LISTED { p class="note" { "The last " (LISTED) " of " (count) "." } } }
}

fn range([first, last]: [u64; 2]) -> String {
    format!("{first} to {last}")
}
