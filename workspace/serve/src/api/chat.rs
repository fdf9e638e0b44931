//! `/v1/chat/completions`: answers a conversation in the tokenizer's template.

use std::sync::Arc;
use std::time::SystemTime;

use axum::extract::State;
use axum::response::Response;
use moh_text::{Conversation, MESSAGES_OF_LEAST_WORK};
use serde_json::{Value, json};

use super::choice::{ChoiceEvent, WholeChoice};
use super::generation::{Format, Generation};
use super::sampling::{GenerationOptions, MAX_LOGPROBS, drop_defaults};
use super::token_text::{TokenTexts, finite};
use super::work::within_limit;
use super::{ApiError, Fields, Served, answer_id};
use crate::engine::GeneratedToken;

pub(super) async fn chat_completions(
    State(served): State<Arc<Served>>,
    mut fields: Fields,
) -> Result<Response, ApiError> {
    served.check_model(fields.take::<String>("model", "a string")?.as_deref())?;
    let messages = fields
        .take::<Value>("messages", "a list of messages")?
        .ok_or_else(|| ApiError::invalid("messages are missing", Some("messages")))?;
    let options = GenerationOptions::take(&mut fields, &served)?;
    // `max_tokens` is the older name of the field.
    let old = fields.take::<usize>("max_tokens", "a whole number")?;
    let new = fields.take::<usize>("max_completion_tokens", "a whole number")?;
    let limit = if new.is_some() { "max_completion_tokens" } else { "max_tokens" };
    let max_tokens = new.or(old);
    let logprobs = fields.take("logprobs", "true or false")?.unwrap_or(false);
    let top_logprobs = fields.take::<usize>("top_logprobs", "a whole number")?;
    if top_logprobs.is_some_and(|count| count > MAX_LOGPROBS || (count > 0 && !logprobs)) {
        let message = format!("top_logprobs must be at most {MAX_LOGPROBS}, and requires logprobs");
        return Err(ApiError::invalid(message, Some("top_logprobs")));
    }
    fields.accept("tools", &[json!([])])?;
    fields.accept("tool_choice", &[json!("none"), json!("auto")])?;
    fields.accept("parallel_tool_calls", &[json!(false), json!(true)])?;
    fields.accept("response_format", &[json!({ "type": "text" })])?;
    fields.accept("modalities", &[json!(["text"])])?;
    fields.accept("add_generation_prompt", &[json!(true)])?;
    fields.accept("add_special_tokens", &[json!(false)])?;
    fields.accept("chat_template_kwargs", &[json!({})])?;
    fields.accept("echo", &[json!(false)])?;
    fields.accept("functions", &[json!([])])?;
    fields.accept("function_call", &[json!("none"), json!("auto")])?;
    served.check_count(1, options.choices)?;
    drop_defaults(&mut fields)?;
    let body = fields.finish()?;

    let conversation = conversation(messages)?;
    let rendering = Arc::clone(&served);
    let threads = 1 + conversation.messages().len() / MESSAGES_OF_LEAST_WORK;
    // A rendering that was given up keeps the conversation and its room.
    let (text, body) = within_limit("the chat template", threads, move || {
        Ok((render(&rendering, &conversation)?, body))
    })
    .await?;
    let (prompt, _) = served.encode(text, false, served.context, "messages").await?;
    drop(body);
    let room = served.room_after(&prompt, "messages")?;
    served.check_room(prompt.len(), room, max_tokens, limit)?;
    Generation {
        id: answer_id("chatcmpl"),
        created: super::unix_seconds(SystemTime::now()),
        prompts: vec![prompt.into()],
        max_tokens: vec![max_tokens.unwrap_or(room).min(room)],
        logprobs: logprobs.then_some(top_logprobs.unwrap_or(0)),
        prompt_logprobs: None,
        prompt_heads: false,
        format: Chat,
        options,
        served,
    }
    .answer()
    .await
}

/// Returns a conversation. Its texts may be lists of parts.
fn conversation(messages: Value) -> Result<Conversation, ApiError> {
    let invalid = |message: String| ApiError::invalid(message, Some("messages"));
    let messages_of = messages.as_array().into_iter().flatten();
    let mut parts = messages_of.filter_map(|message| message["content"].as_array()).flatten();
    let other = parts.find(|part| part["type"] != "text" || !part["text"].is_string());
    if let Some(part) = other {
        return Err(invalid(format!(
            "a part of a message has type {:?}, and only \"text\" is supported",
            part["type"].as_str().unwrap_or_default()
        )));
    }
    let conversation = Conversation::from_json(messages, Value::Null);
    let conversation = conversation.map_err(|error| invalid(error.to_string()))?;
    Ok(conversation.with_adapted_content())
}

/// Returns the text of a conversation. The template adds BOS where the model expects it.
fn render(served: &Served, conversation: &Conversation) -> Result<String, ApiError> {
    let template = served.template.as_ref().ok_or_else(|| {
        ApiError::invalid("the model has no chat template: ask /v1/completions", None)
    })?;
    let rendered = template.renderer().and_then(|renderer| renderer.render(conversation, true));
    rendered.map_err(|error| ApiError { param: Some("messages".to_owned()), ..error.into() })
}

#[derive(Debug)]
struct Chat;

impl Format for Chat {
    const OBJECT: &'static str = "chat.completion";
    const PART: &'static str = "chat.completion.chunk";
    const ENTRY_BYTES: usize = 800;

    fn whole(&self, generation: &Generation<Self>, _: usize, choice: &WholeChoice) -> Value {
        let mut fields = json!({
            "message": { "role": "assistant", "content": choice.text },
            "logprobs": logprobs(generation, &choice.tokens),
            "finish_reason": choice.reason,
        });
        if generation.options.heads {
            let heads = choice.tokens.iter().flat_map(|token| &token.heads);
            fields["moh_heads"] = json!(heads.collect::<Vec<_>>());
        }
        fields
    }

    fn begin(&self) -> Option<Value> {
        let delta = json!({ "role": "assistant", "content": "" });
        Some(json!({ "delta": delta, "logprobs": null, "finish_reason": null }))
    }

    fn part(&self, generation: &Generation<Self>, _: usize, piece: &ChoiceEvent) -> Option<Value> {
        let (text, tokens, heads, reason) = match piece {
            ChoiceEvent::Prompt(_) => return None,
            ChoiceEvent::Token(token, text, _) => {
                (&**text, std::slice::from_ref(token), &token.heads, None)
            }
            ChoiceEvent::End(text, reason) => (&**text, &[][..], &Vec::new(), Some(*reason)),
        };
        let delta = if text.is_empty() { json!({}) } else { json!({ "content": text }) };
        let mut fields = json!({
            "delta": delta, "logprobs": logprobs(generation, tokens), "finish_reason": reason,
        });
        if generation.options.heads {
            fields["moh_heads"] = json!(heads);
        }
        Some(fields)
    }
}

/// Returns the log-probabilities of tokens, if they are wanted.
fn logprobs(generation: &Generation<Chat>, tokens: &[GeneratedToken]) -> Value {
    if generation.logprobs.is_none() || tokens.is_empty() {
        return Value::Null;
    }
    let mut texts = TokenTexts::new(&generation.served.tokenizer, false);
    let mut entry = |id: u32, logprob: f64| {
        let (text, bytes) = texts.of(id);
        json!({ "token": text, "logprob": finite(logprob), "bytes": bytes })
    };
    let mut content = Vec::new();
    for token in tokens {
        let Some(logprobs) = &token.logprobs else { continue };
        let mut fields = entry(token.id, logprobs.of_token);
        let top = logprobs.most_likely.iter().map(|&(id, logprob)| entry(id, logprob));
        fields["top_logprobs"] = top.collect();
        content.push(fields);
    }
    json!({ "content": content })
}
