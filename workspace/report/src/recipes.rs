//! The recipes of the runs, and their differences.

use std::collections::{BTreeMap, BTreeSet};

use maud::{Markup, html};
use moh_checkpoint::run_directory::leaves;

use crate::chart::printable;
use crate::run_log::RunLog;

pub(super) fn section(logs: &[RunLog]) -> Markup {
    html! {
        section {
            h2 { (if logs.len() == 1 { "Recipe" } else { "Recipes" }) }
            @if logs.len() > 1 { (differences(logs)) }
            @for log in logs {
                details {
                    summary { "recipe.toml" @if logs.len() > 1 { " of " (log.name) } }
                    @match &log.recipe_text {
                        Ok(text) => {
                            @if log.recipe.is_none() {
                                p class="note" { "This version does not read the recipe, which is shown as it is." }
                            }
                            pre tabindex="0" { (without_controls(text)) }
                        }
                        Err(reason) => p { (reason) },
                    }
                }
            }
        }
    }
}

/// Returns the text with replacement characters for control characters, except line ends.
fn without_controls(text: &str) -> String {
    let lines: Vec<String> =
        text.lines().map(|line| printable(&line.replace('\t', "    "))).collect();
    lines.join("\n")
}

fn differences(logs: &[RunLog]) -> Markup {
    let of_runs: Option<Vec<BTreeMap<String, String>>> =
        logs.iter().map(|log| leaves(log.recipe.as_ref()?).ok()).collect();
    let Some(of_runs) = of_runs else {
        return html! { p { "Not all recipes can be read, so that they are not compared." } };
    };
    let keys: BTreeSet<&String> = of_runs.iter().flat_map(BTreeMap::keys).collect();
    let differ = |key: &&String| of_runs.iter().any(|run| run.get(*key) != of_runs[0].get(*key));
    let keys: Vec<&String> = keys.into_iter().filter(differ).collect();
    html! {
        @if keys.is_empty() {
            p { "The recipes are the same." }
        } @else {
            div class="scroll" tabindex="0" { table {
                caption { "Keys whose values differ" }
                thead { tr { th {} @for log in logs { th scope="col" { (log.name) } } } }
                tbody { @for key in keys { tr {
                    th scope="row" { code { (printable(key)) } }
                    @for run in &of_runs {
                        td { @match run.get(key) {
                            Some(value) => code { (printable(value)) },
                            None => "-",
                        } }
                    }
                } } }
            } }
        }
    }
}
