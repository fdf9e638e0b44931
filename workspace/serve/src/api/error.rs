//! Errors in the format of OpenAI's API: a status, and a message with a remedy.

use std::fmt::Display;
use std::path::Path;

use axum::http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use moh_files::FileError;
use serde_json::{Value, json};

use crate::engine::{Failure, QueueFull};

/// Seconds after which a client should ask again if there is no place now.
const RETRY_SECONDS: u32 = 1;

/// The answer to a request that cannot be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    pub(super) status: StatusCode,
    pub(super) message: String,
    /// The field that is wrong.
    pub(super) param: Option<String>,
}

impl ApiError {
    /// Creates the error of a request that makes no sense, because of the field `param`.
    pub fn invalid(message: impl Into<String>, param: Option<&str>) -> Self {
        let (message, param) = (message.into(), param.map(str::to_owned));
        ApiError { status: StatusCode::BAD_REQUEST, message, param }
    }

    /// Creates an error with another status.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        ApiError { status, message: message.into(), param: None }
    }

    /// Returns the error as JSON, for a body or an event.
    pub fn to_json(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({ "error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.status.as_u16(),
        } })
    }
}

impl From<QueueFull> for ApiError {
    fn from(full: QueueFull) -> Self {
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, full.to_string())
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Late => ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "the request took longer than the server's --request-timeout: ask for fewer tokens",
            ),
            Failure::Computation(reason) => {
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, reason)
            }
        }
    }
}

impl From<moh_text::Error> for ApiError {
    /// Returns the error's sentence. Of a path it has only the file's name, because a client needs no directories.
    fn from(error: moh_text::Error) -> Self {
        let named = |path: &Path, reason: &dyn Display| {
            let name = path.file_name().unwrap_or_default().display();
            format!("{name}: {reason}")
        };
        let message = match &error {
            moh_text::Error::File(FileError::Io { path, source }) => named(path, source),
            moh_text::Error::File(FileError::Unusable { path, reason }) => named(path, reason),
            error => error.to_string(),
        };
        ApiError::invalid(message, None)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.to_json())).into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(RETRY_SECONDS));
        }
        response
    }
}
