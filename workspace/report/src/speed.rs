//! The time of a step by parts, and the rates and memory of the machine.

use indicatif::HumanBytes;
use maud::{Markup, html};
use moh_files::units::percent;

use super::figure;
use crate::chart::COLORS;
use crate::chart::scale::short;
use crate::run_log::{RunLog, StageSteps};

const BAR: f64 = 400.0;

/// A row of the table: its name, and its text for a stage.
type Row = (&'static str, fn(&StageSteps) -> String);

/// The number of parts that every step has, first in the list. Evaluations and checkpoints belong to some steps only.
const PARTS: usize = 6;

/// Returns the section; empty if no step has times.
pub(super) fn section(logs: &[RunLog]) -> Markup {
    let stages: Vec<(&RunLog, &StageSteps)> = logs
        .iter()
        .flat_map(|log| log.steps.stages.iter().map(move |stage| (log, stage)))
        .filter(|(_, stage)| stage.timed > 0)
        .collect();
    html! {
        @if !stages.is_empty() {
            section {
                h2 { "Time and memory" }
                p class="note" {
                    "Means over the steps of a stage, on the first rank. On a GPU, forward, backward and exchange are \
                     the times of issuing the work, and gradient norm has the wait for it."
                }
                div class="panels" {
                    @for (log, stage) in &stages { (bar(logs, log, stage)) }
                }
                div class="scroll" tabindex="0" { (table(logs, &stages)) }
            }
        }
    }
}

fn name(logs: &[RunLog], log: &RunLog, stage: &StageSteps) -> String {
    match logs.len() {
        1 => stage.name.clone(),
        _ => format!("{}, {}", super::curves::label(&log.name), stage.name),
    }
}

fn bar(logs: &[RunLog], log: &RunLog, stage: &StageSteps) -> Markup {
    let least = f64::max(0.0, 0.0005 * mean(stage, stage.speed.seconds));
    let parts = stage.speed.parts().into_iter().take(PARTS).enumerate();
    let parts = parts.map(|(index, (name, seconds))| {
        (index % COLORS, name.replace('_', " "), seconds / stage.timed as f64)
    });
    let parts: Vec<(usize, String, f64)> =
        parts.filter(|(_, _, seconds)| seconds.is_finite() && *seconds > least).collect();
    let total: f64 = parts.iter().map(|part| part.2).sum();
    let share =
        |(_, name, seconds): &(usize, String, f64)| format!("{name} {}", percent(seconds / total));
    let shares: Vec<String> = parts.iter().map(share).collect();
    let mut end = 0.0;
    let places = parts.iter().map(|(color, _, seconds)| {
        let (from, wide) = (end, BAR * seconds / total);
        end += wide;
        (*color, from, wide)
    });
    let places: Vec<(usize, f64, f64)> = places.collect();
    html! {
        figure {
            (figure::caption(&format!("A step of {}", name(logs, log, stage)), &duration(total)))
            svg class="chart" role="img" width="400" height="24" viewBox="0 0 400 24" {
                title { "Parts of a step" }
                desc { (shares.join(", ")) }
                @for (color, from, wide) in &places {
                    g class={ "s" (color) } {
                        rect fill="currentColor" x=(format!("{from:.1}")) y="2" height="20"
                            width=(format!("{:.1}", (wide - 1.0).max(0.2))) {}
                    }
                }
            }
            ul class="key" {
                @for ((color, _, _), share) in parts.iter().zip(&shares) {
                    li {
                        svg class={ "chart sample s" (color) } width="12" height="12" viewBox="0 0 12 12"
                            aria-hidden="true" { rect fill="currentColor" width="12" height="12" {} }
                        (share)
                    }
                }
            }
        }
    }
}

fn table(logs: &[RunLog], stages: &[(&RunLog, &StageSteps)]) -> Markup {
    let rows: [Row; 8] = [
        ("steps", |stage| stage.count.to_string()),
        ("a step", |stage| duration(mean(stage, stage.speed.seconds))),
        ("tokens/s", |stage| short(mean(stage, stage.rate))),
        ("model FLOP/s of a rank", |stage| match mean(stage, stage.speed.tflops) {
            tflops if tflops < 1.0 => format!("{} GFLOP/s", short(1000.0 * tflops)),
            tflops => format!("{} TFLOP/s", short(tflops)),
        }),
        ("MFU", |stage| {
            let mfu = stage.speed.mfu.map(|mfu| 100.0 * mean(stage, mfu));
            mfu.map_or("not known".to_owned(), |mfu| format!("{mfu:.1}%"))
        }),
        ("evaluations, in all", |stage| duration(stage.speed.evaluation)),
        ("held up by checkpoints, in all", |stage| duration(stage.speed.checkpoint)),
        ("memory at its peak", |stage| {
            let memory = stage.speed.device_bytes.or(stage.speed.peak_resident_bytes);
            memory.map_or("-".to_owned(), |bytes| HumanBytes(bytes).to_string())
        }),
    ];
    html! {
        table {
            thead { tr {
                th {}
                @for (log, stage) in stages { th scope="col" { (name(logs, log, stage)) } }
            } }
            tbody { @for (name, value) in rows { tr {
                th scope="row" { (name) }
                @for (_, stage) in stages { td { (value(stage)) } }
            } } }
        }
    }
}

fn mean(stage: &StageSteps, sum: f64) -> f64 {
    sum / stage.timed.max(1) as f64
}

/// Returns a duration as text, in a suitable unit.
fn duration(seconds: f64) -> String {
    match seconds {
        s if !s.is_finite() => "-".to_owned(),
        0.0 => "0 s".to_owned(),
        s if s >= 7200.0 => format!("{:.1} hours", s / 3600.0),
        s if s >= 120.0 => format!("{:.1} minutes", s / 60.0),
        s if s >= 1.0 => format!("{s:.2} s"),
        s => format!("{:.1} ms", 1000.0 * s),
    }
}
