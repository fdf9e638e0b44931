//! Means over all layers: a column for each model.

use crate::head_measures::{HeadDocument, LayerReport, OneHead, mean};
use maud::{Markup, html};
use moh_program::counted;

use super::Model;
use crate::chart::printable;

/// A name and a value of a document.
type Row = (&'static str, fn(&HeadDocument) -> String);

const ROWS: [Row; 10] = [
    ("layers, heads", |document| {
        let heads = document.layers.first().map_or(0, |layer| layer.heads.len());
        format!("{}, {heads}", document.layers.len())
    }),
    ("shared heads", |document| heads(document, true).count().to_string()),
    ("heads that a token computes", |document| {
        let loads = document.layers.iter().flat_map(|layer| &layer.heads).flat_map(|h| &h.load);
        let all = document.layers.iter().map(|layer| layer.heads.len()).sum::<usize>();
        let texts = document.texts.len().max(1) as f64;
        format!("{:.1}%", 100.0 * loads.sum::<f64>() / texts / all.max(1) as f64)
    }),
    ("similarity of attention patterns", |document| {
        number(of_layers(document, |layer| layer.pattern_similarity), 4)
    }),
    ("similarity of outputs", |document| {
        number(of_layers(document, |layer| layer.output_similarity), 4)
    }),
    ("feature rank of shared heads", |document| rank(document, true)),
    ("feature rank of routed heads", |document| rank(document, false)),
    ("distance of attention, tokens", |document| {
        number(mean(all_heads(document).filter_map(|head| head.distance)), 1)
    }),
    ("entropy of attention, nats", |document| {
        number(mean(all_heads(document).filter_map(|head| head.entropy)), 3)
    }),
    ("entropy of gates, nats", |document| {
        number(of_layers(document, |layer| mean(layer.gate_entropy.iter().flatten().copied())), 4)
    }),
];

pub(super) fn section(models: &[Model<'_>]) -> Markup {
    html! {
        section {
            @for Model { document, .. } in models.iter().filter(|model| !model.document.layers.is_empty()) {
                p class="note" {
                    (printable(&document.model)) ", windows of " (document.sequence_length) " tokens: "
                    @for (number, text) in document.texts.iter().enumerate() {
                        @if number > 0 { ", " }
                        (text.name) " (" (counted(text.tokens as u64, "token")) ")"
                    }
                }
            }
            div class="scroll" tabindex="0" { table {
                @if models.len() > 1 {
                    thead { tr { th {} @for model in models { th scope="col" { (model.name) } } } }
                }
                tbody { @for (name, value) in ROWS { tr {
                    th scope="row" { (name) }
                    @for model in models { td { (value(model.document)) } }
                } } }
            } }
        }
    }
}

fn all_heads(document: &HeadDocument) -> impl Iterator<Item = &OneHead> {
    document.layers.iter().flat_map(|layer| &layer.heads)
}

fn heads(document: &HeadDocument, shared: bool) -> impl Iterator<Item = &OneHead> {
    all_heads(document).filter(move |head| head.shared == shared)
}

fn rank(document: &HeadDocument, shared: bool) -> String {
    number(mean(heads(document, shared).map(|head| head.feature_rank as f64)), 2)
}

/// Returns the mean over the layers that have a value.
fn of_layers(document: &HeadDocument, value: fn(&LayerReport) -> Option<f64>) -> Option<f64> {
    mean(document.layers.iter().filter_map(value))
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}
