//! `/v1/completions`: continues texts, or scores them.

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::choice::{ChoiceEvent, WholeChoice};
use super::generation::{Format, Generation};
use super::sampling::{GenerationOptions, MAX_LOGPROBS, drop_defaults};
use super::token_text::{Offsets, TokenTexts, finite};
use super::work::{Kind, off_thread};
use super::{ApiError, Fields, Served, answer_id};
use crate::engine::{ComputedPrompt, GeneratedToken, TokenHeads};
use moh_model::LogProbabilities;

/// The default number of generated tokens, as in OpenAI's API.
const MAX_TOKENS: usize = 16;

/// A prompt as a text or as ids, or several of them.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<u32>),
    ManyIds(Vec<Vec<u32>>),
}

pub(super) async fn completions(
    State(served): State<Arc<Served>>,
    mut fields: Fields,
) -> Result<Response, ApiError> {
    served.check_model(fields.take::<String>("model", "a string")?.as_deref())?;
    let prompts = "a string, a list of strings, a list of token ids, or a list of such lists";
    let prompts = fields
        .take::<Prompts>("prompt", prompts)?
        .ok_or_else(|| ApiError::invalid("the prompt is missing", Some("prompt")))?;
    let special = fields.take("add_special_tokens", "true or false")?.unwrap_or(true);
    let options = GenerationOptions::take(&mut fields, &served)?;
    let max_tokens = fields.take::<usize>("max_tokens", "a whole number")?;
    let echo = fields.take("echo", "true or false")?.unwrap_or(false);
    let logprobs = fields.take::<usize>("logprobs", "a whole number")?;
    if logprobs.is_some_and(|count| count > MAX_LOGPROBS) {
        let message = format!("logprobs must be at most {MAX_LOGPROBS}");
        return Err(ApiError::invalid(message, Some("logprobs")));
    }
    let as_ids = fields.take("return_tokens_as_token_ids", "true or false")?.unwrap_or(false);
    fields.accept("best_of", &[json!(options.choices)])?;
    fields.accept("suffix", &[])?;
    drop_defaults(&mut fields)?;
    let body = fields.finish()?;

    let (prompts, texts) = read_prompts(&served, prompts, special, options.choices).await?;
    drop(body);
    let room = |prompt: &Arc<[u32]>| {
        let room = served.room_after(prompt, "prompt")?;
        served.check_room(prompt.len(), room, max_tokens, "max_tokens")?;
        Ok(max_tokens.unwrap_or(MAX_TOKENS).min(room))
    };
    let max_tokens = prompts.iter().map(room).collect::<Result<_, ApiError>>()?;
    Generation {
        id: answer_id("cmpl"),
        created: super::unix_seconds(SystemTime::now()),
        prompts,
        max_tokens,
        logprobs,
        prompt_logprobs: logprobs.filter(|_| echo),
        prompt_heads: options.heads && echo,
        format: Completions { texts: echo.then_some(texts), as_ids },
        options,
        served,
    }
    .answer()
    .await
}

/// The ids and the texts of prompts.
type Read = (Vec<Arc<[u32]>>, Vec<String>);

/// Reads the prompts, with `choices` choices each. Texts are read one after another, so that a long list does not delay
/// the lists of other requests.
async fn read_prompts(
    served: &Arc<Served>,
    prompts: Prompts,
    special: bool,
    choices: usize,
) -> Result<Read, ApiError> {
    let texts = match prompts {
        Prompts::Text(text) => vec![text],
        Prompts::Texts(texts) => texts,
        Prompts::Ids(ids) => return of_ids(served, vec![ids], choices).await,
        Prompts::ManyIds(lists) => return of_ids(served, lists, choices).await,
    };
    served.check_count(texts.len(), choices)?;
    let (mut prompts, mut kept) = (Vec::new(), Vec::new());
    for text in texts {
        let (ids, text) = served.encode(text, special, served.context, "prompt").await?;
        // Check before the next text is read.
        served.room_after(&ids, "prompt")?;
        prompts.push(ids.into());
        kept.push(text);
    }
    Ok((prompts, kept))
}

async fn of_ids(
    served: &Arc<Served>,
    prompts: Vec<Vec<u32>>,
    choices: usize,
) -> Result<Read, ApiError> {
    served.check_count(prompts.len(), choices)?;
    // Check before decoding, which ignores ids without a token.
    prompts.iter().try_for_each(|prompt| served.room_after(prompt, "prompt").map(|_| ()))?;
    let bytes = prompts.iter().map(|prompt| 8 * prompt.len()).sum();
    let served = Arc::clone(served);
    off_thread(Kind::Text, bytes, move || {
        let decode = |prompt: &Vec<u32>| served.tokenizer.decode(prompt, true);
        let texts = prompts.iter().map(decode).collect::<Result<_, _>>()?;
        Ok((prompts.into_iter().map(Arc::from).collect(), texts))
    })
    .await
}

#[derive(Debug)]
struct Completions {
    /// The texts of the prompts, if they are repeated.
    texts: Option<Vec<String>>,
    /// Whether tokens are written as `token_id:N`.
    as_ids: bool,
}

impl Format for Completions {
    const OBJECT: &'static str = "text_completion";
    const PART: &'static str = Self::OBJECT;
    const ENTRY_BYTES: usize = 200;

    fn repeated(&self, prompt: usize) -> &str {
        self.texts.as_ref().map_or("", |texts| &texts[prompt])
    }

    fn whole(&self, generation: &Generation<Self>, prompt: usize, choice: &WholeChoice) -> Value {
        let echo = self.repeated(prompt);
        let ids = &generation.prompts[prompt];
        let mut lists = LogprobLists::new(generation);
        lists.prompt(ids, &choice.prompt, self.texts.is_some());
        for (token, offset) in choice.tokens.iter().zip(&choice.offsets) {
            lists.generated(token, echo.chars().count() + offset);
        }
        let heads = choice.tokens.iter().flat_map(|token| &token.heads);
        fields(
            &format!("{echo}{}", choice.text),
            lists.to_json(),
            Some(choice.reason),
            choice.prompt.heads.iter().chain(heads),
            generation.options.heads,
        )
    }

    fn part(
        &self,
        generation: &Generation<Self>,
        prompt: usize,
        piece: &ChoiceEvent,
    ) -> Option<Value> {
        let wanted = generation.options.heads;
        let mut lists = LogprobLists::new(generation);
        Some(match piece {
            ChoiceEvent::Prompt(computed) => {
                let text = &self.texts.as_ref()?[prompt];
                lists.prompt(&generation.prompts[prompt], computed, true);
                fields(text, lists.to_json(), None, computed.heads.iter(), wanted)
            }
            ChoiceEvent::Token(token, text, offset) => {
                lists.generated(token, self.repeated(prompt).chars().count() + offset);
                fields(text, lists.to_json(), None, token.heads.iter(), wanted)
            }
            ChoiceEvent::End(text, reason) => {
                fields(text, Value::Null, Some(reason), [].iter(), wanted)
            }
        })
    }
}

fn fields<'a>(
    text: &str,
    logprobs: Value,
    reason: Option<&str>,
    heads: impl Iterator<Item = &'a TokenHeads>,
    wants_heads: bool,
) -> Value {
    let mut fields = json!({ "text": text, "logprobs": logprobs, "finish_reason": reason });
    if wants_heads {
        fields["moh_heads"] = json!(heads.collect::<Vec<_>>());
    }
    fields
}

/// The lists of log-probabilities by token.
struct LogprobLists<'a> {
    texts: TokenTexts<'a>,
    is_wanted: bool,
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f64>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Characters of the text before each token.
    text_offset: Vec<usize>,
}

impl<'a> LogprobLists<'a> {
    fn new(generation: &'a Generation<Completions>) -> Self {
        LogprobLists {
            texts: TokenTexts::new(&generation.served.tokenizer, generation.format.as_ids),
            is_wanted: generation.logprobs.is_some(),
            tokens: Vec::new(),
            token_logprobs: Vec::new(),
            top_logprobs: Vec::new(),
            text_offset: Vec::new(),
        }
    }

    /// Adds the tokens of a prompt, if the answer repeats it. The first token has no log-probability.
    fn prompt(&mut self, ids: &[u32], prompt: &ComputedPrompt, is_repeated: bool) {
        if is_repeated && self.is_wanted {
            let known = prompt.logprobs.iter().map(Some);
            let mut text = self.texts.tokenizer.stream(&[], true);
            let mut offsets = Offsets::default();
            for (&id, logprobs) in ids.iter().zip(std::iter::once(None).chain(known)) {
                self.push(id, logprobs, offsets.next(&text.push(id).unwrap_or_default()));
            }
        }
    }

    fn generated(&mut self, token: &GeneratedToken, offset: usize) {
        if self.is_wanted {
            self.push(token.id, token.logprobs.as_ref(), offset);
        }
    }

    fn push(&mut self, id: u32, logprobs: Option<&LogProbabilities>, offset: usize) {
        let text = self.texts.of(id).0.clone();
        self.text_offset.push(offset);
        self.token_logprobs.push(logprobs.map(|logprobs| finite(logprobs.of_token)));
        let top = logprobs.map(|logprobs| {
            let mut top = Map::new();
            let own = (id, logprobs.of_token);
            for &(id, logprob) in logprobs.most_likely.iter().chain([&own]) {
                // If tokens have the same text, the likeliest is listed.
                let text = self.texts.of(id).0.clone();
                top.entry(text).or_insert_with(|| json!(finite(logprob)));
            }
            top
        });
        self.top_logprobs.push(top);
        self.tokens.push(text);
    }

    fn to_json(&self) -> Value {
        if !self.is_wanted {
            return Value::Null;
        }
        json!({
            "tokens": self.tokens, "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs, "text_offset": self.text_offset,
        })
    }
}
