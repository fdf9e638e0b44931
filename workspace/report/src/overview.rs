//! The properties and the progress of runs: a list for a single run, a table for several runs.

use std::time::{Duration, SystemTime};

use indicatif::{HumanCount, HumanDuration};
use maud::{Markup, html};
use moh_checkpoint::run_log::Machine;
use moh_recipe::{DeviceKind, Recipe};

use super::curves::each;
use super::figure;
use crate::chart::scale::short;
use crate::chart::{Line, printable};
use crate::run_log::RunLog;
use moh_program::{counted, utc};

/// Recent steps for the estimate of the remaining time.
const RECENT: usize = 50;

type Facts = Vec<(&'static str, String)>;

pub(super) fn section(logs: &[RunLog], now: SystemTime) -> Markup {
    let facts: Vec<Facts> = logs.iter().map(|log| facts(log, now)).collect();
    html! {
        section {
            @if let [facts] = &facts[..] {
                dl class="facts" {
                    @for (name, value) in facts { div { dt { (name) } dd { (value) } } }
                }
            } @else {
                div class="scroll" tabindex="0" { (table(logs, &facts)) }
            }
        }
    }
}

fn table(logs: &[RunLog], facts: &[Facts]) -> Markup {
    let names = facts.first().into_iter().flatten().map(|(name, _)| *name);
    html! {
        table {
            thead { tr {
                th {}
                @for (look, log) in each(logs) {
                    th scope="col" {
                        (figure::sample(&Line { label: String::new(), points: Vec::new(), look }))
                        (log.name)
                    }
                }
            } }
            tbody { @for (row, name) in names.enumerate() { tr {
                th scope="row" { (name) }
                @for facts in facts { td { @if let Some((_, value)) = facts.get(row) { (value) } } }
            } } }
        }
    }
}

fn facts(log: &RunLog, now: SystemTime) -> Facts {
    let last = log.steps.all.last();
    let number = |value: Option<f64>| value.map_or("-".to_owned(), short);
    let recipe = log.recipe.as_ref();
    vec![
        ("state", state(log)),
        ("steps", progress(log.steps_done(), recipe.map(|recipe| recipe.num_steps()))),
        ("tokens", of_tokens(log)),
        ("time left", time_left(log).unwrap_or_else(|| "-".to_owned())),
        ("training loss", number(last.map(|step| step.loss))),
        (
            "speed",
            last.map_or("-".to_owned(), |step| {
                format!("{} tokens/s", short(step.tokens_per_second))
            }),
        ),
        ("last step written", written(log, now)),
        ("device", recipe.map_or("-".to_owned(), device)),
        ("machine", log.machine.as_ref().map_or("-".to_owned(), machine)),
    ]
}

fn machine(machine: &Machine) -> String {
    let Machine { processor, threads, device, ranks, .. } = machine;
    let processor = if processor.is_empty() { "unnamed processor" } else { processor };
    let mut text = format!("{processor}, {}", counted(*threads as u64, "thread"));
    if *ranks > 1 {
        text = format!("{text}, {ranks} ranks");
    }
    match device.as_str() {
        "the CPU" => printable(&text),
        device => printable(&format!("{device}; {text}")),
    }
}

fn device(recipe: &Recipe) -> String {
    let device = match recipe.run.device {
        DeviceKind::Cpu => "CPU",
        DeviceKind::Cuda => "GPU",
    };
    format!("{device}, {:?}", recipe.run.dtype)
}

fn state(log: &RunLog) -> String {
    let stage = log.steps.stages.last();
    match (log.is_finished, stage) {
        (true, _) => "finished".to_owned(),
        (false, Some(stage)) => format!("not finished, in stage {}", stage.name),
        (false, None) => "no step yet".to_owned(),
    }
}

fn progress(done: u64, all: Option<u64>) -> String {
    match all {
        Some(all) if all != done => format!("{} of {}", HumanCount(done), HumanCount(all)),
        _ => HumanCount(done).to_string(),
    }
}

fn of_tokens(log: &RunLog) -> String {
    let last = log.steps.all.last().map_or(0.0, |step| step.tokens);
    let done = last.max(log.summary.tokens as f64);
    let all = log.recipe.as_ref().map(|recipe| {
        let stages = recipe.stages.iter();
        stages.map(|stage| stage.num_steps() as f64 * stage.batch_tokens as f64).sum::<f64>()
    });
    match all {
        Some(all) if all > done => format!("{} of {}", short(done), short(all)),
        _ => short(done),
    }
}

/// Returns the time of the remaining steps at the speed of recent steps. Evaluations and checkpoints are assumed as
/// frequent and as long as in the stage so far.
fn time_left(log: &RunLog) -> Option<String> {
    let recipe = log.recipe.as_ref().filter(|_| !log.is_finished)?;
    let rates = log.steps.all.iter().rev().take(RECENT).map(|step| step.tokens_per_second);
    let (count, sum) = rates
        .filter(|rate| rate.is_finite())
        .fold((0.0, 0.0), |(n, sum), rate| (n + 1.0, sum + rate));
    let (steps, tokens) = left(recipe, log.steps_done());
    let pauses = log.steps.stages.last().filter(|stage| stage.timed > 0).map_or(0.0, |stage| {
        (stage.speed.evaluation + stage.speed.checkpoint) / stage.timed as f64
    });
    let seconds = tokens * count / sum + steps * pauses;
    let seconds = Duration::try_from_secs_f64(seconds).ok()?;
    Some(format!("about {}", HumanDuration(seconds)))
}

/// Returns the steps and tokens of `recipe` that remain after `done` steps.
fn left(recipe: &Recipe, mut done: u64) -> (f64, f64) {
    let (mut steps, mut tokens) = (0.0, 0.0);
    for stage in &recipe.stages {
        let of_stage = stage.num_steps();
        let left = of_stage.saturating_sub(done) as f64;
        done = done.saturating_sub(of_stage);
        steps += left;
        tokens += left * stage.batch_tokens as f64;
    }
    (steps, tokens)
}

fn written(log: &RunLog, now: SystemTime) -> String {
    let Some(written) = log.written else { return "-".to_owned() };
    match now.duration_since(written) {
        Ok(age) if !log.is_finished && age < Duration::from_secs(24 * 3600) => {
            format!("{} ago", HumanDuration(age))
        }
        _ => utc(written),
    }
}
