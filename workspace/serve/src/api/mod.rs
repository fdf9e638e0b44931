//! OpenAI's API: requests as JSON, answers as JSON or as a stream of events.

mod body;
mod chat;
mod choice;
mod completions;
mod error;
mod events;
mod fields;
mod generation;
mod memory;
mod models;
mod sampling;
mod served;
mod stop;
mod texts;
mod token_text;
mod tokens;
mod work;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::http::{Method, StatusCode, Uri};
use axum::routing::{get, post};

pub use error::ApiError;
pub use fields::Fields;
pub use served::{Checkpoint, LayerDescription, Served};
pub use texts::TextLimits;

/// Returns the paths of the API, and others.
pub fn routes(served: Arc<Served>, others: Router<Arc<Served>>) -> Router {
    others
        .route("/v1/completions", post(completions::completions))
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/models", get(models::models))
        .route("/v1/models/{*name}", get(models::model))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/tokenizer_info", get(tokens::tokenizer_info))
        .route("/health", get(models::health))
        .route("/metrics", get(models::metrics))
        .fallback(no_path)
        .method_not_allowed_fallback(no_method)
        .with_state(served)
}

async fn no_path(uri: Uri) -> ApiError {
    let shown: String = uri.path().chars().take(200).collect();
    ApiError::new(StatusCode::NOT_FOUND, format!("there is no path {shown}"))
}

async fn no_method(method: Method, uri: Uri) -> ApiError {
    let shown: String = uri.path().chars().take(200).collect();
    let method: String = method.as_str().chars().take(20).collect();
    let message = format!("{shown} does not take {method}");
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message)
}

fn answer_id(prefix: &str) -> String {
    format!("{prefix}-{:032x}", rand::random::<u128>())
}

fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
