//! `moh-bench generation`: measures tokens per second of prompts and of generated tokens, for several sequences at
//! once.

use std::path::PathBuf;

use moh_hf::ConfigFile;
use moh_kernels::{Backend, ElementType};
use moh_model::{BatchGenerator, BatchOptions, Chunk, Model, ModelConfig, SequenceId};
use moh_program::arguments::at_least;
use moh_program::exit::Usage;
use moh_program::table::aligned;
use moh_program::{exit, options};
use serde_json::{Value, json};

use crate::device::{Bench, DeviceArguments, Measurement};
use crate::heads::HeadArguments;
use crate::limits::MachineLimits;
use crate::step::{describe, fresh, synthetic};
use crate::timing::Times;

/// Maximum tokens of all sequences. A larger number is probably a typing error.
const MAX_TOKENS: usize = 1 << 28;

#[derive(clap::Args)]
pub struct GenerationArguments {
    /// A config.json or its directory, for the model's shape
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Sequences at once; repeat it or separate numbers with commas for several measurements
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    #[arg(value_parser = at_least::<usize>(1))]
    batch: Vec<usize>,
    /// Tokens of each sequence's prompt, likewise
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_value = "256")]
    #[arg(value_parser = at_least::<usize>(1))]
    context: Vec<usize>,
    /// Generated tokens of each sequence that are measured
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = at_least::<usize>(1))]
    tokens: usize,
    /// Type of weights and activations
    #[arg(long, value_parser = options::element_types(), default_value = "f32")]
    dtype: ElementType,
    #[command(flatten)]
    heads: HeadArguments,
    #[command(flatten)]
    device: DeviceArguments,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub struct Measured {
    batch: usize,
    context: usize,
    /// Seconds of all prompts together.
    prompts: f64,
    /// Times of a pass that computes a token of each sequence.
    passes: Times,
}

pub fn run(arguments: &GenerationArguments) -> anyhow::Result<()> {
    let mut config = ConfigFile::read(&arguments.config)?.config;
    if let Some(rounding) = arguments.heads.apply(&mut config)? {
        exit::stderr_line(format_args!("{rounding}"));
    }
    let largest = |values: &[usize]| values.iter().copied().max().unwrap_or(1);
    let length = largest(&arguments.context).saturating_add(arguments.tokens).saturating_add(1);
    if length.saturating_mul(largest(&arguments.batch)) > MAX_TOKENS {
        let (batch, most) = (largest(&arguments.batch), MAX_TOKENS);
        let text = format!("{batch} sequences of {length} tokens: must be at most {most} in all");
        return Err(Usage(text).into());
    }
    // The shape's speed does not depend on the positions that it was trained for.
    config.max_position_embeddings = config.max_position_embeddings.max(length);
    let (measured, machine) = arguments.device.measure((&config, arguments))?;
    crate::print(
        arguments.json,
        &as_json(arguments, &config, &measured, &machine),
        &as_text(arguments, &config, &measured, &machine),
    )
}

impl Measurement for (&ModelConfig, &GenerationArguments) {
    type Output = Vec<Measured>;

    fn on<B: Backend + Clone>(self, bench: &Bench<B>) -> anyhow::Result<Self::Output> {
        let (config, arguments) = self;
        measure(bench.backend.clone(), config, arguments)
    }
}

fn measure<B: Backend + Clone>(
    backend: B,
    config: &ModelConfig,
    arguments: &GenerationArguments,
) -> anyhow::Result<Vec<Measured>> {
    let deviation = config.initializer_range;
    let positions = config.max_position_embeddings;
    let (element, shape) = (arguments.dtype, config.clone());
    let model = Model::new(backend, element, shape, positions, |segment, values| {
        fresh(segment, deviation, values);
        Ok::<_, moh_model::Error>(())
    })?;
    let batches = |&context| arguments.batch.iter().map(move |&batch| (batch, context));
    let sizes = arguments.context.iter().flat_map(batches);
    sizes.map(|(batch, context)| measure_batch(&model, batch, context, arguments.tokens)).collect()
}

/// Measures the prompts of a batch, then `tokens` passes with a token of each sequence.
fn measure_batch<B: Backend + Clone>(
    model: &Model<B>,
    batch: usize,
    context: usize,
    tokens: usize,
) -> anyhow::Result<Measured> {
    // One more token, for the first pass, which is not measured.
    let options = options::batch_options(model, context + tokens + 1);
    let (blocks, pass_tokens) = (batch * options.blocks, options.pass_tokens.max(batch));
    let options = BatchOptions { blocks, pass_tokens, ..options };
    let mut generator = BatchGenerator::new(model, options)?;
    let vocabulary = model.config().vocab_size as u64;
    let sequences = (0..batch)
        .map(|number| {
            let mut prompt = vec![0; context];
            synthetic(number as u64, vocabulary, &mut prompt);
            generator.add(&prompt, 0)
        })
        .collect::<Result<Vec<SequenceId>, _>>()?;
    let mut first = Times::default();
    for &sequence in &sequences {
        first.time(1, || generator.finish_waiting(sequence))?;
    }
    let mut passes = Times::default();
    for number in 0..=tokens {
        let chunks: Vec<Chunk> = sequences
            .iter()
            .map(|&sequence| {
                generator.push(sequence, (number as u64 % vocabulary) as u32)?;
                Ok(Chunk { sequence, tokens: 1, logits: 1 })
            })
            .collect::<Result<_, moh_model::Error>>()?;
        match number {
            0 => drop(generator.pass(&chunks)?),
            _ => drop(passes.time(1, || generator.pass(&chunks))?),
        }
    }
    Ok(Measured { batch, context, prompts: first.total(), passes })
}

impl Measured {
    fn prompt_rate(&self) -> f64 {
        (self.batch * self.context) as f64 / self.prompts.max(1e-9)
    }
}

fn as_json(
    arguments: &GenerationArguments,
    config: &ModelConfig,
    measured: &[Measured],
    machine: &MachineLimits,
) -> Value {
    let rows = measured.iter().map(|row| {
        json!({
            "batch": row.batch,
            "context": row.context,
            "prompt_tokens_per_second": row.prompt_rate(),
            "tokens_per_second": row.passes.rates(row.batch as f64).json(),
            "pass_seconds": row.passes.json(),
        })
    });
    json!({
        "model": describe(config),
        "dtype": arguments.dtype.name(),
        "tokens": arguments.tokens,
        "measurements": rows.collect::<Vec<_>>(),
        "machine": machine.json(),
    })
}

fn as_text(
    arguments: &GenerationArguments,
    config: &ModelConfig,
    measured: &[Measured],
    machine: &MachineLimits,
) -> String {
    let rows = measured.iter().map(|row| {
        let rates = row.passes.rates(row.batch as f64);
        [
            row.batch.to_string(),
            row.context.to_string(),
            format!("{:.0}", row.prompt_rate()),
            format!("{:.1} (best {:.1})", rates.median, rates.best),
            format!("{:.3}", row.passes.median() * 1e3),
        ]
    });
    let header = ["sequences", "prompt tokens", "prompt tokens/s", "tokens/s", "ms/pass"];
    format!(
        "model    {}, {}\nmachine  {}\n\n{}",
        describe(config),
        arguments.dtype.name(),
        machine.line(),
        aligned(header, rows, &[0])
    )
}
