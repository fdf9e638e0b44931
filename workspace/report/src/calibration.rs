//! The results of a run's calibrations: losses, shared heads, and the error without the other heads.

use maud::{Markup, html};
use moh_checkpoint::run_log::{CalibratedLayer, StageCalibration};
use moh_program::counted;

use super::figure;
use super::losses::shown;
use super::routing::by_layer;
use crate::chart::{Line, LineChart, Look};
use crate::run_log::RunLog;

/// Returns the section; empty if no run has calibrated a stage.
pub(super) fn section(logs: &[RunLog]) -> Markup {
    let has = |log: &&RunLog| !log.summary.calibrations.is_empty();
    html! {
        @if logs.iter().any(|log| has(&log)) {
            section {
                h2 { "Heads chosen by measurement" }
                p class="note" {
                    "Error: the squared difference of a layer's attention output from the dense model's on the \
                     calibration tokens that are held out, relative to the latter's squared size."
                }
                @for log in logs.iter().filter(has) {
                    @if logs.len() > 1 { h3 { (log.name) } }
                    @for calibration in &log.summary.calibrations { (of_stage(calibration)) }
                }
            }
        }
    }
}

fn of_stage(calibration: &StageCalibration) -> Markup {
    let StageCalibration { stage, step, tokens, held_out_tokens, loss_dense, loss, .. } =
        calibration;
    html! {
        p {
            "Stage " (stage) ", before step " (step + 1) ", calibrated on " (counted(*tokens, "token")) ": "
            @if *held_out_tokens > 0 { "on the " (held_out_tokens) " that are held out " }
            "the dense model's loss is " (shown(*loss_dense)) ", and that of the chosen heads " (shown(*loss))
            @if calibration.refit { " with refitted output projections" }
            "."
        }
        div class="panels" { (figure::panel(&errors(calibration))) }
        details {
            summary { "Chosen heads" }
            div class="scroll" tabindex="0" { (table(calibration)) }
        }
    }
}

fn errors(calibration: &StageCalibration) -> LineChart {
    type Error = fn(&CalibratedLayer) -> Option<f64>;
    let series: [(&str, Error); 2] = [
        ("the dense model's projection", |layer| Some(layer.error_before)),
        ("refitted", |layer| layer.error),
    ];
    let lines = series.into_iter().enumerate().map(|(number, (label, error))| {
        let layers = calibration.layers.iter().enumerate();
        let points = layers.filter_map(|(layer, chosen)| Some((layer as f64, error(chosen)?)));
        let look = Look { dots: true, ..Look::nth(number) };
        Line { label: label.to_owned(), points: points.collect(), look }
    });
    let lines = lines.filter(|line| !line.points.is_empty()).collect();
    by_layer("Error of the attention output by layer", "relative", lines)
}

fn table(calibration: &StageCalibration) -> Markup {
    let layers = &calibration.layers;
    let has_router = calibration.has_fitted_router();
    html! {
        table {
            thead { tr {
                th scope="col" { "layer" }
                th scope="col" { "shared heads" }
                th scope="col" { "of the others, by token" }
                th scope="col" { "error" }
                @if calibration.refit { th scope="col" { "refitted" } }
                @if has_router { th scope="col" { "explained by the router" } }
            } }
            tbody { @for (layer, chosen) in layers.iter().enumerate() { tr {
                th scope="row" { (layer) }
                td { (list(&chosen.shared_heads)) }
                td { (chosen.routed_top_k) }
                td { (shown(chosen.error_before)) }
                @if calibration.refit { td { (or_dash(chosen.error)) } }
                @if has_router { td { (or_dash(chosen.router_explained)) } }
            } } }
        }
    }
}

fn or_dash(value: Option<f64>) -> String {
    value.map_or("-".to_owned(), shown)
}

fn list(heads: &[usize]) -> String {
    match heads {
        [] => "none".to_owned(),
        _ => heads.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
    }
}
