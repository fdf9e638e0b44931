//! Curves over the layers: of shared and routed heads, of one model or of several.

use crate::head_measures::{HeadDocument, LayerReport, OneHead};
use maud::{Markup, html};

use super::{Model, mean};
use crate::chart::{Line, Look};
use crate::figure;
use crate::routing::by_layer;

/// The title, the unit and the values of a chart.
type Chart = (&'static str, &'static str, Values);

/// What a chart has a curve of, for each model.
enum Values {
    /// A layer.
    Layer(fn(&LayerReport) -> Option<f64>),
    /// The heads, shared and routed ones apart.
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

/// The section.
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
    let several = models.len() > 1;
    let label = |name: &str, kind: &str| match (several, kind) {
        (true, "") => name.to_owned(),
        (true, kind) => format!("{name}, {kind}"),
        (false, kind) => kind.to_owned(),
    };
    let mut lines = Vec::new();
    for (number, Model { name, document }) in models.iter().enumerate() {
        let color = Look { dots: true, color: number, ..Look::default() };
        match values {
            Values::Layer(value) => {
                let points = points(document, value);
                lines.push(Line { label: label(name, ""), points, look: color });
            }
            Values::Heads(value) => {
                for (dash, (kind, shared)) in
                    [("shared", true), ("routed", false)].into_iter().enumerate()
                {
                    let of_kind = |layer: &LayerReport| {
                        mean(layer.heads.iter().filter(|head| head.shared == shared), value)
                    };
                    let look = match several {
                        true => Look { dash, ..color },
                        false => Look { dots: true, ..Look::nth(dash) },
                    };
                    let points = points(document, of_kind);
                    lines.push(Line { label: label(name, kind), points, look });
                }
            }
        }
    }
    lines.retain(|line| !line.points.is_empty());
    lines
}

fn points(document: &HeadDocument, value: impl Fn(&LayerReport) -> Option<f64>) -> Vec<(f64, f64)> {
    let layers = document.layers.iter();
    layers.filter_map(|layer| Some((layer.layer as f64, value(layer)?))).collect()
}

/// The entropy of the gates, a curve for each text of each model.
fn gates(models: &[Model<'_>]) -> Markup {
    let mut lines = Vec::new();
    for (model, Model { name, document }) in models.iter().enumerate() {
        for (number, text) in document.texts.iter().enumerate() {
            let points =
                points(document, |layer| layer.gate_entropy.as_ref()?.get(number).copied());
            let (label, look) = match models.len() {
                1 => (text.name.clone(), Look::nth(number)),
                _ => {
                    let label = format!("{name}, {}", text.name);
                    (label, Look { color: model, dash: number, ..Look::default() })
                }
            };
            lines.push(Line { label, points, look: Look { dots: true, ..look } });
        }
    }
    lines.retain(|line| !line.points.is_empty());
    html! {
        @if !lines.is_empty() {
            (figure::panel(&by_layer("Entropy of the gates", "nats, mean over tokens", lines)))
        }
    }
}
