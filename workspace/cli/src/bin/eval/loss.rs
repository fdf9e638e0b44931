//! `moh-eval loss`: computes mean loss, perplexity and bits per byte of models on token files.

use std::io::stdout;
use std::path::PathBuf;

use moh_data::Windows;
use moh_kernels::open_device::{DeviceName, OnDevice};
use moh_kernels::{Backend, ElementType};
use moh_model::Model;
use moh_program::arguments::at_least;
use moh_program::exit;
use moh_program::models::NamedModel;
use moh_program::options;
use moh_program::progress::Bar;
use moh_step::{DecodedBytes, Error, EvaluationText, Evaluator};

use crate::loss_report::{LossMeasurement, print};
use crate::windows::{say_length, window_length, windows};

/// Maximum tokens of a pass. Longer windows are evaluated one at a time.
const BATCH_TOKENS: usize = 4096;

#[derive(clap::Args)]
pub(crate) struct LossArguments {
    /// Model: a directory, an id on the hub, or a run's checkpoint, RUN or RUN@STEP; repeat it for more
    #[arg(long = "model", value_name = "MODEL", required = true)]
    pub models: Vec<String>,
    /// Branch, tag or commit of the hub's model
    #[arg(long)]
    revision: Option<String>,
    /// Token file, without .bin and .idx; repeat it for more
    #[arg(long, value_name = "PREFIX", required = true)]
    data: Vec<PathBuf>,
    /// Tokens per window [default: 2048, or the shortest context length of the models if that is less]
    #[arg(long, value_name = "TOKENS", value_parser = at_least::<usize>(0))]
    sequence_length: Option<usize>,
    /// Only this many windows of each file, spread evenly over it
    #[arg(long, value_name = "WINDOWS", value_parser = at_least::<u64>(1))]
    limit: Option<u64>,
    /// Print JSON instead of text
    #[arg(long)]
    pub json: bool,
    /// Element type of the computation [default: the type of the models' weights, or f32 if they differ]
    #[arg(long, value_parser = options::element_types())]
    dtype: Option<ElementType>,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
    /// Accept a token file of another tokenizer than the model's if the model's gives the same ids on a sample of
    /// it
    #[arg(long)]
    allow_other_tokenizer: bool,
    /// Also print the routing of each layer of a Mixture-of-Head model: the entropy of the gates and the
    /// load of each routed head, the share of tokens that select it
    #[arg(long)]
    heads: bool,
}

impl LossArguments {
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        if self.revision.is_some() && self.models.len() > 1 {
            let message = "--revision: is one model's, but several are named";
            return Err(exit::Usage(message.to_owned()).into());
        }
        let open = |name: &String| NamedModel::open(name, self.revision.as_deref());
        let models = self.models.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let types = models.iter().map(|model| model.element_type(self.dtype));
        let types = types.collect::<Result<Vec<_>, _>>()?;
        let is_bf16 = types.iter().all(|&dtype| dtype == ElementType::BF16);
        let dtype = if is_bf16 { ElementType::BF16 } else { ElementType::F32 };
        options::open_device(self.device)?.run(Losses(self, models, dtype))
    }
}

/// The computation of the models' losses.
struct Losses<'a>(&'a LossArguments, Vec<NamedModel>, ElementType);

impl OnDevice for Losses<'_> {
    type Output = anyhow::Result<()>;

    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
        let Losses(arguments, models, dtype) = self;
        let length = window_length(&models, arguments.sequence_length)?;
        // Opens all files before the first model: a length that exceeds a file may also exceed the memory.
        let texts = |model: &NamedModel| {
            let text = |prefix: &PathBuf| {
                let windows = windows(model, prefix, length, arguments.allow_other_tokenizer)?;
                Ok::<_, anyhow::Error>(match arguments.limit {
                    Some(limit) => windows.spread(limit),
                    None => windows,
                })
            };
            arguments.data.iter().map(text).collect::<Result<Vec<_>, _>>()
        };
        let texts = models.iter().map(texts).collect::<Result<Vec<_>, _>>()?;
        if arguments.sequence_length.is_none() {
            say_length(length, &models);
        }
        let mut measured = Vec::new();
        for (named, texts) in models.iter().zip(&texts) {
            let mut model = named.load(backend.clone(), dtype, length)?;
            for (windows, prefix) in texts.iter().zip(&arguments.data) {
                let (loss, routing) = loss(&mut model, named, windows, arguments.heads)?;
                let (model, data) = (named.name.clone(), prefix.display().to_string());
                let windows = windows.len();
                measured.push(LossMeasurement { model, data, windows, loss, routing });
            }
        }
        print(&mut stdout(), arguments, dtype, length, &measured)
    }
}

/// Returns the loss of a model over windows, and its routing if `heads`.
fn loss<B: Backend + Clone>(
    model: &mut Model<B>,
    named: &NamedModel,
    windows: &Windows,
    heads: bool,
) -> anyhow::Result<(moh_step::Loss, Option<moh_model::router::RoutingStatistics>)> {
    // At most the number of windows, which fits memory if the file did.
    let batch =
        (BATCH_TOKENS / windows.length()).clamp(1, windows.len().clamp(1, 1 << 20) as usize);
    let mut evaluator = Evaluator::new(model, batch, windows.length())?;
    let mut routing = heads.then(|| model.routing_statistics());
    let mut bar = Bar::count("evaluating", windows.len());
    let tokenizer = named.tokenizer()?;
    let decoded = tokenizer
        .map(|tokenizer| |ids: &[u32]| tokenizer.decoded_bytes(ids).map_err(Error::samples));
    let decoded_bytes = decoded.as_ref().map(|bytes| bytes as &DecodedBytes<'_>);
    let text = EvaluationText { windows, count: windows.len(), decoded_bytes };
    let mut progress = |done, total| bar.update(done, total);
    let found = evaluator.evaluate(model, text, routing.as_mut(), &mut progress)?;
    Ok((found, routing))
}
