//! The sampling fields that completions and chats share.

use std::collections::BTreeMap;

use moh_model::Sampling;
use serde::Deserialize;
use serde_json::json;

use super::{ApiError, Fields, Served};

/// The most stop strings of a request, as in OpenAI's API.
const MAX_STOPS: usize = 4;
const MAX_STOP_BYTES: usize = 1024;
/// The most likely tokens that a request may ask for.
pub(super) const MAX_LOGPROBS: usize = 20;
/// Lower temperatures select the most likely token: logits divided by them would not be finite.
const LEAST_TEMPERATURE: f64 = 1e-5;
/// The most tokens with a bias, and the most tokens that end the generation.
const MAX_TOKENS_NAMED: usize = 1024;
/// The most choices of a prompt.
const MAX_CHOICES: usize = 128;

/// Options of a request's sampling, and of its end.
#[derive(Debug)]
pub(super) struct GenerationOptions {
    pub sampling: Sampling,
    /// The seed of the first choice. The other choices have the next seeds.
    pub seed: u64,
    /// Choices of each prompt.
    pub choices: usize,
    pub stops: Vec<String>,
    pub end_tokens: Vec<u32>,
    pub stream: bool,
    pub include_usage: bool,
    /// Whether to return the heads of each token.
    pub heads: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl GenerationOptions {
    pub fn take(fields: &mut Fields, served: &Served) -> Result<Self, ApiError> {
        let choices = fields.take::<usize>("n", "a whole number")?.unwrap_or(1);
        if choices == 0 || choices > MAX_CHOICES {
            return Err(ApiError::invalid(format!("n must be from 1 to {MAX_CHOICES}"), Some("n")));
        }
        let seed = fields.take::<i64>("seed", "a whole number")?;
        let stream = fields.take("stream", "true or false")?.unwrap_or(false);
        let of_stream = stream_options(fields)?;
        if of_stream.is_some() && !stream {
            let message = "stream_options is of streams: set stream, or leave it out";
            return Err(ApiError::invalid(message, Some("stream_options")));
        }
        Ok(GenerationOptions {
            sampling: sampling(fields, served)?,
            seed: seed.map_or_else(rand::random, i64::cast_unsigned),
            choices,
            stops: stops(fields)?,
            end_tokens: end_tokens(fields, served)?,
            stream,
            include_usage: of_stream.unwrap_or(false),
            heads: fields.take("moh_heads", "true or false")?.unwrap_or(false),
        })
    }
}

/// Returns whether the usage is wanted; `None` without options. Rejects lists, which serde would accept as a struct.
fn stream_options(fields: &mut Fields) -> Result<Option<bool>, ApiError> {
    const NAME: &str = "stream_options";
    let expected = "an object with include_usage alone";
    let Some(options) = fields.take::<BTreeMap<String, Option<bool>>>(NAME, expected)? else {
        return Ok(None);
    };
    match options.keys().all(|key| key == "include_usage") {
        true => Ok(Some(options.values().any(|value| *value == Some(true)))),
        false => Err(ApiError::invalid(format!("{NAME} must be {expected}"), Some(NAME))),
    }
}

fn sampling(fields: &mut Fields, served: &Served) -> Result<Sampling, ApiError> {
    const PENALTY: &str = "a number from -2 to 2";
    let is_penalty = |value: f64| (-2.0..=2.0).contains(&value);
    // 0 and -1 mean no limit, as in vLLM.
    let small = |_| ApiError::invalid("top_k must be at least 1, or -1", Some("top_k"));
    let top_k = match fields.take::<i64>("top_k", "a whole number")? {
        None | Some(-1 | 0) => None,
        Some(k) => Some(usize::try_from(k).map_err(small)?),
    };
    let in_unit = |value: f64| (0.0..=1.0).contains(&value);
    let top_p =
        fields.number("top_p", 1.0, |p| p > 0.0 && p <= 1.0, "a number above 0 and at most 1")?;
    let min_p = fields.number("min_p", 0.0, in_unit, "a number from 0 to 1")?;
    let repetition = fields.number(
        "repetition_penalty",
        1.0,
        |p| (0.01..=100.0).contains(&p),
        "a number from 0.01 to 100",
    )?;
    let temperature =
        fields.number("temperature", 1.0, |t| (0.0..=2.0).contains(&t), "a number from 0 to 2")?;
    Ok(Sampling {
        temperature: if temperature < LEAST_TEMPERATURE { 0.0 } else { temperature },
        top_k,
        top_p: Some(top_p).filter(|&p| p < 1.0),
        min_p: Some(min_p).filter(|&p| p > 0.0),
        repetition_penalty: Some(repetition).filter(|&p| p != 1.0),
        presence_penalty: fields.number("presence_penalty", 0.0, is_penalty, PENALTY)?,
        frequency_penalty: fields.number("frequency_penalty", 0.0, is_penalty, PENALTY)?,
        logit_bias: logit_bias(fields, served)?,
    })
}

fn logit_bias(fields: &mut Fields, served: &Served) -> Result<Vec<(u32, f32)>, ApiError> {
    const NAME: &str = "logit_bias";
    let biases = fields
        .take::<BTreeMap<String, f32>>(NAME, "an object with numbers by token ids")?
        .unwrap_or_default();
    if biases.len() > MAX_TOKENS_NAMED {
        let message = format!("{NAME} has more than {MAX_TOKENS_NAMED} tokens");
        return Err(ApiError::invalid(message, Some(NAME)));
    }
    let one = |(id, bias): (String, f32)| match id.parse::<u32>() {
        Ok(number)
            if (number as usize) < served.vocab_size
                && number.to_string() == id
                && (-100.0..=100.0).contains(&bias) =>
        {
            Ok((number, bias))
        }
        _ => {
            let shown: String = id.chars().take(20).collect();
            let last = served.vocab_size.saturating_sub(1);
            let message = format!(
                "{NAME} of {shown:?}: must be a number from -100 to 100 of a token id from 0 to {last}"
            );
            Err(ApiError::invalid(message, Some(NAME)))
        }
    };
    biases.into_iter().map(one).collect()
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    const NAME: &str = "stop";
    let stops = match fields.take::<OneOrMany<String>>(NAME, "a string or a list of strings")? {
        None => Vec::new(),
        Some(OneOrMany::One(stop)) => vec![stop],
        Some(OneOrMany::Many(stops)) => stops,
    };
    let invalid = |message: String| Err(ApiError::invalid(message, Some(NAME)));
    if stops.len() > MAX_STOPS {
        return invalid(format!(
            "{NAME} has {} strings, and at most {MAX_STOPS} are allowed",
            stops.len()
        ));
    }
    if stops.iter().any(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
        return invalid(format!("a string of {NAME} must have 1 to {MAX_STOP_BYTES} bytes"));
    }
    Ok(stops)
}

fn end_tokens(fields: &mut Fields, served: &Served) -> Result<Vec<u32>, ApiError> {
    const NAME: &str = "stop_token_ids";
    let ignored = fields.take("ignore_eos", "true or false")?.unwrap_or(false);
    let mut ends = if ignored { Vec::new() } else { served.end_tokens.clone() };
    let named = fields.take::<Vec<u32>>(NAME, "a list of token ids")?.unwrap_or_default();
    if named.len() > MAX_TOKENS_NAMED {
        let message = format!("{NAME} has more than {MAX_TOKENS_NAMED} ids");
        return Err(ApiError::invalid(message, Some(NAME)));
    }
    served.check_ids(&named, NAME)?;
    ends.extend(named);
    Ok(ends)
}

/// Drops fields of OpenAI's and vLLM's APIs that never change an answer, and fields with values that ask for nothing.
pub(super) fn drop_defaults(fields: &mut Fields) -> Result<(), ApiError> {
    for name in ["user", "metadata", "safety_identifier", "prompt_cache_key"] {
        fields.ignore(name);
    }
    fields.accept("store", &[json!(false)])?;
    fields.accept("service_tier", &[json!("auto"), json!("default")])?;
    fields.accept("skip_special_tokens", &[json!(true)])?;
    fields.accept("spaces_between_special_tokens", &[json!(true)])?;
    fields.accept("include_stop_str_in_output", &[json!(false)])?;
    fields.accept("use_beam_search", &[json!(false)])?;
    fields.accept("length_penalty", &[json!(1), json!(1.0)])?;
    fields.accept("min_tokens", &[json!(0)])
}
