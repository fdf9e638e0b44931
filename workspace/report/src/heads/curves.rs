//! Curves over the layers, of shared and routed heads, of one or more models.

use crate::head_measures::{HeadDocument, LayerReport, OneHead, mean};
use maud::{Markup, html};

use super::Model;
use crate::chart::{Line, Look};
use crate::figure;
use crate::routing::by_layer;

type Chart = (&'static str, &'static str, Values);

/// The values of a chart's curves, for each model.
enum Values {
    /// A value of each layer.
    Layer(fn(&LayerReport) -> Option<f64>),
    /// Means of the heads, separate for shared and routed heads.
    Heads(fn(&OneHead) -> Option<f64>),
}

const CHARTS: [Chart; 5] = [
    (
        "Similarity of attention patterns",
        "mean of all pairs of heads",
        Values::Layer(|layer| layer.pattern_similarity),
    ),
    (
        "Similarity of outputs",
        "mean of all pairs of heads",
        Values::Layer(|layer| layer.output_similarity),
    ),
    (
        "Feature rank",
        "singular values with 99% of the squares",
        Values::Heads(|head| Some(head.feature_rank as f64)),
    ),
    ("Distance of attention", "tokens", Values::Heads(|head| head.distance)),
    ("Entropy of attention", "nats", Values::Heads(|head| head.entropy)),
];

pub(super) fn section(models: &[Model<'_>]) -> Markup {
    html! {
        section {
            h2 { "By layer" }
            div class="panels" {
                @for (title, unit, values) in &CHARTS {
                    @let lines = lines(models, values);
                    @if !lines.is_empty() {
                        @let chart = by_layer(title, unit, lines);
                        (figure::panel(&crate::chart::LineChart { compares: models.len() > 1, ..chart }))
                    }
                }
                (gates(models))
            }
        }
    }
}

fn lines(models: &[Model<'_>], values: &Values) -> Vec<Line> {
    let mut lines = Vec::new();
    for (number, Model { document, .. }) in models.iter().enumerate() {
        match values {
            Values::Layer(value) => {
                lines.push(line(models, number, 0, "", points(document, value)))
            }
            Values::Heads(value) => {
                for (place, kind) in ["shared", "routed"].into_iter().enumerate() {
                    let of_kind = |layer: &LayerReport| {
                        let heads = layer.heads.iter().filter(|head| head.shared == (place == 0));
                        mean(heads.filter_map(value))
                    };
                    lines.push(line(models, number, place, kind, points(document, of_kind)));
                }
            }
        }
    }
    lines.retain(|line| !line.points.is_empty());
    lines
}

/// Returns the curve `place`, `kind`, of a model. If there are several models, it has the model's name and colour.
fn line(
    models: &[Model<'_>],
    number: usize,
    place: usize,
    kind: &str,
    points: Vec<(f64, f64)>,
) -> Line {
    let name = &models[number].name;
    let of_several = Look { color: number, ..Look::nth(place) };
    let (label, look) = match (models.len(), kind) {
        (1, kind) => (kind.to_owned(), Look::nth(place)),
        (_, "") => (name.clone(), of_several),
        (_, kind) => (format!("{name}, {kind}"), of_several),
    };
    Line { label, points, look: Look { dots: true, ..look } }
}

fn points(document: &HeadDocument, value: impl Fn(&LayerReport) -> Option<f64>) -> Vec<(f64, f64)> {
    let layers = document.layers.iter();
    layers.filter_map(|layer| Some((layer.layer as f64, value(layer)?))).collect()
}

fn gates(models: &[Model<'_>]) -> Markup {
    let mut lines = Vec::new();
    for (model, Model { document, .. }) in models.iter().enumerate() {
        for (number, text) in document.texts.iter().enumerate() {
            let points =
                points(document, |layer| layer.gate_entropy.as_ref()?.get(number).copied());
            lines.push(line(models, model, number, &text.name, points));
        }
    }
    lines.retain(|line| !line.points.is_empty());
    html! {
        @if !lines.is_empty() {
            (figure::panel(&by_layer("Entropy of the gates", "nats, mean over tokens", lines)))
        }
    }
}
