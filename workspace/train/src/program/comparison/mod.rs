//! Variants of a recipe, trained one after the other. Shared stages are trained once, then each variant from its first
//! own stage. The end is a table and a record of all variants.

mod table;

use std::io::{Write as _, stdout};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use moh_program::exit::{self, StoppedEarly};
use moh_train::comparison::{PlannedRun, results};
use moh_train::{Comparison, TimeLimit, share_text};
use table::Row;

use crate::command_line::CommandLine;
use crate::training::Session;

/// Trains or continues every run of the comparison, as one rank.
pub(crate) fn train(session: &Session<'_>, comparison: &Comparison) -> anyhow::Result<()> {
    let _lock = match session.is_first() {
        true => Some(comparison.claim()?),
        false => None,
    };
    let mut has_trained = false;
    for place in order(session, comparison)? {
        let Some(run) = comparison.runs().get(place) else { continue };
        if !is_next(session, comparison, run, has_trained)? {
            continue;
        }
        if session.is_first() {
            exit::stderr_line(format_args!("{}", announcement(comparison, run)));
        }
        let (had_finished, _) =
            session.run(&mut run.recipe.clone(), run.parent.as_ref(), &run.command)?;
        has_trained |= !had_finished;
        if session.is_first() {
            if had_finished {
                exit::stderr_line(format_args!("{} has already finished", run.name));
            }
            comparison.write_record()?;
        }
    }
    match session.is_first() {
        true => print(comparison),
        false => Ok(()),
    }
}

/// Returns the indices of the runs in the first rank's order of training.
fn order(session: &Session<'_>, comparison: &Comparison) -> anyhow::Result<Vec<usize>> {
    let order = match session.is_first() {
        true => {
            Some(comparison.order()?.iter().map(usize::to_string).collect::<Vec<_>>().join(" "))
        }
        false => None,
    };
    let order = share_text(session.device, session.world, order)?;
    Ok(order.split_whitespace().map(str::parse).collect::<Result<_, _>>()?)
}

/// Returns whether the run is trained now. The first rank decides for all ranks. After another run, a run is not
/// started if the remaining time may not suffice for a step.
fn is_next(
    session: &Session<'_>,
    comparison: &Comparison,
    run: &PlannedRun,
    has_trained: bool,
) -> anyhow::Result<bool> {
    let is_up = |limit: TimeLimit| limit.is_up(Instant::now(), Duration::ZERO, None);
    let is_late = session.time_limit.is_some_and(is_up)
        && has_trained
        && !run.directory().summary().is_file();
    let decision = match session.is_first() {
        true if is_late || session.stop.load(Ordering::Relaxed) => Some("stop"),
        true if comparison.needs(run)? => Some("train"),
        _ => None,
    };
    let decision = decision.map(str::to_owned);
    match share_text(session.device, session.world, decision)?.as_str() {
        "stop" => {
            let name = &run.name;
            let text = format!("stopped before {name}: run the same command again to continue");
            Err(StoppedEarly(text).into())
        }
        decision => Ok(decision == "train"),
    }
}

/// Describes the run, and the stages that it shares.
fn announcement(comparison: &Comparison, run: &PlannedRun) -> String {
    let stages = |count: usize| {
        let names = run.recipe.stages.iter().take(count).map(|stage| stage.name.as_str());
        names.collect::<Vec<_>>().join(", ")
    };
    let directory = run.directory();
    let place = directory.root().display();
    if run.variant.is_none() {
        return format!("shared stages: {}, in {place}", stages(usize::MAX));
    }
    let begins = match &run.parent {
        Some(parent) => {
            let from = parent.root().file_name().unwrap_or_default().display();
            format!("continues {from} after {}", stages(run.num_shared))
        }
        None if comparison.variants().count() == 1 => "trains all stages".to_owned(),
        None => {
            let first = run.changes.first().map(|change| change.key.as_str());
            match first {
                Some(key) => format!("shares no stage, since it changes {key}"),
                None => "shares no stage, since the others change the first".to_owned(),
            }
        }
    };
    format!("variant {}: {begins}, in {place}", run.name)
}

/// Prints the table of all variants, and the command that makes their page.
fn print(comparison: &Comparison) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    for run in comparison.variants() {
        if let Some(results) = results(&run.directory())? {
            rows.push(Row { name: &run.name, changes: &run.changes, results });
        }
    }
    let mut out = stdout();
    writeln!(out, "{}", table::table(&rows))?;
    writeln!(out, "record   {}", comparison.record().display())?;
    for run in comparison.variants() {
        writeln!(out, "model    {}", run.directory().export().display())?;
    }
    let runs = comparison
        .variants()
        .fold(CommandLine::new("moh-report"), |command, run| command.path(&run.recipe.run.dir));
    let page = comparison.directory().join("report.html");
    writeln!(out, "\nTry next:\n  {}", runs.path_option("--out", &page))?;
    Ok(())
}
