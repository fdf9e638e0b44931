//! Text that a model samples itself, for a calibration without other text: self-calibration (arXiv 2410.17170).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use moh_data::{TokenFileInfo, TokenFileWriter};
use moh_kernels::open_device::OnDevice;
use moh_kernels::sampling::RowRequest;
use moh_kernels::{Backend, ElementType};
use moh_model::{BatchGenerator, BatchOptions, Chunk, Model, Sampler, Sampling};
use moh_program::models::NamedModel;
use moh_program::options;
use moh_program::progress::Bar;
use moh_text::{ChatTemplate, Conversation, RenderThreads, TextTokenizer};

/// The temperature of a window's first token. It falls to 1 over [`WARM_TOKENS`] tokens, so that windows start
/// differently and continue as the model writes.
const FIRST_TEMPERATURE: f64 = 2.0;
const WARM_TOKENS: usize = 10;
/// Maximum number of windows that are sampled together, and maximum bytes of their keys and values.
const AT_ONCE: usize = 64;
const CACHE_BYTES: usize = 4 << 30;
/// The type that the model computes in.
const ELEMENT: ElementType = ElementType::F32;
/// Placeholder for a user's message in a chat template.
const MESSAGE: &str = "MESSAGE";
const RENDERING_TIME: Duration = Duration::from_secs(60);

/// Windows of tokens that a model samples.
pub(crate) struct OwnText<'a> {
    pub model: &'a NamedModel,
    pub tokenizer: &'a TextTokenizer,
    pub windows: usize,
    /// Tokens of a window.
    pub length: usize,
    pub stop: &'a AtomicBool,
}

impl OnDevice for OwnText<'_> {
    type Output = anyhow::Result<Vec<Vec<u32>>>;

    fn run<B: Backend + Clone>(self, backend: B) -> Self::Output {
        let starts = starts(self.model, self.tokenizer, self.length)?;
        let model = self.model.load(backend, ELEMENT, self.length)?;
        let mut bar = Bar::count("sampling tokens", (self.windows * self.length) as u64);
        let config = &self.model.config;
        let of_token = 2 * config.key_value_width() * config.num_hidden_layers * ELEMENT.bytes();
        let at_once = (CACHE_BYTES / (of_token * self.length).max(1)).clamp(1, AT_ONCE);
        let mut windows = Vec::new();
        while windows.len() < self.windows {
            let first = windows.len();
            let group = first..self.windows.min(first + at_once);
            let group = group.map(|number| (number, &starts[number % starts.len()][..])).collect();
            let mut progress = |tokens| {
                bar.update(
                    (first * self.length + tokens) as u64,
                    (self.windows * self.length) as u64,
                );
                match self.stop.load(Ordering::Relaxed) {
                    true => Err(moh_convert::Error::Interrupted.into()),
                    false => Ok(()),
                }
            };
            let vocabulary = self.tokenizer.vocab_size();
            windows.extend(sample(&model, group, self.length, vocabulary, &mut progress)?);
        }
        Ok(windows)
    }
}

/// Returns the tokens with which windows start, in turn: the start of a text, and the text before a user's message in
/// the model's chat template.
fn starts(
    model: &NamedModel,
    tokenizer: &TextTokenizer,
    length: usize,
) -> anyhow::Result<Vec<Vec<u32>>> {
    let mut start = tokenizer.encode_prompt("")?;
    if start.is_empty() {
        let ends = moh_hf::end_tokens(&model.files(), &model.config)?;
        let separator = tokenizer.id("<|endoftext|>").or(ends.first().copied());
        start.push(separator.context("the model has no token that begins or ends a text")?);
    }
    let mut starts = vec![start];
    if let Some(template) = ChatTemplate::find(tokenizer)? {
        let template = RenderThreads::new(template, RENDERING_TIME)?;
        let conversation = Arc::new(Conversation::of_texts([("user", MESSAGE)]));
        // A template that rejects this conversation is for other conversations.
        if let Ok(rendered) = template.render(&conversation, false)
            && let Some((before, _)) = rendered.split_once(MESSAGE)
        {
            starts.push(tokenizer.encode_without_special_tokens(before)?);
        }
    }
    starts.retain(|start| (1..length).contains(&start.len()));
    anyhow::ensure!(!starts.is_empty(), "windows of {length} tokens are too short to begin");
    Ok(starts)
}

/// Samples windows of `length` tokens together, each after its start tokens. The windows' numbers seed the sampling.
/// `progress` is called with the number of tokens so far, over all windows.
fn sample<B: Backend>(
    model: &Model<B>,
    windows: Vec<(usize, &[u32])>,
    length: usize,
    vocabulary: usize,
    progress: &mut dyn FnMut(usize) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<Vec<u32>>> {
    let blocks = BatchOptions::for_tokens(length).blocks * windows.len();
    let options = BatchOptions { blocks, ..options::batch_options(model, length) };
    let mut generator = BatchGenerator::new(model, options)?;
    let mut ids: Vec<Vec<u32>> = windows.iter().map(|(_, start)| start.to_vec()).collect();
    let mut sequences = Vec::new();
    for start in &ids {
        let sequence = generator.add(start, 0)?;
        // Every token of a start except the last, so that the passes below have a single token of each window.
        for tokens in start[1..].chunks(options.pass_tokens) {
            generator.pass(&[Chunk { sequence, tokens: tokens.len(), logits: 0 }])?;
        }
        sequences.push(sequence);
    }
    while let Some(shortest) = ids.iter().map(Vec::len).min().filter(|&least| least < length) {
        let next: Vec<usize> = (0..ids.len()).filter(|&at| ids[at].len() == shortest).collect();
        let chunk = |&at: &usize| Chunk { sequence: sequences[at], tokens: 1, logits: 1 };
        let chunks: Vec<Chunk> = next.iter().map(chunk).collect();
        let request = |&at: &usize| {
            let (number, start) = windows[at];
            let mut sampler = sampler(number, ids[at].len(), start.len(), vocabulary);
            RowRequest { token: sampler.next_token(), log_probabilities: None }
        };
        let requests: Vec<RowRequest> = next.iter().map(request).collect();
        let chosen = generator.pass_choosing(&chunks, &requests, vocabulary, None)?;
        for (&at, choices) in next.iter().zip(chosen) {
            let choice = choices.into_iter().next().flatten();
            let token = choice.context("the model's logits are not finite")?.token;
            ids[at].push(token);
            if ids[at].len() < length {
                generator.push(sequences[at], token)?;
            }
        }
        progress(ids.iter().map(Vec::len).sum())?;
    }
    Ok(ids)
}

/// Samples the token at a position of a window that began with `start` tokens.
fn sampler(window: usize, position: usize, start: usize, vocabulary: usize) -> Sampler {
    let warm = (position - start) as f64 / WARM_TOKENS as f64;
    let temperature = (FIRST_TEMPERATURE - (FIRST_TEMPERATURE - 1.0) * warm).max(1.0);
    let seed = (window as u64) << 32 | position as u64;
    Sampler::new(seed, Sampling { temperature, ..Sampling::default() }, vocabulary)
}

/// Writes windows as documents of a token file.
pub(crate) fn keep(prefix: &Path, windows: &[Vec<u32>], vocabulary: usize) -> anyhow::Result<()> {
    let mut writer = TokenFileWriter::replace(prefix, vocabulary)?;
    for window in windows {
        writer.push_document(window)?;
    }
    writer.finish(TokenFileInfo::default())?;
    Ok(())
}
