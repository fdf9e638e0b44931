//! Maps of how alike each two heads of a layer are.

use crate::head_measures::LayerReport;
use maud::{Markup, html};

use super::Model;
use crate::chart::{Cell, HeatMap, HeatRow};
use crate::figure;

const MAX_CELLS: usize = 100_000;

/// The maps of each layer, closed at first.
pub(super) fn part(Model { document, .. }: &Model<'_>) -> Markup {
    let heads = document.layers.first().map_or(1, |layer| layer.heads.len());
    let most = (MAX_CELLS / (2 * heads * heads)).max(1);
    html! {
        details {
            summary { "Each pair of heads" }
            div class="panels" {
                @for layer in document.layers.iter().take(most) {
                    (figure::map(&map(layer, "patterns", layer.pattern_similarity, &layer.pattern_similarities)))
                    (figure::map(&map(layer, "outputs", layer.output_similarity, &layer.output_similarities)))
                }
            }
            @if document.layers.len() > most {
                p class="note" { "The first " (most) " of " (document.layers.len()) " layers." }
            }
        }
    }
}

fn map(
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
