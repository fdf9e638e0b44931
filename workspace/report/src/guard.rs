//! Steps that were not applied.

use maud::{Markup, html};

use crate::run_log::RunLog;
use moh_program::counted;

/// The most steps that the table lists; the charts show all steps.
const LISTED: usize = 50;

/// Returns the section; empty if all steps were applied.
pub(super) fn section(logs: &[RunLog]) -> Markup {
    let affected: Vec<&RunLog> = logs.iter().filter(|log| !log.steps.skipped.is_empty()).collect();
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
    let skipped = &log.steps.skipped;
    html! {
        p {
            (counted(skipped.len() as u64, "step")) (if skipped.len() == 1 { " was" } else { " were" })
            " not applied, short lines at the bottom of the charts."
        }
        div class="scroll" tabindex="0" { table {
            thead { tr { th scope="col" { "step" } th scope="col" { "reason" } th scope="col" { "samples" } } }
            tbody { @for (index, step) in skipped.iter().rev().take(LISTED) { tr {
                th scope="row" { @if let Some(step) = log.steps.all.get(*index) { (log.number(step)) } }
                td { (step.reason) }
                td { (step.samples[0]) " to " (step.samples[1]) }
            } } }
        } }
        @if skipped.len() > LISTED { p class="note" { "The last " (LISTED) " of " (skipped.len()) "." } }
    }
}
