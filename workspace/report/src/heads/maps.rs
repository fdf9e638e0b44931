//! Maps of a layer's heads: their loads by text, side by side for all layers as in the paper's Figure 3, and the
//! similarity of each pair.

use maud::{Markup, html};

use super::{Model, routes};
use crate::chart::{Cell, HeatMap, HeatRow};
use crate::figure;
use crate::head_measures::{HeadDocument, LayerReport, OneHead};

const MAX_MAPS: usize = 128;

pub(super) fn loads(Model { document, .. }: &Model<'_>) -> Markup {
    let layers = document.layers.iter().filter(|layer| routes(layer));
    html! {
        div class="panels" {
            @for layer in layers.take(MAX_MAPS) { (figure::map(&load_map(document, layer))) }
        }
    }
}

fn load_map(document: &HeadDocument, layer: &LayerReport) -> HeatMap {
    let cell = |head: &OneHead, text: usize| match head.shared {
        true => Cell::Shared,
        false => head.load.get(text).map_or(Cell::Absent, |&load| Cell::Share(load)),
    };
    let rows = document.texts.iter().enumerate().map(|(number, text)| HeatRow {
        label: text.name.clone(),
        cells: layer.heads.iter().map(|head| cell(head, number)).collect(),
    });
    HeatMap {
        title: format!("Layer {}", layer.layer),
        description: describe(document, layer),
        axes: "rows: texts, columns: heads".to_owned(),
        rows: rows.collect(),
    }
}

/// Returns a sentence about the head with the largest difference of loads between two texts.
fn describe(document: &HeadDocument, layer: &LayerReport) -> String {
    let ends = |head: &&OneHead| {
        let loads = head.load.iter().copied().enumerate();
        let (least, most) = (
            loads.clone().min_by(|a, b| a.1.total_cmp(&b.1))?,
            loads.max_by(|a, b| a.1.total_cmp(&b.1))?,
        );
        Some((head.head, least, most))
    };
    let routed = layer.heads.iter().filter(|head| !head.shared);
    let widest = routed.filter_map(|head| ends(&head)).max_by(|a, b| {
        let width = |ends: &(usize, (usize, f64), (usize, f64))| ends.2.1 - ends.1.1;
        width(a).total_cmp(&width(b))
    });
    let Some((head, (least, low), (most, high))) = widest.filter(|_| document.texts.len() > 1)
    else {
        return String::new();
    };
    let name = |text: usize| document.texts.get(text).map_or("", |text| &text.name);
    format!(
        "Head {head} differs most: {:.1}% of the tokens of {} compute it, and {:.1}% of those of {}.",
        100.0 * low,
        name(least),
        100.0 * high,
        name(most)
    )
}

const MAX_CELLS: usize = 100_000;

/// Returns the maps of each layer, folded at first.
pub(super) fn pairs(Model { document, .. }: &Model<'_>) -> Markup {
    let heads = document.layers.first().map_or(1, |layer| layer.heads.len());
    let most = (MAX_CELLS / (2 * heads * heads)).max(1);
    html! {
        details {
            summary { "Each pair of heads" }
            div class="panels" {
                @for layer in document.layers.iter().take(most) {
                    (figure::map(&pair_map(layer, "patterns", layer.pattern_similarity, &layer.pattern_similarities)))
                    (figure::map(&pair_map(layer, "outputs", layer.output_similarity, &layer.output_similarities)))
                }
            }
            @if document.layers.len() > most {
                p class="note" { "The first " (most) " of " (document.layers.len()) " layers." }
            }
        }
    }
}

fn pair_map(
    layer: &LayerReport,
    what: &str,
    mean: Option<f64>,
    similarities: &[Vec<Option<f64>>],
) -> HeatMap {
    let cell = |value: &Option<f64>| value.map_or(Cell::Absent, Cell::Share);
    let rows = similarities.iter().enumerate().map(|(head, row)| HeatRow {
        label: head.to_string(),
        cells: row.iter().map(cell).collect(),
    });
    HeatMap {
        title: format!("Layer {}: {what}", layer.layer),
        description: mean
            .map_or(String::new(), |mean| format!("The mean of all pairs is {mean:.4}.")),
        axes: "rows and columns: heads".to_owned(),
        rows: rows.collect(),
    }
}
