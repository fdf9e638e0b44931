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
use super::token_text::{TokenTexts, finite};
use super::{ApiError, Fields, Served, answer_id};
use crate::engine::{ComputedPrompt, GeneratedToken, TokenHeads};
use moh_model::LogProbabilities;

/// Tokens that are generated unless the request says how many, as OpenAI's API has it.
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

/// Answers a request.
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
    fields.finish()?;

    let (prompts, texts) = read_prompts(Arc::clone(&served), prompts, special).await?;
    let room = |prompt: &Vec<u32>| {
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

/// The ids and the texts of the prompts.
async fn read_prompts(
    served: Arc<Served>,
    prompts: Prompts,
    special: bool,
) -> Result<(Vec<Vec<u32>>, Vec<String>), ApiError> {
    let read = move || {
        let tokenizer = &served.tokenizer;
        let encode = |text: &String| match special {
            true => tokenizer.encode_prompt(text),
            false => tokenizer.encode_without_special_tokens(text),
        };
        let texts = match prompts {
            Prompts::Text(text) => vec![text],
            Prompts::Texts(texts) => texts,
            Prompts::Ids(ids) => return of_ids(&served, vec![ids]),
            Prompts::ManyIds(lists) => return of_ids(&served, lists),
        };
        Ok((texts.iter().map(encode).collect::<Result<_, _>>()?, texts))
    };
    let (prompts, texts) = super::off_thread(read).await?;
    if prompts.is_empty() {
        return Err(ApiError::invalid("prompt is an empty list", Some("prompt")));
    }
    Ok((prompts, texts))
}

fn of_ids(
    served: &Served,
    prompts: Vec<Vec<u32>>,
) -> Result<(Vec<Vec<u32>>, Vec<String>), ApiError> {
    // Before they are decoded, which ignores what has no token.
    prompts.iter().try_for_each(|prompt| served.room_after(prompt, "prompt").map(|_| ()))?;
    let decode = |prompt: &Vec<u32>| served.tokenizer.decode(prompt, true);
    let texts = prompts.iter().map(decode).collect::<Result<_, _>>()?;
    Ok((prompts, texts))
}

/// The JSON of completions.
#[derive(Debug)]
struct Completions {
    /// The texts of the prompts, if they are repeated.
    texts: Option<Vec<String>>,
    /// Whether tokens are written as `token_id:N`.
    as_ids: bool,
}

impl Format for Completions {
    /// Characters before the next token.
    type State = usize;

    const OBJECT: &'static str = "text_completion";
    const PART: &'static str = Self::OBJECT;

    fn whole(&self, generation: &Generation<Self>, prompt: usize, choice: &WholeChoice) -> Value {
        let echo = self.texts.as_ref().map_or("", |texts| &texts[prompt]);
        let ids = &generation.prompts[prompt];
        let mut lists = LogprobLists::new(generation, 0);
        lists.prompt(ids, &choice.prompt, self.texts.is_some());
        choice.tokens.iter().for_each(|token| lists.generated(token));
        let heads = choice.tokens.iter().flat_map(|token| &token.heads);
        fields(
            &format!("{echo}{}", choice.text),
            lists.to_json(),
            Some(choice.reason),
            choice.prompt.heads.iter().chain(heads),
            generation.options.heads,
        )
    }

    fn begin(&self, _: &Generation<Self>, _: usize) -> (usize, Option<Value>) {
        (0, None)
    }

    fn part(
        &self,
        generation: &Generation<Self>,
        offset: &mut usize,
        prompt: usize,
        piece: &ChoiceEvent,
    ) -> Option<Value> {
        let wanted = generation.options.heads;
        let mut lists = LogprobLists::new(generation, *offset);
        let part = match piece {
            ChoiceEvent::Prompt(computed) => {
                let text = &self.texts.as_ref()?[prompt];
                lists.prompt(&generation.prompts[prompt], computed, true);
                fields(text, lists.to_json(), None, computed.heads.iter(), wanted)
            }
            ChoiceEvent::Token(token, text) => {
                lists.generated(token);
                fields(text, lists.to_json(), None, token.heads.iter(), wanted)
            }
            ChoiceEvent::End(text, reason) => {
                fields(text, Value::Null, Some(reason), [].iter(), wanted)
            }
        };
        *offset = lists.offset;
        Some(part)
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
    text_offset: Vec<usize>,
    offset: usize,
}

impl<'a> LogprobLists<'a> {
    fn new(generation: &'a Generation<Completions>, offset: usize) -> Self {
        LogprobLists {
            texts: TokenTexts::new(&generation.served.tokenizer, generation.format.as_ids),
            is_wanted: generation.logprobs.is_some(),
            tokens: Vec::new(),
            token_logprobs: Vec::new(),
            top_logprobs: Vec::new(),
            text_offset: Vec::new(),
            offset,
        }
    }

    /// The tokens of a prompt that is repeated. Nothing is known of the first one.
    fn prompt(&mut self, ids: &[u32], prompt: &ComputedPrompt, is_repeated: bool) {
        if is_repeated && self.is_wanted {
            let known = prompt.logprobs.iter().map(Some);
            for (&id, logprobs) in ids.iter().zip(std::iter::once(None).chain(known)) {
                self.push(id, logprobs);
            }
        }
    }

    fn generated(&mut self, token: &GeneratedToken) {
        if self.is_wanted {
            self.push(token.id, token.logprobs.as_ref());
        }
    }

    fn push(&mut self, id: u32, logprobs: Option<&LogProbabilities>) {
        let text = self.texts.of(id).0.clone();
        self.text_offset.push(self.offset);
        self.offset += text.chars().count();
        self.token_logprobs.push(logprobs.map(|logprobs| finite(logprobs.of_token)));
        let top = logprobs.map(|logprobs| {
            let mut top = Map::new();
            let own = (id, logprobs.of_token);
            for &(id, logprob) in logprobs.most_likely.iter().chain([&own]) {
                // Of tokens with the same text the likeliest.
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
