//! The heads that each token of a sentence computes, and attention maps of shared and routed heads.

use crate::head_measures::{Sentence, SentenceLayer, SentenceToken};
use maud::{Markup, html};

use super::Model;
use super::served::visible;
use crate::chart::{Cell, HeatMap, HeatRow};
use crate::figure;

/// The most tokens of the table, and of the maps.
const MAX_TOKENS: usize = 512;
const MAX_MAP_TOKENS: usize = 64;

/// The most layers with maps, evenly spaced, and the most heads of each kind in a layer.
const MAP_LAYERS: usize = 3;
const MAP_HEADS: usize = 2;

/// Returns the table and the maps of a document's sentence.
pub(super) fn part(Model { document, .. }: &Model<'_>) -> Markup {
    let Some(sentence) = &document.sentence else { return html! {} };
    let maps = maps(sentence);
    html! {
        (table(sentence))
        p class="note" {
            "Attention of shared heads and of those routed heads that most tokens compute. A row without colours is of a \
             token that does not compute the head."
        }
        div class="panels" { @for map in &maps { (figure::map(map)) } }
        @if sentence.tokens.len() > MAX_MAP_TOKENS {
            p class="note" { "The first " (MAX_MAP_TOKENS) " of " (sentence.tokens.len()) " tokens." }
        }
    }
}

fn routing(sentence: &Sentence) -> Vec<&SentenceLayer> {
    let routes = |layer: &&SentenceLayer| layer.shared_heads.len() < layer.maps.len();
    sentence.layers.iter().filter(routes).collect()
}

fn table(sentence: &Sentence) -> Markup {
    let layers = routing(sentence);
    html! {
        @if layers.is_empty() {
            p { "Every token computes all heads: the model is dense." }
        } @else {
            div class="scroll" tabindex="0" { table {
                caption { "Routed heads that each token selects, by layer" }
                thead { tr {
                    th scope="col" { "token" }
                    @for layer in &layers { th scope="col" { (layer.layer) } }
                } }
                tbody { @for (number, token) in sentence.tokens.iter().enumerate().take(MAX_TOKENS) { tr {
                    th scope="row" { code { (visible(&token.text)) } }
                    @for layer in &layers { td { (selected(layer, number)) } }
                } } }
            } }
            @if sentence.tokens.len() > MAX_TOKENS {
                p class="note" { "The first " (MAX_TOKENS) " of " (sentence.tokens.len()) " tokens." }
            }
        }
    }
}

fn selected(layer: &SentenceLayer, token: usize) -> String {
    let active = layer.active.get(token).into_iter().flatten();
    let routed = active.filter(|head| !layer.shared_heads.contains(head));
    routed.map(usize::to_string).collect::<Vec<_>>().join(" ")
}

/// Returns maps of some layers, including the first and the last.
fn maps(sentence: &Sentence) -> Vec<HeatMap> {
    let (layers, last) = (&sentence.layers, sentence.layers.len().saturating_sub(1));
    let mut picked: Vec<usize> =
        (0..MAP_LAYERS).map(|number| number * last / (MAP_LAYERS - 1)).collect();
    picked.dedup();
    let of_layer = |layer| heads(layer).into_iter().map(move |head| (layer, head));
    let all = picked.into_iter().filter_map(|layer| layers.get(layer)).flat_map(of_layer);
    all.map(|(layer, (head, kind))| map(&sentence.tokens, layer, head, kind)).collect()
}

/// Returns the first shared heads of a layer and the routed heads that most tokens compute, with their kinds.
fn heads(layer: &SentenceLayer) -> Vec<(usize, &'static str)> {
    let shared = layer.shared_heads.iter().map(|&head| (head, "shared"));
    let is_routed = |head: &usize| !layer.shared_heads.contains(head);
    let tokens = |head: &usize| layer.active.iter().filter(|active| active.contains(head)).count();
    let mut routed: Vec<usize> = (0..layer.maps.len()).filter(is_routed).collect();
    routed.sort_by_cached_key(|head| std::cmp::Reverse(tokens(head)));
    let routed = routed.into_iter().map(|head| (head, "routed"));
    shared.take(MAP_HEADS).chain(routed.take(MAP_HEADS)).collect()
}

fn map(tokens: &[SentenceToken], layer: &SentenceLayer, head: usize, kind: &str) -> HeatMap {
    let computes =
        |token: usize| layer.active.get(token).is_some_and(|active| active.contains(&head));
    let columns = tokens.len().min(MAX_MAP_TOKENS);
    let cells = |token: usize, row: &[f32]| -> Vec<Cell> {
        let seen = row.iter().take(columns).map(|&weight| match computes(token) {
            true => Cell::Share(f64::from(weight)),
            false => Cell::Absent,
        });
        seen.chain(std::iter::repeat(Cell::Absent)).take(columns).collect()
    };
    let rows = layer.maps.get(head).into_iter().flatten().zip(tokens).enumerate().take(columns);
    let count = (0..tokens.len()).filter(|&token| computes(token)).count();
    HeatMap {
        title: format!("Layer {}, head {head}, {kind}", layer.layer),
        description: format!("{count} of {} tokens compute it.", tokens.len()),
        axes: "rows: tokens, columns: those that they attend to".to_owned(),
        rows: rows
            .map(|(token, (row, text))| HeatRow {
                label: visible(&text.text),
                cells: cells(token, row),
            })
            .collect(),
    }
}
