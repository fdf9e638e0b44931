//! Answers as a stream of server-sent events.

use std::fmt::Display;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio_stream::Stream;

/// Events that wait for a client to take them.
const WAITING_EVENTS: usize = 64;
/// The time in which a client has to read one of them.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);

/// Sends events, and marks the last event.
#[derive(Debug, Clone)]
pub(super) struct EventSender(Sender<Option<Bytes>>);

/// The client has left, or reads no more.
#[derive(Debug)]
pub(super) struct Disconnected;

/// Returns a sender of events, and the answer that contains them.
pub(super) fn events() -> (EventSender, Response) {
    let (sender, receiver) = channel(WAITING_EVENTS);
    let body = Body::from_stream(EventStream(receiver));
    let headers = [(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-cache")];
    (EventSender(sender), (headers, body).into_response())
}

impl EventSender {
    /// Sends an event with JSON.
    pub async fn send(&self, data: &impl Display) -> Result<(), Disconnected> {
        let event = Some(Bytes::from(format!("data: {data}\n\n")));
        self.0.send_timeout(event, SEND_TIMEOUT).await.map_err(|_| Disconnected)
    }

    /// Sends the end of the stream, after the last event.
    pub async fn done(&self) -> Result<(), Disconnected> {
        self.send(&"[DONE]").await?;
        self.0.send_timeout(None, SEND_TIMEOUT).await.map_err(|_| Disconnected)
    }

    /// Waits until the client has left.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}

/// The events as a body. If it ends before its last event, it breaks off, so that no client takes it as whole.
struct EventStream(Receiver<Option<Bytes>>);

impl Stream for EventStream {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let event = ready!(self.0.poll_recv(context));
        Poll::Ready(event.ok_or(io::ErrorKind::ConnectionAborted.into()).transpose())
    }
}
