//! `moh-eval loss`: mean loss, perplexity and bits per byte on a token file.

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use moh_cli::exit;
use moh_cli::models;
use moh_cli::progress::Bar;
use moh_data::{TokenFile, Windows};
use moh_device::{Compute, DeviceName};
use moh_eval::{EvaluationText, Evaluator};
use moh_hf::ConfigFile;
use moh_kernels::{Backend, Element, ElementType};
use moh_model::router::RoutingStatistics;

/// Maximum tokens of a pass; longer windows are evaluated one at a time.
const BATCH_TOKENS: usize = 4096;

#[derive(clap::Args)]
pub(crate) struct LossArguments {
    /// Directory of the model, or its id on the hub
    #[arg(long)]
    model: String,
    /// Branch, tag or commit of the hub's model
    #[arg(long)]
    revision: Option<String>,
    /// Token file, without .bin and .idx
    #[arg(long, value_name = "PREFIX")]
    data: PathBuf,
    /// Tokens per window; the model's context length if omitted
    #[arg(long, value_name = "TOKENS")]
    sequence_length: Option<usize>,
    /// Element type of the computation
    #[arg(long, value_parser = models::element_types(), default_value = "f32")]
    dtype: ElementType,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
    /// Also print the routing of each layer of a Mixture-of-Head model: the entropy of the gates and the
    /// load of each routed head, the share of tokens that select it
    #[arg(long)]
    heads: bool,
}

impl LossArguments {
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        models::open(self.device)?.compute(self.dtype, Loss(self))
    }
}

struct Loss<'a>(&'a LossArguments);

impl Compute for Loss<'_> {
    type Output = anyhow::Result<()>;

    fn run<B: Backend + Clone, T: Element>(self, backend: B) -> Self::Output {
        loss::<B, T>(self.0, backend)
    }
}

fn loss<B: Backend + Clone, T: Element>(
    arguments: &LossArguments,
    backend: B,
) -> anyhow::Result<()> {
    let directory = models::locate(&arguments.model, arguments.revision.as_deref())?;
    let length = window_length(&directory, arguments.sequence_length)?;
    let mut file = TokenFile::open(&arguments.data)?;
    file.limit_vocabulary(ConfigFile::read(&directory)?.config.vocab_size);
    let tokenizer = models::tokenizer(&directory)?;
    if let Some(tokenizer) = &tokenizer {
        file.check_tokenizer(tokenizer)?;
    }
    // Before the model: a context length that exceeds the file may also exceed the memory.
    let windows = Windows::new(file, length)?;
    let mut model = models::load::<B, T>(backend, &directory, length)?;
    // At most the number of sequences, which fits memory if the file did.
    let batch = (BATCH_TOKENS / length).clamp(1, windows.len().clamp(1, 1 << 20) as usize);
    let mut evaluator = Evaluator::new(&model, batch, length)?;
    let mut routing = arguments.heads.then(|| model.routing_statistics()).transpose()?;
    let mut bar = Bar::count("evaluating", windows.len());
    let text =
        EvaluationText { windows: &windows, count: windows.len(), tokenizer: tokenizer.as_ref() };
    let mut progress = |done, total| bar.update(done, total);
    let found = evaluator.evaluate(&mut model, text, routing.as_mut(), &mut progress)?;
    drop(bar);
    let mut out = stdout();
    writeln!(out, "loss           {:.6}", found.loss)?;
    writeln!(out, "perplexity     {:.4}", found.perplexity())?;
    match found.bits_per_byte {
        Some(bits) => writeln!(out, "bits per byte  {bits:.6}")?,
        None => writeln!(out, "bits per byte  - (the model has no tokenizer)")?,
    }
    writeln!(out, "tokens         {}", found.tokens)?;
    if let Some(routing) = routing {
        write_routing(&mut out, &routing)?;
    }
    Ok(())
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
            "\nlayer {}: gate entropy {:.4} nats of at most {:.4}, loads {:.1}% to {:.1}%, \
             largest / mean {:.3}",
            layer.layer,
            layer.mean_entropy(),
            layer.max_entropy(),
            100.0 * smallest,
            100.0 * largest,
            layer.imbalance(),
        )?;
        let loads: Vec<f64> = layer.loads().collect();
        for (row, loads) in loads.chunks(8).enumerate() {
            let first = layer.shared_heads + 8 * row;
            let shown: Vec<String> = loads.iter().map(|l| format!("{:5.1}%", 100.0 * l)).collect();
            let heads = format!("{first}-{}", first + loads.len() - 1);
            writeln!(out, "  heads {heads:<8} {}", shown.join(" "))?;
        }
    }
    Ok(())
}

/// The given window length, or the model's context length; longer windows are refused.
fn window_length(directory: &Path, asked: Option<usize>) -> anyhow::Result<usize> {
    let context = models::context_length(directory)?;
    let length = asked.unwrap_or(context);
    if !(2..=context).contains(&length) {
        let message = format!(
            "--sequence-length {length}: must be 2 to {context}, the model's context length"
        );
        return Err(exit::Usage(message).into());
    }
    Ok(length)
}
