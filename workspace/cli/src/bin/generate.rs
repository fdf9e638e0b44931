//! `moh-generate`: continues a text.

use std::io::{Write as _, stderr, stdout};
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use moh_cli::exit;
use moh_cli::models;
use moh_data::TextTokenizer;
use moh_device::{Compute, DeviceName};
use moh_kernels::{Backend, Element, ElementType};
use moh_model::{Generator, Model, Sampler};

/// Continue a text with a model, dense or Mixture-of-Head.
///
/// Keys and values of past tokens are cached, and a Mixture-of-Head model computes only each
/// token's selected heads. The text goes to standard output; the speed, without loading, goes to
/// standard error.
#[derive(Parser)]
#[command(
    name = "moh-generate",
    version,
    arg_required_else_help = true,
    after_help = "Example, from the repository's root:\n  \
        moh-generate --model recipes/quickstart --prompt \"Once upon a time\" --temperature 0.8"
)]
struct Arguments {
    /// Directory of the model, or its id on the hub
    #[arg(long)]
    model: String,
    /// Text to continue
    #[arg(long)]
    prompt: String,
    /// Maximum number of tokens to generate
    #[arg(long, default_value_t = 256, value_name = "TOKENS")]
    max_tokens: usize,
    /// Sampling temperature; 0 always selects the most likely token
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Sample from the most likely tokens whose probabilities add up to this
    #[arg(long)]
    top_p: Option<f64>,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Element type of the computation
    #[arg(long, value_parser = models::element_types(), default_value = "f32")]
    dtype: ElementType,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
}

struct Generate<'a>(&'a Arguments);

impl Compute for Generate<'_> {
    type Output = anyhow::Result<()>;

    fn run<B: Backend + Clone, T: Element>(self, backend: B) -> Self::Output {
        generate::<B, T>(self.0, backend)
    }
}

fn main() -> ExitCode {
    exit::run(|| {
        let arguments = Arguments::parse();
        check(&arguments)?;
        models::open(arguments.device)?.compute(arguments.dtype, Generate(&arguments))
    })
}

fn check(arguments: &Arguments) -> anyhow::Result<()> {
    let usage = |message: String| Err(exit::Usage(message).into());
    if !(arguments.temperature >= 0.0 && arguments.temperature.is_finite()) {
        return usage(format!("--temperature {}: must be at least 0", arguments.temperature));
    }
    match arguments.top_p {
        Some(p) if !(p > 0.0 && p <= 1.0) => {
            usage(format!("--top-p {p}: must be above 0 and at most 1"))
        }
        _ => Ok(()),
    }
}

fn generate<B: Backend, T: Element>(arguments: &Arguments, backend: B) -> anyhow::Result<()> {
    let directory = models::locate(&arguments.model, None)?;
    let tokenizer = models::required_tokenizer(&directory)?;
    let context = models::context_length(&directory)?;
    let prompt = tokenizer.encode_prompt(&arguments.prompt)?;
    if prompt.is_empty() || prompt.len() >= context {
        anyhow::bail!(
            "--prompt: {} tokens, expected 1 to {}, less than the model's context length",
            prompt.len(),
            context.saturating_sub(1)
        );
    }
    let capacity = context.min(prompt.len().saturating_add(arguments.max_tokens));
    let model = models::load::<B, T>(backend, &directory, capacity)?;
    // On one of the operators' threads: a small model's token takes less time than waking them.
    model.backend().install(|| decode(arguments, &tokenizer, &model, &prompt))
}

/// Writes the prompt and its continuation, token by token.
fn decode<B: Backend, T: Element>(
    arguments: &Arguments,
    tokenizer: &TextTokenizer,
    model: &Model<B, T>,
    prompt: &[u32],
) -> anyhow::Result<()> {
    let capacity = model.positions();
    let mut sampler = Sampler::new(
        arguments.seed,
        arguments.temperature,
        arguments.top_p,
        tokenizer.vocab_size(),
    );
    let ends = &model.config().eos_token_ids;
    let mut generator = Generator::new(model, capacity)?;
    let mut text = tokenizer.stream(prompt, true);
    let mut out = stdout();
    write!(out, "{}", arguments.prompt)?;
    let started = Instant::now();
    let mut logits = generator.extend(prompt)?;
    let prompt_seconds = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let (mut count, mut passes) = (0u32, 0u32);
    while generator.position() < capacity {
        let next = sampler.sample(&logits)?;
        if ends.contains(&next) {
            break;
        }
        count += 1;
        write!(out, "{}", text.push(next)?)?;
        out.flush()?;
        if generator.position() + 1 == capacity {
            // The last token: its keys and values are not needed.
            break;
        }
        logits = generator.extend(&[next])?;
        passes += 1;
    }
    let seconds = started.elapsed().as_secs_f64();
    writeln!(out, "{}", text.finish()?)?;
    // The prompt's pass gave the first token.
    let rate = f64::from(passes) / seconds.max(1e-9);
    writeln!(
        stderr(),
        "{count} tokens, {rate:.1} tokens/s after a prompt of {} tokens in {prompt_seconds:.3} s",
        prompt.len()
    )?;
    Ok(())
}
