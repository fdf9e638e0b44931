//! The page as a whole: its head, its style and its sections.

use std::time::{Duration, SystemTime};

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::{
    Runs, calibration, curves, figure, guard, losses, numbers, overview, recipes, routing, speed,
};
use crate::chart::{self, shorten};
use moh_program::utc;

const STYLE: &str = include_str!("page.css");

/// Marks a page as written by this program.
const GENERATOR: &str = "<meta name=\"generator\" content=\"moh-report";

/// The page may load only its own style, and the empty icon that keeps browsers from asking for an icon.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; img-src data:";

pub(super) const TITLE_CHARACTERS: usize = 120;

/// Returns whether a file that starts with these bytes is a page of this program.
pub(super) fn is_page(start: &[u8]) -> bool {
    start.windows(GENERATOR.len()).any(|part| part == GENERATOR.as_bytes())
}

/// Returns the page of runs at the moment `now`. A browser loads it again after the time `refresh`.
pub(super) fn page(runs: &Runs, now: SystemTime, refresh: Option<Duration>) -> String {
    let logs = &runs.logs[..];
    let names: Vec<&str> = logs.iter().map(|log| log.name.as_str()).collect();
    let title = shorten(&names.join(", "), TITLE_CHARACTERS);
    let has_steps = logs.iter().any(|log| !log.steps.all.is_empty());
    let body = html! {
        h1 { @if logs.len() == 1 { "Run " (title) } @else { (logs.len()) " runs" } }
        (overview::section(logs, now))
        @if !runs.remarks.is_empty() {
            ul class="remarks" { @for remark in &runs.remarks { li { (remark) } } }
        }
        section {
            h2 { "Loss" }
            @if has_steps || logs.iter().any(|log| !log.summary.evaluations.is_empty()) {
                (figure::axes())
                (curves::losses(logs))
            } @else {
                p { "No step has been recorded yet." }
            }
        }
        (losses::section(logs))
        @if has_steps { section { h2 { "Training" } (curves::quantities(logs)) } }
        (guard::section(logs))
        (calibration::section(logs))
        (routing::section(logs))
        (speed::section(logs))
        @if has_steps { (numbers::section(logs)) }
        (recipes::section(logs))
        footer { "moh-report " (env!("CARGO_PKG_VERSION")) ", " (utc(now)) }
    };
    shell(&title, body, refresh)
}

pub(super) fn shell(title: &str, body: Markup, refresh: Option<Duration>) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="generator" content={ "moh-report " (env!("CARGO_PKG_VERSION")) };
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                @if let Some(refresh) = refresh { meta http-equiv="refresh" content=(refresh.as_secs()); }
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " - moh-report" }
                link rel="icon" href="data:,";
                style { (PreEscaped(chart::STYLE)) (PreEscaped(STYLE)) }
            }
            body { main { (body) } }
        }
    };
    format!("{}\n", page.into_string())
}
