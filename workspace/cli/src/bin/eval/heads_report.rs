//! The output of `moh-eval heads`: a table for each layer, and the heads of each token of a sentence.

use std::io::Write;
use std::iter;

use moh_program::table::aligned;
use moh_report::head_measures::{
    HeadDocument, LayerReport, OneHead, Sentence, SentenceLayer, mean,
};

/// Writes a document as text.
pub(crate) fn write(out: &mut impl Write, document: &HeadDocument) -> std::io::Result<()> {
    if !document.layers.is_empty() {
        write_report(out, document)?;
    }
    match &document.sentence {
        Some(sentence) => write_sentence(out, sentence),
        None => Ok(()),
    }
}

/// Writes a table for each layer, and the means of shared and of routed heads over all layers.
fn write_report(out: &mut impl Write, report: &HeadDocument) -> std::io::Result<()> {
    let texts: Vec<String> =
        report.texts.iter().map(|text| format!("{} ({} tokens)", text.name, text.tokens)).collect();
    writeln!(out, "load on {}", texts.join(", "))?;
    for layer in &report.layers {
        write_layer(out, layer)?;
    }
    let heads = || report.layers.iter().flat_map(|layer| &layer.heads);
    for (what, shared) in [("shared", true), ("routed", false)] {
        let of_kind = || heads().filter(|head| head.shared == shared);
        if let Some(mean) = mean(of_kind().map(|head| head.feature_rank as f64)) {
            let count = of_kind().count();
            writeln!(out, "\nmean feature rank of {count} {what} heads: {mean:.2}")?;
        }
    }
    let of_layers = |value: fn(&LayerReport) -> Option<f64>| {
        number(mean(report.layers.iter().filter_map(value)), 4)
    };
    let patterns = of_layers(|layer| layer.pattern_similarity);
    let outputs = of_layers(|layer| layer.output_similarity);
    writeln!(
        out,
        "\nmean similarity of two heads: attention patterns {patterns}, outputs {outputs}"
    )
}

fn write_layer(out: &mut impl Write, layer: &LayerReport) -> std::io::Result<()> {
    write!(
        out,
        "\nlayer {}: similarity of patterns {}, of outputs {}",
        layer.layer,
        number(layer.pattern_similarity, 4),
        number(layer.output_similarity, 4)
    )?;
    if let Some(entropies) = &layer.gate_entropy {
        let shown: Vec<String> = entropies.iter().map(|nats| format!("{nats:.4}")).collect();
        write!(out, ", gate entropy {} nats", shown.join(", "))?;
    }
    writeln!(out)?;
    let header = ["head", "load", "rank", "distance", "entropy", "tokens"];
    write!(out, "{}", aligned(header, layer.heads.iter().map(row), &[1, 5]))
}

fn row(head: &OneHead) -> [String; 6] {
    let OneHead { head, shared, load, feature_rank, distance, entropy, tokens } = head;
    let mark = if *shared { "*" } else { " " };
    let loads: Vec<String> = load.iter().map(|load| format!("{:5.1}%", 100.0 * load)).collect();
    let tokens: Vec<String> = tokens
        .iter()
        .map(|token| format!("{:?} {:.0}%", token.shown(), 100.0 * token.share))
        .collect();
    [
        format!("{head}{mark}"),
        loads.join("  "),
        feature_rank.to_string(),
        number(*distance, 1),
        number(*entropy, 3),
        tokens.join(", "),
    ]
}

/// Writes a line for each token, with the routed heads that it selects in each layer.
fn write_sentence(out: &mut impl Write, sentence: &Sentence) -> std::io::Result<()> {
    let routes = |layer: &&SentenceLayer| layer.shared_heads.len() < layer.maps.len();
    let layers: Vec<&SentenceLayer> = sentence.layers.iter().filter(routes).collect();
    if layers.is_empty() {
        return writeln!(out, "\nevery token computes all heads: the model is dense");
    }
    let cell = |layer: &SentenceLayer, token: usize| {
        let selected = layer.active[token].iter().filter(|head| !layer.shared_heads.contains(head));
        selected.map(usize::to_string).collect::<Vec<_>>().join(" ")
    };
    let header = iter::once("token".to_owned())
        .chain(layers.iter().map(|layer| format!("layer {}", layer.layer)));
    let rows = sentence.tokens.iter().enumerate().map(|(token, text)| {
        let cells = layers.iter().map(|layer| cell(layer, token));
        iter::once(format!("{:?}", text.text)).chain(cells).collect::<Vec<_>>()
    });
    let left: Vec<usize> = (0..=layers.len()).collect();
    writeln!(out, "\nrouted heads that each token selects")?;
    write!(out, "{}", aligned(header.collect::<Vec<_>>(), rows, &left))
}

fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}
