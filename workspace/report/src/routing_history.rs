//! The use of heads over training: curves of the inequality of the loads, and maps of each layer and head over time.

use std::collections::BTreeSet;

use maud::{Markup, html};

use super::curves::{each, over_tokens, series};
use super::figure;
use crate::chart::{Cell, HeatRow, Line, LineChart, Look, TimeMap};
use crate::run_log::{Loads, RoutingHistory, RunLog, Spread};
use moh_program::counted;

/// The most cells of the maps of heads on a page, which determine its size.
const MAX_CELLS: usize = 20_000;

/// The most rows of a map of layers.
const MAX_LAYERS: usize = 512;

/// The number of layers with open maps of their heads. The maps of other layers are folded.
const SEEN: usize = 5;

/// The title, the unit and the value of a chart of evaluations.
type Measure = (&'static str, &'static str, fn(&Spread) -> f64);

const MEASURES: [Measure; 3] = [
    ("Imbalance of the loads", "percent, mean of the layers", |spread| 100.0 * spread.mean),
    ("Imbalance of the most unequal layer", "percent", |spread| 100.0 * spread.most),
    ("Load of the least used routed head", "percent of the tokens", |spread| {
        100.0 * spread.least_load
    }),
];

/// Returns the part; empty for runs with at most one evaluation.
pub(super) fn part(logs: &[RunLog]) -> Markup {
    let has_many = |log: &&RunLog| log.routing_histories.iter().any(is_long);
    let num_runs = logs.iter().filter(has_many).count();
    html! {
        @if num_runs > 0 {
            h3 { "Over training" }
            p class="note" {
                "Imbalance: the standard deviation of the loads of a layer's routed heads, in percent of their mean. \
                 It is 0% if all serve as many tokens, and decreases where the balance loss works. In the maps, with \
                 the colours of the loads, a head that stays dark is unused."
            }
            div class="panels" {
                @for chart in charts(logs) { (figure::panel_over_tokens(&chart, false)) }
            }
            @for log in logs.iter().filter(has_many) {
                @if logs.len() > 1 { h3 { (log.name) } }
                @if let Some(history) = log.routing_histories.iter().find(|history| is_long(history)) {
                    (maps(history, MAX_CELLS / num_runs))
                }
            }
        }
    }
}

/// Returns whether the history has more than the single evaluation that the maps of loads show.
fn is_long(history: &RoutingHistory) -> bool {
    history.spreads.len() > 1
}

fn charts(logs: &[RunLog]) -> Vec<LineChart> {
    let chart = |(title, unit, value): Measure| {
        let lines = each(logs).flat_map(|(run_look, log)| {
            log.routing_histories.iter().enumerate().map(move |(place, history)| {
                let (label, look) = series(logs, log, run_look, &history.set, place);
                let point = |spread: &Spread| Some((log.tokens_after(spread.step)?, value(spread)));
                let points = history.spreads.iter().filter_map(point).collect();
                Line { label, points, look: Look { dots: true, ..look } }
            })
        });
        over_tokens(logs, title, unit, lines.collect(), true)
    };
    MEASURES.into_iter().map(chart).filter(|chart| !chart.is_empty()).collect()
}

/// Returns the maps of a set: a map of the layers, and a map of the heads of each layer. The most unequal layers come
/// first, as many as `max_cells` allow.
fn maps(history: &RoutingHistory, max_cells: usize) -> Markup {
    let RoutingHistory { set, spreads, picked, .. } = history;
    let layers: BTreeSet<usize> =
        picked.iter().flat_map(|loads| loads.layers.keys().copied()).collect();
    let mut unequal: Vec<usize> = layers.iter().copied().collect();
    let newest = |layer: &usize| {
        picked
            .iter()
            .rev()
            .find_map(|loads| Some(loads.layers.get(layer)?.imbalance))
            .unwrap_or(0.0)
    };
    unequal.sort_by(|a, b| newest(b).total_cmp(&newest(a)));
    let mut left = max_cells;
    let mut seen: Vec<usize> = unequal
        .into_iter()
        .map_while(|layer| {
            left = left.checked_sub(num_heads(picked, layer) * picked.len())?;
            Some(layer)
        })
        .collect();
    let mut others = seen.split_off(seen.len().min(SEEN));
    let num_shown = seen.len() + others.len();
    seen.sort_unstable();
    others.sort_unstable();
    html! {
        p class="note" {
            "On " (set) ": a column for each evaluation"
            @if picked.len() < spreads.len() { ", " (picked.len()) " of " (spreads.len()) " with the newest" }
            ", by the steps done. The layers whose loads are the most unequal now come first"
            @if num_shown < layers.len() { ", " (num_shown) " of the " (layers.len()) " in all" } "."
        }
        div class="panels" {
            figure {
                (figure::caption("Imbalance of each layer", "percent"))
                (map_of_layers(history, &layers).draw())
            }
            (heads(history, &seen))
        }
        @if !others.is_empty() {
            details {
                summary { "Heads of " (counted(others.len() as u64, "more layer")) }
                div class="panels" { (heads(history, &others)) }
            }
        }
    }
}

fn heads(history: &RoutingHistory, layers: &[usize]) -> Markup {
    html! {
        @for &layer in layers {
            figure {
                (figure::caption(&format!("Layer {layer}"), "load of each head"))
                (map_of_heads(history, layer).draw())
            }
        }
    }
}

/// Returns the most heads that a layer had at any evaluation.
fn num_heads(picked: &[Loads], layer: usize) -> usize {
    let of = |loads: &Loads| Some(loads.layers.get(&layer)?.heads.len());
    picked.iter().filter_map(of).max().unwrap_or(0)
}

fn map_of_layers(history: &RoutingHistory, layers: &BTreeSet<usize>) -> TimeMap {
    let row = |&number: &usize| {
        let cell = |loads: &Loads| match loads.layers.get(&number) {
            Some(layer) => Cell::Share(layer.imbalance.into()),
            None => Cell::Absent,
        };
        HeatRow { label: number.to_string(), cells: history.picked.iter().map(cell).collect() }
    };
    let rows: Vec<HeatRow> = layers.iter().take(MAX_LAYERS).map(row).collect();
    map(history, format!("Imbalance of each layer on {}", history.set), "layers", rows)
}

fn map_of_heads(history: &RoutingHistory, layer: usize) -> TimeMap {
    let row = |number: usize| {
        let cell = |loads: &Loads| match loads.layers.get(&layer).and_then(|l| l.heads.get(number))
        {
            Some(Some(load)) => Cell::Share((*load).into()),
            Some(None) => Cell::Shared,
            None => Cell::Absent,
        };
        HeatRow { label: number.to_string(), cells: history.picked.iter().map(cell).collect() }
    };
    let rows = (0..num_heads(&history.picked, layer)).map(row).collect();
    map(history, format!("Load of each head of layer {layer} on {}", history.set), "heads", rows)
}

fn map(
    history: &RoutingHistory,
    title: String,
    rows_are: &'static str,
    rows: Vec<HeatRow>,
) -> TimeMap {
    let share = |cell: &Cell| match cell {
        Cell::Share(share) => Some(*share),
        _ => None,
    };
    let ends = |column: Option<usize>| {
        let shares = rows.iter().filter_map(|row| share(row.cells.get(column?)?));
        let (least, most) = shares
            .fold((f64::INFINITY, 0.0), |(least, most): (f64, f64), share| {
                (least.min(share), most.max(share))
            });
        match least <= most {
            true => format!("{:.1}% to {:.1}%", 100.0 * least, 100.0 * most),
            false => "none".to_owned(),
        }
    };
    let steps: Vec<u64> = history.picked.iter().map(|loads| loads.step).collect();
    let description = format!(
        "{} evaluations; at the first one {}, at the newest {}.",
        history.spreads.len(),
        ends(Some(0)),
        ends(steps.len().checked_sub(1))
    );
    TimeMap { title, description, rows_are, rows, steps }
}
