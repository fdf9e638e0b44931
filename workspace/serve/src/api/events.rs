//! Answers as a stream of server-sent events.

use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::Value;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

/// Events that wait for a client to take them.
const WAITING_EVENTS: usize = 64;
/// The time in which a client has to take one of them.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sends events to a client.
#[derive(Debug, Clone)]
pub(super) struct EventSender(Sender<Bytes>);

/// The client has left, or takes no more.
#[derive(Debug)]
pub(super) struct Gone;

/// A sender of events, and the answer that has them.
pub(super) fn events() -> (EventSender, Response) {
    let (sender, receiver) = channel(WAITING_EVENTS);
    (EventSender(sender), response(receiver))
}

fn response(receiver: Receiver<Bytes>) -> Response {
    let stream = ReceiverStream::new(receiver).map(Ok::<_, std::convert::Infallible>);
    let headers = [(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(stream)).into_response()
}

impl EventSender {
    /// Sends an event with JSON.
    pub async fn send(&self, data: &Value) -> Result<(), Gone> {
        self.send_text(&data.to_string()).await
    }

    /// Sends the event after the last one.
    pub async fn done(&self) -> Result<(), Gone> {
        self.send_text("[DONE]").await
    }

    async fn send_text(&self, text: &str) -> Result<(), Gone> {
        let event = Bytes::from(format!("data: {text}\n\n"));
        self.0.send_timeout(event, PATIENCE).await.map_err(|_| Gone)
    }

    /// Waits until the client has left.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}
