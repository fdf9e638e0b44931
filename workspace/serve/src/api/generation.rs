//! Generates the choices of a request's prompts, at once or as a stream. Completions and chats differ only in the JSON.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::choice::{ChoiceEvent, ChoiceReader, WholeChoice};
use super::events::{Disconnected, EventSender, events};
use super::memory::{reserve, shrink};
use super::sampling::GenerationOptions;
use super::work::failed;
use super::{ApiError, Served};
use crate::engine::{Events, Request};
use crate::server::Held;

/// A request's prompts and options, and the format of its answer.
#[derive(Debug)]
pub(super) struct Generation<F> {
    pub served: Arc<Served>,
    pub options: GenerationOptions,
    pub prompts: Vec<Arc<[u32]>>,
    /// The most tokens to generate for each prompt.
    pub max_tokens: Vec<usize>,
    pub logprobs: Option<usize>,
    pub prompt_logprobs: Option<usize>,
    /// Whether to return the heads of the prompts' tokens.
    pub prompt_heads: bool,
    pub id: String,
    /// When the answer began, in seconds since 1970.
    pub created: u64,
    pub format: F,
}

/// Converts choices to JSON.
pub(super) trait Format: Send + Sync + Sized + 'static {
    /// The type of an answer.
    const OBJECT: &'static str;
    /// The type of a part of a streamed answer.
    const PART: &'static str;
    /// Approximate bytes of memory of a log-probability in an answer.
    const ENTRY_BYTES: usize;

    /// Returns the text of the prompt `prompt`, if choices repeat it.
    fn repeated(&self, _prompt: usize) -> &str {
        ""
    }

    /// Returns a whole choice of the prompt `prompt`.
    fn whole(&self, generation: &Generation<Self>, prompt: usize, choice: &WholeChoice) -> Value;

    /// Returns the fields of a streamed choice before its first token, if the format has any.
    fn begin(&self) -> Option<Value> {
        None
    }

    /// Returns the fields of a part of a choice.
    fn part(
        &self,
        generation: &Generation<Self>,
        prompt: usize,
        piece: &ChoiceEvent,
    ) -> Option<Value>;
}

/// Bytes of memory of a number in a list of an answer.
const NUMBER_BYTES: usize = 96;
/// Bytes of memory of a token in an answer, without its lists.
const TOKEN_BYTES: usize = 128;

/// Tokens of a request.
#[derive(Debug, Clone, Copy, Default)]
struct Usage {
    prompt: usize,
    cached: usize,
    generated: usize,
}

impl Usage {
    fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt, "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": { "cached_tokens": self.cached },
        })
    }
}

impl<F: Format> Generation<F> {
    pub async fn answer(self) -> Result<Response, ApiError> {
        let mut memory = reserve(self.bytes())?;
        let submitted = self.served.engine.submit(self.requests());
        let choices = submitted.inspect_err(|_| {
            self.served.metrics.refused.inc();
        })?;
        let choices: Vec<Events> = choices.into_iter().flatten().collect();
        let generation = Arc::new(self);
        let response = if generation.options.stream {
            let (sender, response) = events();
            tokio::spawn(stream(generation, choices, sender));
            response
        } else {
            let text = whole(generation, choices).await?;
            memory = shrink(memory, text.len());
            ([(CONTENT_TYPE, "application/json")], text).into_response()
        };
        Ok(response.map(|body| Body::new(Held::new(body, memory))))
    }

    /// Returns the approximate maximum bytes of memory of the answer. The parts of a stream need less, because each is
    /// sent before the next is made. The engine's results may still wait for the client.
    fn bytes(&self) -> usize {
        let (entry, number) = match self.options.stream {
            true => (2 * size_of::<(u32, f64)>(), size_of::<usize>()),
            false => (F::ENTRY_BYTES, NUMBER_BYTES),
        };
        let checkpoint = self.served.checkpoint();
        let heads: usize = checkpoint.layers.iter().map(|layer| layer.active + 3).sum();
        let token = |entry: usize, number: usize, logprobs: Option<usize>, has_heads: bool| {
            let listed = logprobs.map_or(0, |count| (count + 2) * entry);
            TOKEN_BYTES + listed + if has_heads { heads * number } else { 0 }
        };
        let generated = token(entry, number, self.logprobs, self.options.heads);
        // Even a stream has each prompt in a single part.
        let echoed = token(F::ENTRY_BYTES, NUMBER_BYTES, self.prompt_logprobs, self.prompt_heads);
        let prompts = self.prompts.iter().zip(&self.max_tokens).enumerate();
        let of_prompt = |(index, (prompt, &max_tokens)): (usize, (&Arc<[u32]>, &usize))| {
            let repeated = prompt.len().saturating_mul(echoed);
            let text = 3 * self.format.repeated(index).len();
            repeated.saturating_add(max_tokens.saturating_mul(generated)).saturating_add(text)
        };
        let all = prompts.map(of_prompt).fold(0, usize::saturating_add);
        all.saturating_mul(self.options.choices)
    }

    fn requests(&self) -> Vec<Vec<Request>> {
        let deadline = self.served.deadline();
        let prompts = self.prompts.iter().zip(&self.max_tokens);
        let group = |(prompt, &max_tokens): (&Arc<[u32]>, &usize)| {
            let one = |choice: usize| Request {
                prompt: Arc::clone(prompt),
                max_tokens,
                sampling: self.options.sampling.clone(),
                seed: self.options.seed.wrapping_add(choice as u64),
                end_tokens: self.options.end_tokens.clone(),
                logprobs: self.logprobs,
                prompt_logprobs: self.prompt_logprobs,
                heads: self.options.heads,
                prompt_heads: self.prompt_heads,
                streams: self.options.stream || !self.options.stops.is_empty(),
                deadline,
            };
            (0..self.options.choices).map(one).collect()
        };
        prompts.map(group).collect()
    }

    fn prompt_of(&self, index: usize) -> usize {
        index / self.options.choices
    }

    fn reader(&self, index: usize, events: Events) -> ChoiceReader<'_> {
        let prompt = &self.prompts[self.prompt_of(index)];
        ChoiceReader::new(&self.served, prompt, &self.options.stops, events)
    }

    fn prompt_usage(&self) -> Usage {
        Usage { prompt: self.prompts.iter().map(|prompt| prompt.len()).sum(), ..Usage::default() }
    }

    /// Returns an answer, or a part of a stream, with its choices.
    fn body(&self, object: &str, choices: &[impl Serialize], usage: Option<Value>) -> String {
        #[derive(Serialize)]
        struct Answer<'a, C> {
            id: &'a str,
            object: &'a str,
            created: u64,
            model: &'a str,
            choices: &'a [C],
            #[serde(skip_serializing_if = "Option::is_none")]
            usage: Option<Value>,
        }
        let (id, created, model) = (&self.id, self.created, &self.served.name);
        // Cannot fail: the keys of its maps are texts.
        serde_json::to_string(&Answer { id, object, created, model, choices, usage })
            .unwrap_or_default()
    }
}

/// Waits for all choices.
async fn whole<F: Format>(
    generation: Arc<Generation<F>>,
    choices: Vec<Events>,
) -> Result<String, ApiError> {
    let mut tasks = JoinSet::new();
    for (index, events) in choices.into_iter().enumerate() {
        let generation = Arc::clone(&generation);
        tasks.spawn(async move {
            let choice = WholeChoice::read(generation.reader(index, events)).await?;
            let prompt = generation.prompt_of(index);
            // Long lists of log-probabilities need time, for which other clients' tasks should not wait. As values,
            // they need many times the memory of their text.
            let text = tokio::task::block_in_place(|| {
                let mut fields = generation.format.whole(&generation, prompt, &choice);
                fields["index"] = index.into();
                to_raw_value(&fields)
            });
            Ok::<_, ApiError>((index, text.map_err(|_| failed())?, choice))
        });
    }
    let mut usage = generation.prompt_usage();
    let mut found: BTreeMap<usize, Box<RawValue>> = BTreeMap::new();
    // If a task fails or the client leaves, the tasks are dropped, which cancels the other sequences.
    while let Some(result) = tasks.join_next().await {
        let (index, text, choice) = result.unwrap_or_else(|_| Err(failed()))?;
        usage.generated += choice.tokens.len();
        if index.is_multiple_of(generation.options.choices) {
            usage.cached += choice.prompt.cached_tokens;
        }
        found.insert(index, text);
    }
    let choices: Vec<_> = found.into_values().collect();
    Ok(generation.body(F::OBJECT, &choices, Some(usage.to_json())))
}

/// Sends all choices as they are generated.
async fn stream<F: Format>(
    generation: Arc<Generation<F>>,
    choices: Vec<Events>,
    sender: EventSender,
) {
    let mut tasks = JoinSet::new();
    for (index, events) in choices.into_iter().enumerate() {
        let (generation, sender) = (Arc::clone(&generation), sender.clone());
        tasks.spawn(async move {
            tokio::select! {
                usage = stream_choice(&generation, index, events, &sender) => usage,
                () = sender.closed() => Err(Disconnected),
            }
        });
    }
    let mut usage = generation.prompt_usage();
    while let Some(result) = tasks.join_next().await {
        let Ok(choice) = result.unwrap_or(Err(Disconnected)) else { return };
        usage.generated += choice.generated;
        usage.cached += choice.cached;
    }
    if generation.options.include_usage {
        let body = generation.body(F::PART, &[(); 0], Some(usage.to_json()));
        if sender.send(&body).await.is_err() {
            return;
        }
    }
    // An error no longer matters, even if the client has left.
    let _ = sender.done().await;
}

async fn stream_choice<F: Format>(
    generation: &Generation<F>,
    index: usize,
    events: Events,
    sender: &EventSender,
) -> Result<Usage, Disconnected> {
    let prompt = generation.prompt_of(index);
    let mut reader = generation.reader(index, events);
    let mut usage = Usage::default();
    let send = async |mut choice: Value| {
        choice["index"] = index.into();
        let usage = generation.options.include_usage.then_some(Value::Null);
        let body = generation.body(F::PART, &[choice], usage);
        sender.send(&body).await
    };
    if let Some(choice) = generation.format.begin() {
        send(choice).await?;
    }
    while let Some(piece) = reader.next().await {
        let piece = match piece {
            Ok(piece) => piece,
            Err(error) => {
                sender.send(&error.to_json()).await?;
                sender.done().await?;
                return Err(Disconnected);
            }
        };
        match &piece {
            ChoiceEvent::Prompt(computed) if index.is_multiple_of(generation.options.choices) => {
                usage.cached = computed.cached_tokens;
            }
            ChoiceEvent::Token(..) => usage.generated += 1,
            _ => {}
        }
        if let Some(choice) = generation.format.part(generation, prompt, &piece) {
            send(choice).await?;
        }
    }
    Ok(usage)
}
