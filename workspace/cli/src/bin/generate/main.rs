//! `moh-generate`: continues a text, or answers a message.

use std::borrow::Cow;
use std::fs;
use std::io::{Read as _, Write as _, stdin, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{ArgGroup, Parser};
use moh_kernels::open_device::{DeviceName, OnDevice};
use moh_kernels::{Backend, ElementType};
use moh_model::{Generator, Model, Sampler, Sampling};
use moh_program::arguments::at_least;
use moh_program::models::NamedModel;
use moh_program::{counted, exit, options};
use moh_text::{ChatTemplate, Conversation, RenderThreads, TextTokenizer};

/// The most time for rendering the conversation.
const RENDERING_TIME: Duration = Duration::from_secs(60);

/// Continue a text, or answer a message, with a model, dense or Mixture-of-Head.
///
/// Keys and values of past tokens are cached, and a Mixture-of-Head model computes only each
/// token's selected heads. The text goes to standard output; the speed, without loading, goes to
/// standard error. Generation ends at --max-tokens, at the end of the model's context, or at a token of
/// eos_token_id in generation_config.json (or else config.json).
#[derive(Parser)]
#[command(
    name = "moh-generate",
    version,
    arg_required_else_help = true,
    group = ArgGroup::new("text").required(true).args(["prompt", "prompt_file"]),
    after_help = "Example, from the repository's root:\n  \
        moh-generate --model recipes/quickstart --prompt \"Once upon a time\" --temperature 0.8"
)]
struct Arguments {
    /// Model: a directory, an id on the hub, or a run's checkpoint, RUN or RUN@STEP
    #[arg(long)]
    model: String,
    /// Branch, tag or commit of the hub's model
    #[arg(long)]
    revision: Option<String>,
    /// Text to continue
    #[arg(long, allow_hyphen_values = true)]
    prompt: Option<String>,
    /// File with the text to continue, without its final newline; - reads standard input
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Answer the prompt as a user's message, in the tokenizer's chat template
    #[arg(long)]
    chat: bool,
    /// System message before the user's
    #[arg(long, value_name = "TEXT", requires = "chat", allow_hyphen_values = true)]
    system: Option<String>,
    /// Maximum number of tokens to generate
    #[arg(long, default_value_t = 256, value_name = "TOKENS", value_parser = at_least::<usize>(0))]
    max_tokens: usize,
    /// Sampling temperature; 0 always selects the most likely token [default: 0, or 1 with --top-k, --top-p or
    /// --min-p]
    #[arg(long)]
    temperature: Option<f64>,
    /// Sample from this many most likely tokens
    #[arg(long, value_parser = at_least::<usize>(1))]
    top_k: Option<usize>,
    /// Sample from the most likely tokens, of those of --top-k, whose probabilities add up to this
    #[arg(long)]
    top_p: Option<f64>,
    /// Sample from tokens with at least this share of the likeliest one's probability
    #[arg(long)]
    min_p: Option<f64>,
    /// Divide the logits of tokens of the prompt and of generated ones by this; multiply negative ones
    #[arg(long)]
    repetition_penalty: Option<f64>,
    /// Subtract this from the logits of tokens that were generated
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f64,
    /// Subtract this from the logit of a token for each time that it was generated
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f64,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0, value_parser = at_least::<u64>(0))]
    seed: u64,
    /// Element type of the computation [default: the type of the model's weights]
    #[arg(long, value_parser = options::element_types())]
    dtype: Option<ElementType>,
    /// Device: cpu, cuda or cuda:N
    #[arg(long, default_value = "cpu")]
    device: DeviceName,
}

/// A generation and its model.
struct Generate<'a>(&'a Arguments, NamedModel, ElementType);

impl OnDevice for Generate<'_> {
    type Output = anyhow::Result<()>;

    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
        let Generate(arguments, named, dtype) = self;
        let tokenizer = named.required_tokenizer()?;
        let context = named.config.max_position_embeddings;
        let prompt = Prompt::read(arguments, &tokenizer)?;
        if prompt.ids.is_empty() || prompt.ids.len() >= context {
            anyhow::bail!(
                "{}: {} tokens, expected 1 to {}, less than the model's context length",
                prompt.source,
                prompt.ids.len(),
                context.saturating_sub(1)
            );
        }
        let capacity = context.min(prompt.ids.len().saturating_add(arguments.max_tokens));
        let model = named.load(backend, dtype, capacity)?;
        let ends = moh_hf::end_tokens(&named.files(), model.config())?;
        // Runs on a thread of the operators: a small model's token takes less time than waking them.
        model.backend().install(|| decode(arguments, &tokenizer, &model, &prompt, &ends))
    }
}

fn main() -> ExitCode {
    exit::run(|| {
        let arguments = moh_program::arguments::parse::<Arguments>();
        check(&arguments)?;
        let named = NamedModel::open(&arguments.model, arguments.revision.as_deref())?;
        let dtype = named.element_type(arguments.dtype)?;
        options::open_device(arguments.device)?.run(Generate(&arguments, named, dtype))
    })
}

fn check(arguments: &Arguments) -> anyhow::Result<()> {
    let usage = |message: String| Err(exit::Usage(message).into());
    let temperature = arguments.temperature();
    if !(temperature >= 0.0 && temperature.is_finite()) {
        return usage(format!("--temperature {temperature}: must be at least 0"));
    }
    if let Some(p) = arguments.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
        return usage(format!("--top-p {p}: must be above 0 and at most 1"));
    }
    if let Some(share) = arguments.min_p.filter(|share| !(0.0..=1.0).contains(share)) {
        return usage(format!("--min-p {share}: must be at least 0 and at most 1"));
    }
    if let Some(penalty) = arguments.repetition_penalty.filter(|p| !(*p > 0.0 && p.is_finite())) {
        return usage(format!("--repetition-penalty {penalty}: must be above 0"));
    }
    for (name, penalty) in
        [("presence", arguments.presence_penalty), ("frequency", arguments.frequency_penalty)]
    {
        if !penalty.is_finite() {
            return usage(format!("--{name}-penalty {penalty}: must be a number"));
        }
    }
    if temperature == 0.0 && arguments.limits_sampling() {
        exit::stderr_line(format_args!(
            "warning: --temperature 0 always selects the most likely token: --top-k, --top-p and --min-p have \
             no effect"
        ));
    }
    Ok(())
}

impl Arguments {
    /// Returns whether an option limits the sampled tokens, which implies sampling.
    fn limits_sampling(&self) -> bool {
        self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some()
    }

    fn temperature(&self) -> f64 {
        self.temperature.unwrap_or(if self.limits_sampling() { 1.0 } else { 0.0 })
    }
}

/// The tokens before the generated tokens.
struct Prompt {
    /// The option that gives the text.
    source: Cow<'static, str>,
    ids: Vec<u32>,
    /// The text to repeat in the output; empty for a message.
    shown: String,
}

impl Prompt {
    fn read(arguments: &Arguments, tokenizer: &TextTokenizer) -> anyhow::Result<Self> {
        let (source, text) = match (&arguments.prompt, &arguments.prompt_file) {
            (Some(text), _) => ("--prompt".into(), text.clone()),
            (None, Some(file)) => {
                let source = format!("--prompt-file {}", file.display());
                let text = read_text(file).with_context(|| source.clone())?;
                (source.into(), text.strip_suffix('\n').unwrap_or(&text).to_owned())
            }
            // One of the two options is required.
            (None, None) => ("--prompt".into(), String::new()),
        };
        if !arguments.chat {
            let ids = tokenizer.encode_prompt(&text)?;
            return Ok(Prompt { source, ids, shown: text });
        }
        let system = arguments.system.as_deref().map(|text| ("system", text));
        let conversation = Conversation::of_texts(system.into_iter().chain([("user", &*text)]));
        let template = RenderThreads::new(ChatTemplate::load(tokenizer)?, RENDERING_TIME)?;
        let rendered = template.render(&Arc::new(conversation), true)?;
        // The template contains BOS where the model expects it.
        let ids = tokenizer.encode_without_special_tokens(&rendered)?;
        Ok(Prompt { source, ids, shown: String::new() })
    }
}

fn read_text(file: &Path) -> std::io::Result<String> {
    if file == Path::new("-") {
        let mut text = String::new();
        stdin().read_to_string(&mut text)?;
        return Ok(text);
    }
    fs::read_to_string(file)
}

/// Writes the prompt and its continuation, token by token.
fn decode<B: Backend>(
    arguments: &Arguments,
    tokenizer: &TextTokenizer,
    model: &Model<B>,
    prompt: &Prompt,
    ends: &[u32],
) -> anyhow::Result<()> {
    let capacity = model.positions();
    let sampling = Sampling {
        temperature: arguments.temperature(),
        top_k: arguments.top_k,
        top_p: arguments.top_p,
        min_p: arguments.min_p,
        repetition_penalty: arguments.repetition_penalty,
        presence_penalty: arguments.presence_penalty,
        frequency_penalty: arguments.frequency_penalty,
        logit_bias: Vec::new(),
    };
    let vocab_size = tokenizer.vocab_size();
    let mut sampler = Sampler::new(arguments.seed, sampling, vocab_size).after(&prompt.ids);
    let options = options::batch_options(model, capacity);
    let mut generator = Generator::with_options(model, capacity, options)?;
    let mut text = tokenizer.stream(&prompt.ids, true);
    let mut out = stdout();
    write!(out, "{}", prompt.shown)?;
    let started = Instant::now();
    let mut next = generator.next_token(&prompt.ids, &mut sampler)?;
    let prompt_seconds = started.elapsed().as_secs_f64();
    let started = Instant::now();
    let (mut count, mut passes) = (0usize, 0u32);
    let mut ended = false;
    while generator.position() < capacity {
        if ends.contains(&next) {
            ended = true;
            break;
        }
        count += 1;
        write!(out, "{}", text.push(next)?)?;
        out.flush()?;
        if generator.position() + 1 == capacity {
            // The last token: its keys and values are not needed.
            break;
        }
        next = generator.next_token(&[next], &mut sampler)?;
        passes += 1;
    }
    let seconds = started.elapsed().as_secs_f64();
    writeln!(out, "{}", text.finish()?)?;
    // The first token is from the prompt's pass.
    let rate = f64::from(passes) / seconds.max(1e-9);
    let reason = match count {
        _ if ended => ", ended by the model",
        count if count < arguments.max_tokens => ", ended by the model's context length",
        _ => "",
    };
    exit::stderr_line(format_args!(
        "{}{reason}, {rate:.1} tokens/s after a prompt of {} tokens in {prompt_seconds:.3} s",
        counted(count as u64, "token"),
        prompt.ids.len()
    ));
    Ok(())
}
