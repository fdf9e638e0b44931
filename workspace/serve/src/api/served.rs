//! The served model, as the handlers know it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use axum::http::StatusCode;
use moh_text::{ChatTemplate, TextTokenizer};

use super::{ApiError, TextLimits};
use crate::engine::Handle;
use crate::metrics::Metrics;

/// The served model, and the handle of the engine that computes it.
#[derive(Debug)]
pub struct Served {
    /// The model's name for clients.
    pub name: String,
    /// The model's tokenizer.
    pub tokenizer: TextTokenizer,
    /// Its chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// The most tokens of a sequence.
    pub context: usize,
    /// Limits of the length of texts.
    pub limits: TextLimits,
    /// Rows of the model's vocabulary.
    pub vocab_size: usize,
    /// The checkpoint that is served, which may change.
    pub checkpoint: RwLock<Arc<Checkpoint>>,
    /// Tokens after which generation ends.
    pub end_tokens: Vec<u32>,
    /// The engine's queue.
    pub engine: Handle,
    /// The server's metrics.
    pub metrics: Arc<Metrics>,
    /// The longest time of a request.
    pub request_timeout: Option<Duration>,
    /// Whether the server ends once the answers that have begun are finished.
    pub is_ending: AtomicBool,
    /// When the server started.
    pub started: SystemTime,
}

/// The properties that differ between the checkpoints of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its step; `None` if the model is not a run's.
    pub step: Option<u64>,
    /// The heads of each layer.
    pub layers: Vec<LayerDescription>,
}

/// The query heads of a layer.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct LayerDescription {
    /// The number of heads.
    pub heads: usize,
    /// The number of heads that a token computes.
    pub active: usize,
    /// The heads that every token computes.
    pub shared: Vec<usize>,
}

impl Served {
    /// Returns the checkpoint that is served now.
    pub fn checkpoint(&self) -> Arc<Checkpoint> {
        // A panic leaves no partial value: values are replaced whole.
        Arc::clone(&self.checkpoint.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Replaces the checkpoint that is served.
    pub fn set_checkpoint(&self, checkpoint: Checkpoint) {
        let layers = checkpoint.layers.iter();
        self.metrics.set_heads(layers.map(|layer| layer.active as f64 / layer.heads as f64));
        *self.checkpoint.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(checkpoint);
    }

    /// Returns when a request that arrives now is cancelled.
    pub fn deadline(&self) -> Option<Instant> {
        self.request_timeout.and_then(|timeout| Instant::now().checked_add(timeout))
    }

    /// Rejects requests while the server ends, and requests that name another model.
    pub fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        if self.is_ending.load(Ordering::Relaxed) {
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is ending"));
        }
        match name {
            Some(name) if name != self.name => {
                let shown: String = name.chars().take(200).collect();
                let one = match Path::new(&self.name).is_absolute() {
                    true => "the one that GET /v1/models names".to_owned(),
                    false => format!("{:?}", self.name),
                };
                let message = format!("model {shown:?} is not served: ask for {one}");
                Err(ApiError {
                    param: Some("model".to_owned()),
                    ..ApiError::new(StatusCode::NOT_FOUND, message)
                })
            }
            _ => Ok(()),
        }
    }

    /// Rejects an empty list of prompts, and more choices than may wait.
    pub fn check_count(&self, prompts: usize, choices: usize) -> Result<(), ApiError> {
        if prompts == 0 {
            return Err(ApiError::invalid("prompt is an empty list", Some("prompt")));
        }
        let capacity = self.engine.capacity;
        if prompts.checked_mul(choices).is_none_or(|count| count > capacity) {
            let message = format!(
                "the request asks for more than the {capacity} choices that may wait: divide it"
            );
            return Err(ApiError::invalid(message, Some("n")));
        }
        Ok(())
    }

    /// Rejects `asked` if it is more than `room`, the tokens that the context has left after a prompt.
    pub fn check_room(
        &self,
        prompt: usize,
        room: usize,
        asked: Option<usize>,
        name: &str,
    ) -> Result<(), ApiError> {
        match asked {
            Some(asked) if asked > room => Err(ApiError::invalid(
                format!(
                    "{name} is {asked}: after a prompt of {prompt} tokens the context of {} tokens \
                     (--max-model-len of the server) has room for {room}",
                    self.context
                ),
                Some(name),
            )),
            _ => Ok(()),
        }
    }

    /// Rejects ids outside the vocabulary. They are from the field `name`.
    pub fn check_ids(&self, ids: &[u32], name: &str) -> Result<(), ApiError> {
        let vocabulary = self.vocab_size;
        let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) else { return Ok(()) };
        let token = self.tokenizer.token(*id);
        let shown = token.map_or(String::new(), |token| format!(" ({token:?})"));
        let message = format!("token id {id}{shown} is outside the vocabulary of {vocabulary} ids");
        Err(ApiError::invalid(message, Some(name)))
    }

    /// Returns the most tokens that can be generated after a prompt from the field `name`.
    pub fn room_after(&self, prompt: &[u32], name: &str) -> Result<usize, ApiError> {
        let invalid = |message: String| Err(ApiError::invalid(message, Some(name)));
        self.check_ids(prompt, name)?;
        let (tokens, context) = (prompt.len(), self.context);
        match context.checked_sub(tokens) {
            _ if tokens == 0 => invalid("the prompt has no tokens".to_owned()),
            Some(room) => Ok(room),
            None => invalid(format!(
                "the prompt has {tokens} tokens, more than the context of {context} (--max-model-len of the server)"
            )),
        }
    }
}
