//! The output of `moh-eval loss`: lines for a single model and token file, a table for several, or JSON.

use std::io::Write;

use moh_files::units::percent;
use moh_kernels::ElementType;
use moh_model::router::RoutingStatistics;
use moh_program::table::aligned;
use moh_step::Loss;
use serde_json::{Value, json};

use crate::loss::LossArguments;

/// The loss of a model on a token file.
pub(crate) struct LossMeasurement {
    pub model: String,
    pub data: String,
    pub windows: u64,
    pub loss: Loss,
    pub routing: Option<RoutingStatistics>,
}

/// Prints the losses of windows of `length` tokens, computed in `dtype`.
pub(crate) fn print(
    out: &mut impl Write,
    arguments: &LossArguments,
    dtype: ElementType,
    length: usize,
    measured: &[LossMeasurement],
) -> anyhow::Result<()> {
    if arguments.json {
        let losses: Vec<Value> = measured.iter().map(to_json).collect();
        let report = json!({"dtype": dtype.name(), "sequence_length": length, "losses": losses});
        return Ok(writeln!(out, "{report:#}")?);
    }
    let [only] = measured else { return Ok(write_table(out, measured)?) };
    let found = only.loss;
    writeln!(out, "loss           {:.6}", found.loss)?;
    writeln!(out, "perplexity     {:.4}", found.perplexity())?;
    match found.bits_per_byte {
        Some(bits) => writeln!(out, "bits per byte  {bits:.6}")?,
        None => writeln!(out, "bits per byte  - (the model has no tokenizer)")?,
    }
    writeln!(out, "tokens         {}", found.tokens)?;
    if let Some(routing) = &only.routing {
        write_routing(out, routing)?;
    }
    Ok(())
}

/// Writes a line for each model and token file, and below it their routing.
fn write_table(out: &mut impl Write, measured: &[LossMeasurement]) -> std::io::Result<()> {
    let rows = measured.iter().map(|LossMeasurement { model, data, loss, .. }| {
        [
            model.clone(),
            data.clone(),
            format!("{:.6}", loss.loss),
            format!("{:.4}", loss.perplexity()),
            loss.bits_per_byte.map_or("-".to_owned(), |bits| format!("{bits:.6}")),
            loss.tokens.to_string(),
        ]
    });
    let header = ["model", "data", "loss", "perplexity", "bits per byte", "tokens"];
    write!(out, "{}", aligned(header, rows, &[0, 1]))?;
    for LossMeasurement { model, data, routing, .. } in measured {
        if let Some(routing) = routing {
            writeln!(out, "\n{model} on {data}:")?;
            write_routing(out, routing)?;
        }
    }
    Ok(())
}

fn to_json(measured: &LossMeasurement) -> Value {
    let LossMeasurement { model, data, windows, loss, routing } = measured;
    let mut fields = json!({
        "model": model, "data": data, "windows": windows, "tokens": loss.tokens, "loss": loss.loss,
        "perplexity": loss.perplexity(), "bits_per_byte": loss.bits_per_byte,
    });
    if let Some(routing) = routing {
        let layers = routing.layers.iter().map(|layer| {
            let loads: Vec<f64> = layer.loads().collect();
            let heads: Vec<usize> = layer.routed_heads().collect();
            json!({
                "layer": layer.layer, "shared_heads": layer.shared_heads.len(), "routed_heads": heads,
                "gate_entropy": layer.mean_entropy(), "loads": loads,
            })
        });
        fields["routing"] = layers.collect();
    }
    fields
}

/// Writes the routing of each layer: a line for the layer, and its loads in lines of eight heads.
fn write_routing(out: &mut impl Write, routing: &RoutingStatistics) -> std::io::Result<()> {
    if routing.layers.is_empty() {
        return writeln!(out, "\nno layer routes: the model is dense");
    }
    for layer in &routing.layers {
        let (smallest, largest) = layer.extreme_loads();
        writeln!(
            out,
            "\nlayer {}: gate entropy {:.4} nats of at most {:.4}, loads {} to {}, \
             largest / mean {:.3}",
            layer.layer,
            layer.mean_entropy(),
            layer.max_entropy(),
            percent(smallest),
            percent(largest),
            layer.imbalance(),
        )?;
        let loads: Vec<(usize, f64)> = layer.routed_heads().zip(layer.loads()).collect();
        for row in loads.chunks(8) {
            let shown: Vec<String> =
                row.iter().map(|(_, load)| format!("{:5.1}%", 100.0 * load)).collect();
            let heads = names(row.iter().map(|&(head, _)| head));
            writeln!(out, "  heads {heads:<8} {}", shown.join(" "))?;
        }
    }
    Ok(())
}

/// Returns the heads in ascending order: `4-7`, or `1,3,6` if they are not consecutive.
fn names(heads: impl Iterator<Item = usize>) -> String {
    let heads: Vec<usize> = heads.collect();
    match (heads.first(), heads.last()) {
        (Some(first), Some(last)) if last - first == heads.len() - 1 => format!("{first}-{last}"),
        _ => heads.iter().map(usize::to_string).collect::<Vec<_>>().join(","),
    }
}
