//! `/v1/models`, `/health` and `/metrics`: the served model, and the state of the server.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{StatusCode, Uri};
use axum::response::IntoResponse;
use serde_json::{Value, json};

use super::{ApiError, Served, no_path, unix_seconds};

pub(super) async fn models(State(served): State<Arc<Served>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [description(&served)] }))
}

pub(super) async fn model(
    State(served): State<Arc<Served>>,
    uri: Uri,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    // No model has a name that is not UTF-8.
    let Ok(Path(name)) = name else { return Err(no_path(uri).await) };
    served.check_model(Some(&name))?;
    Ok(Json(description(&served)))
}

fn description(served: &Served) -> Value {
    let checkpoint = served.checkpoint();
    json!({
        "id": served.name, "object": "model", "created": unix_seconds(served.started), "owned_by": "moh",
        "root": served.name, "parent": null, "max_model_len": served.context,
        "moh": {
            "layers": checkpoint.layers,
            "step": checkpoint.step,
            "has_chat_template": served.template.is_some(),
        },
    })
}

/// Returns 200 if requests are answered, and 503 if the server ends or its engine has stopped.
pub(super) async fn health(State(served): State<Arc<Served>>) -> StatusCode {
    match served.is_ending.load(Ordering::Relaxed) || served.engine.is_closed() {
        true => StatusCode::SERVICE_UNAVAILABLE,
        false => StatusCode::OK,
    }
}

pub(super) async fn metrics(State(served): State<Arc<Served>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(CONTENT_TYPE, kind)], served.metrics.text())
}
