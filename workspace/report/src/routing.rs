//! The use of heads by tokens: maps of the routed heads' load, and curves over the layers.

use std::collections::BTreeMap;

use maud::{Markup, html};
use moh_checkpoint::run_log::{RoutingLine, RoutingMoment};

use super::curves::{each, label, series};
use super::{figure, routing_history};
use crate::chart::{Cell, HeatMap, HeatRow, Line, LineChart, Look, color_bar};
use crate::loss_chart::describe;
use crate::run_log::{RoutingEvaluation, RunLog, load};

/// The most maps of a run, with a cell for every layer and head, and the most sets in a chart.
const MAX_MAPS: usize = 24;

impl RoutingEvaluation {
    fn when(&self) -> String {
        match self.moment {
            RoutingMoment::Loaded => "as loaded".to_owned(),
            RoutingMoment::Converted => "converted, not tuned".to_owned(),
            RoutingMoment::Step => format!("after step {}", self.step),
        }
    }

    fn map(&self) -> HeatMap {
        let cells = |line: &RoutingLine| {
            let cell = |selected| Cell::Share(load(line, selected));
            line.heads().map(|head| head.map_or(Cell::Shared, cell)).collect()
        };
        let rows = self.layers.iter();
        HeatMap {
            title: format!("Load of the routed heads on {}, {}", self.set, self.when()),
            description: self.describe(),
            axes: "rows: layers, columns: heads".to_owned(),
            rows: rows
                .map(|(number, line)| HeatRow { label: number.to_string(), cells: cells(line) })
                .collect(),
        }
    }

    fn describe(&self) -> String {
        let loads = self.layers.values().flat_map(|line| {
            line.selected.iter().map(|&selected| (load(line, selected), line.layer))
        });
        let loads: Vec<(f64, usize)> = loads.collect();
        let least = loads.iter().min_by(|a, b| a.0.total_cmp(&b.0));
        let most = loads.iter().max_by(|a, b| a.0.total_cmp(&b.0));
        let Some(((least, at_least), (most, at_most))) = least.zip(most) else {
            return "No routed heads.".to_owned();
        };
        format!(
            "Of the tokens, {:.1}% select the least used routed head (layer {at_least}) and {:.1}% the most \
             used one (layer {at_most}).",
            100.0 * least,
            100.0 * most
        )
    }

    fn figure(&self) -> Markup {
        html! {
            figure {
                (figure::caption(&self.set, &self.when()))
                (self.map().draw())
                p class="note" { (self.describe()) }
                details {
                    summary { "Numbers" }
                    div class="scroll" tabindex="0" { (self.table()) }
                }
            }
        }
    }

    fn table(&self) -> Markup {
        let columns =
            self.layers.values().map(|line| line.shared_heads + line.selected.len()).max();
        html! {
            table {
                caption { "Percent of the tokens that select each head; s: shared" }
                thead { tr {
                    th scope="col" { "layer" }
                    th scope="col" { "entropy" }
                    @for head in 0..columns.unwrap_or(0) { th scope="col" { (head) } }
                } }
                tbody { @for (layer, line) in &self.layers { tr {
                    th scope="row" { (layer) }
                    td { (format!("{:.3}", line.entropy)) }
                    @for head in line.heads() { @match head {
                        None => td class="unit" { "s" },
                        Some(selected) => td { (format!("{:.1}", 100.0 * load(line, selected))) },
                    } }
                } } }
            }
        }
    }
}

/// Returns the section about heads; empty if no layer of the runs routes.
pub(super) fn section(logs: &[RunLog]) -> Markup {
    if logs.iter().all(|log| log.routing.is_empty()) {
        return html! {};
    }
    html! {
        section {
            h2 { "How tokens use the heads" }
            p class="note" {
                "Load: the percentage of a validation set's tokens that select a routed head. Equal loads mean that \
                 all routed heads serve about as many tokens."
            }
            (color_bar())
            @for log in logs.iter().filter(|log| !log.routing.is_empty()) {
                @if logs.len() > 1 { h3 { (log.name) } }
                div class="panels" {
                    @for evaluation in by_set(log).into_iter().take(MAX_MAPS) {
                        (evaluation.figure())
                    }
                }
                @if log.routing.len() > MAX_MAPS {
                    p class="note" { "The first " (MAX_MAPS) " of " (log.routing.len()) " maps." }
                }
            }
            (over_layers(logs))
            (routing_history::part(logs))
        }
    }
}

fn by_set(log: &RunLog) -> Vec<&RoutingEvaluation> {
    let mut sorted: Vec<&RoutingEvaluation> = log.routing.iter().collect();
    sorted.sort_by_key(|evaluation| (evaluation.set != log.first_set, &evaluation.set));
    sorted
}

/// Returns charts of active heads and entropy by layer, of the newest evaluations.
fn over_layers(logs: &[RunLog]) -> Markup {
    let (mut active, mut entropy) = (Vec::new(), Vec::new());
    let mut routed = Vec::new();
    for (run_look, log) in each(logs) {
        // All sets select the same number of heads, so a single set is shown.
        if let Some(evaluation) = log.routing.last() {
            active.push(line(&label(&log.name), evaluation, run_look, active_share));
        }
        let newest: BTreeMap<&str, &RoutingEvaluation> =
            log.routing.iter().map(|evaluation| (evaluation.set.as_str(), evaluation)).collect();
        // The order of the other charts: the sort is stable.
        let mut newest: Vec<_> = newest.into_iter().collect();
        newest.sort_by_key(|(set, _)| *set != log.first_set);
        for (place, (set, evaluation)) in newest.into_iter().take(MAX_MAPS).enumerate() {
            let (name, look) = series(logs, log, run_look, set, place);
            entropy.push(line(&name, evaluation, look, |line| line.entropy));
            routed.extend(evaluation.layers.values().map(|line| line.selected.len()));
        }
    }
    let most = routed.iter().copied().max().filter(|most| routed.iter().all(|count| count == most));
    let reference = most.filter(|&count| count > 1).map(|count| {
        let bound = (count as f64).ln();
        (bound, format!("equal gates of {count} heads: {bound:.3}"))
    });
    let active = by_layer("Active heads by layer", "percent of the layer's heads", active);
    let entropy = by_layer("Entropy of the gates by layer", "nats, mean over tokens", entropy);
    let compares = logs.len() > 1;
    let charts = [
        LineChart { seen: vec![100.0], compares, ..active },
        LineChart { reference, compares, ..entropy },
    ];
    html! {
        div class="panels" { @for chart in &charts { (figure::panel(chart)) } }
    }
}

fn active_share(line: &RoutingLine) -> f64 {
    let selected: f64 = line.selected.iter().map(|&selected| load(line, selected)).sum();
    let heads = line.shared_heads + line.selected.len();
    100.0 * (line.shared_heads as f64 + selected) / heads.max(1) as f64
}

fn line(
    label: &str,
    evaluation: &RoutingEvaluation,
    look: Look,
    value: impl Fn(&RoutingLine) -> f64,
) -> Line {
    let layers = evaluation.layers.iter();
    Line {
        label: label.to_owned(),
        points: layers.map(|(&layer, line)| (layer as f64, value(line))).collect(),
        look: Look { dots: true, ..look },
    }
}

pub(super) fn by_layer(title: &str, unit: &str, lines: Vec<Line>) -> LineChart {
    LineChart {
        title: title.to_owned(),
        unit: unit.to_owned(),
        description: describe(&lines),
        across: "layer".to_owned(),
        whole: true,
        from_zero: true,
        lines,
        ..LineChart::default()
    }
}
