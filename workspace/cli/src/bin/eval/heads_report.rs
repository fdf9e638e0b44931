//! What `moh-eval heads` prints: a table for each layer, the heads of each token of a sentence, or JSON.

use std::io::Write;

use moh_data::TextTokenizer;
use moh_eval::heads::{HeadReport, LayerReport, OneHead, SentenceLayer};
use serde_json::{Value, json};

use crate::model::NamedModel;

/// What was measured.
#[derive(Default)]
pub(crate) struct MeasuredHeads {
    /// On token files.
    pub report: Option<HeadReport>,
    /// On a sentence.
    pub sentence: Option<Sentence>,
}

/// A sentence, and the heads of its tokens.
pub(crate) struct Sentence {
    pub ids: Vec<u32>,
    pub layers: Vec<SentenceLayer>,
}

/// Prints what was measured with windows of `length` tokens.
pub(crate) fn print(
    out: &mut impl Write,
    model: &NamedModel,
    length: usize,
    measured: &MeasuredHeads,
    as_json: bool,
) -> anyhow::Result<()> {
    let text = |id: u32| token_text(model.tokenizer.as_ref(), id);
    if as_json {
        let report = to_json(&model.name, length, measured, &text)?;
        return Ok(writeln!(out, "{report:#}")?);
    }
    if let Some(report) = &measured.report {
        write_report(out, report, &text)?;
    }
    if let Some(sentence) = &measured.sentence {
        write_sentence(out, sentence, &text)?;
    }
    Ok(())
}

/// A token as text; its id without a tokenizer.
fn token_text(tokenizer: Option<&TextTokenizer>, id: u32) -> String {
    let decoded = tokenizer.and_then(|tokenizer| tokenizer.decode(&[id], false).ok());
    decoded.unwrap_or_else(|| id.to_string())
}

fn to_json(
    model: &str,
    length: usize,
    measured: &MeasuredHeads,
    text: &dyn Fn(u32) -> String,
) -> anyhow::Result<Value> {
    let mut fields = json!({"model": model, "sequence_length": length});
    if let Some(report) = &measured.report {
        fields["texts"] = serde_json::to_value(&report.texts)?;
        fields["layers"] = serde_json::to_value(&report.layers)?;
        for layer in fields["layers"].as_array_mut().into_iter().flatten() {
            let heads = layer["heads"].as_array_mut().into_iter().flatten();
            for token in heads.flat_map(|head| head["tokens"].as_array_mut()).flatten() {
                let id = token["id"].as_u64().and_then(|id| u32::try_from(id).ok());
                token["text"] = id.map(text).into();
            }
        }
    }
    if let Some(Sentence { ids, layers }) = &measured.sentence {
        let tokens: Vec<Value> =
            ids.iter().map(|&id| json!({"id": id, "text": text(id)})).collect();
        fields["sentence"] = json!({"tokens": tokens, "layers": layers});
    }
    Ok(fields)
}

/// A table for each layer, and the means of shared and of routed heads over all.
fn write_report(
    out: &mut impl Write,
    report: &HeadReport,
    text: &dyn Fn(u32) -> String,
) -> std::io::Result<()> {
    let texts: Vec<String> =
        report.texts.iter().map(|text| format!("{} ({} tokens)", text.name, text.tokens)).collect();
    writeln!(out, "load on {}", texts.join(", "))?;
    for layer in &report.layers {
        write_layer(out, report, layer, text)?;
    }
    let heads = || report.layers.iter().flat_map(|layer| &layer.heads);
    for (what, shared) in [("shared", true), ("routed", false)] {
        let ranks: Vec<f64> = heads()
            .filter(|head| head.shared == shared)
            .map(|head| head.feature_rank as f64)
            .collect();
        if let Some(mean) = mean(&ranks) {
            writeln!(out, "\nmean feature rank of {} {what} heads: {mean:.2}", ranks.len())?;
        }
    }
    let of_layers = |value: fn(&LayerReport) -> Option<f64>| {
        mean(&report.layers.iter().filter_map(value).collect::<Vec<_>>())
    };
    let patterns = of_layers(|layer| layer.pattern_similarity);
    let outputs = of_layers(|layer| layer.output_similarity);
    writeln!(
        out,
        "\nmean similarity of two heads: attention patterns {}, outputs {}",
        number(patterns),
        number(outputs)
    )
}

fn write_layer(
    out: &mut impl Write,
    report: &HeadReport,
    layer: &LayerReport,
    text: &dyn Fn(u32) -> String,
) -> std::io::Result<()> {
    write!(
        out,
        "\nlayer {}: similarity of patterns {}, of outputs {}",
        layer.layer,
        number(layer.pattern_similarity),
        number(layer.output_similarity)
    )?;
    if let Some(entropies) = &layer.gate_entropy {
        let shown: Vec<String> = entropies.iter().map(|nats| format!("{nats:.4}")).collect();
        write!(out, ", gate entropy {} nats", shown.join(", "))?;
    }
    let loads = report.texts.len() * 8;
    writeln!(out, "\n  head  {:<loads$}  rank  distance  entropy  tokens", "load")?;
    for head in &layer.heads {
        write_head(out, head, text)?;
    }
    Ok(())
}

fn write_head(
    out: &mut impl Write,
    head: &OneHead,
    text: &dyn Fn(u32) -> String,
) -> std::io::Result<()> {
    let OneHead { head, shared, load, feature_rank, distance, entropy, tokens } = head;
    let mark = if *shared { "*" } else { " " };
    let loads: Vec<String> = load.iter().map(|load| format!("{:6.1}%", 100.0 * load)).collect();
    let tokens: Vec<String> = tokens
        .iter()
        .map(|token| format!("{:?} {:.0}%", text(token.id), 100.0 * token.share))
        .collect();
    let line = format!(
        "  {head:>4}{mark} {}  {feature_rank:>4}  {:>8}  {:>7}  {}",
        loads.join(" "),
        number_of(*distance, 1),
        number_of(*entropy, 3),
        tokens.join(", ")
    );
    writeln!(out, "{}", line.trim_end())
}

/// A line for each token, with the routed heads that it selects in each layer.
fn write_sentence(
    out: &mut impl Write,
    sentence: &Sentence,
    text: &dyn Fn(u32) -> String,
) -> std::io::Result<()> {
    let routes = |layer: &&SentenceLayer| layer.shared_heads.len() < layer.maps.len();
    let layers: Vec<&SentenceLayer> = sentence.layers.iter().filter(routes).collect();
    if layers.is_empty() {
        return writeln!(out, "\nevery token computes all heads: the model is dense");
    }
    let cell = |layer: &SentenceLayer, token: usize| {
        let selected = layer.active[token].iter().filter(|head| !layer.shared_heads.contains(head));
        selected.map(usize::to_string).collect::<Vec<_>>().join(" ")
    };
    let texts: Vec<String> = sentence.ids.iter().map(|&id| format!("{:?}", text(id))).collect();
    let first = texts.iter().map(|text| text.chars().count()).max().unwrap_or(0).max(5);
    let width = |layer: &SentenceLayer| {
        let cells = (0..texts.len()).map(|token| cell(layer, token).len());
        cells.max().unwrap_or(0).max(8)
    };
    let title = layers
        .iter()
        .map(|layer| format!("{:<width$}", format!("layer {}", layer.layer), width = width(layer)));
    let title = title.collect::<Vec<_>>().join("  ");
    writeln!(out, "\nrouted heads that each token selects")?;
    writeln!(out, "  {:<first$}  {}", "token", title.trim_end())?;
    for (token, text) in texts.iter().enumerate() {
        let cells = layers
            .iter()
            .map(|layer| format!("{:<width$}", cell(layer, token), width = width(layer)));
        let cells = cells.collect::<Vec<_>>().join("  ");
        writeln!(out, "  {text:<first$}  {}", cells.trim_end())?;
    }
    Ok(())
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn number(value: Option<f64>) -> String {
    number_of(value, 4)
}

fn number_of(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}
