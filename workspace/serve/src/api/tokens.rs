//! `/tokenize`, `/detokenize` and `/tokenizer_info`, as in vLLM: clients that count tokens need no tokenizer.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::work::{Kind, off_thread};
use super::{ApiError, Fields, Served};

/// Approximate bytes of a token's text.
const ID_BYTES: usize = 8;

/// Returns the ids of a text.
pub(super) async fn tokenize(
    State(served): State<Arc<Served>>,
    mut fields: Fields,
) -> Result<Json<Value>, ApiError> {
    served.check_model(fields.take::<String>("model", "a string")?.as_deref())?;
    let text = fields
        .take::<String>("prompt", "a string")?
        .ok_or_else(|| ApiError::invalid("the prompt is missing", Some("prompt")))?;
    let special = fields.take("add_special_tokens", "true or false")?.unwrap_or(true);
    let with_texts = fields.take("return_token_strs", "true or false")?.unwrap_or(false);
    let _room = fields.finish()?;
    let (ids, _) = served.encode(text, special, served.limits.tokens(), "prompt").await?;
    off_thread(Kind::Text, ids.len() * ID_BYTES, move || {
        let texts = || ids.iter().map(|&id| served.tokenizer.token(id)).collect::<Vec<_>>();
        Ok(Json(json!({
            "count": ids.len(), "max_model_len": served.context, "tokens": ids,
            "token_strs": with_texts.then(texts),
        })))
    })
    .await
}

/// Returns the text of ids.
pub(super) async fn detokenize(
    State(served): State<Arc<Served>>,
    mut fields: Fields,
) -> Result<Json<Value>, ApiError> {
    served.check_model(fields.take::<String>("model", "a string")?.as_deref())?;
    let ids = fields
        .take::<Vec<u32>>("tokens", "a list of token ids")?
        .ok_or_else(|| ApiError::invalid("tokens are missing", Some("tokens")))?;
    let _room = fields.finish()?;
    let (name, most) = (Some("tokens"), served.limits.tokens());
    if ids.len() > most {
        let message = format!("tokens has {} ids, and {most} are the most", ids.len());
        return Err(ApiError::invalid(message, name));
    }
    served.check_ids(&ids, "tokens")?;
    if let Some(id) = ids.iter().find(|&&id| served.tokenizer.token(id).is_none()) {
        return Err(ApiError::invalid(format!("token id {id} has no token"), name));
    }
    let bytes = ids.len() * ID_BYTES;
    let decode = move || Ok(served.tokenizer.decode(&ids, false)?);
    let text = off_thread(Kind::Text, bytes, decode).await?;
    Ok(Json(json!({ "prompt": text })))
}

/// Returns the properties of the tokenizer that clients need.
pub(super) async fn tokenizer_info(State(served): State<Arc<Served>>) -> Json<Value> {
    let tokenizer = &served.tokenizer;
    let token = |id: Option<u32>| id.and_then(|id| tokenizer.token(id));
    let beginning = tokenizer.encode_prompt("").ok().and_then(|ids| ids.first().copied());
    let template = served.template.as_ref().map(moh_text::ChatTemplate::text);
    Json(json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "vocab_size": tokenizer.vocab_size(),
        "model_max_length": served.context, "bos_token": token(beginning),
        "eos_token": token(served.end_tokens.first().copied()),
        "chat_template": template,
    }))
}
