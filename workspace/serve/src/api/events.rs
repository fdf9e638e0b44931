//! Answers as a stream of server-sent events.

use std::fmt::Display;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio_stream::Stream;

/// Events that wait for a client to take them.
const WAITING_EVENTS: usize = 64;
/// The time in which a client has to take one of them.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub(super) struct EventSender {
    sender: Sender<Bytes>,
    is_done: Arc<AtomicBool>,
}

/// The client has left, or takes no more.
#[derive(Debug)]
pub(super) struct Disconnected;

/// A sender of events, and the answer that has them.
pub(super) fn events() -> (EventSender, Response) {
    let (sender, receiver) = channel(WAITING_EVENTS);
    let is_done = Arc::new(AtomicBool::new(false));
    let body = EventStream { receiver, is_done: Arc::clone(&is_done) };
    let headers = [(CONTENT_TYPE, "text/event-stream; charset=utf-8"), (CACHE_CONTROL, "no-cache")];
    (EventSender { sender, is_done }, (headers, Body::from_stream(body)).into_response())
}

impl EventSender {
    /// Sends an event with JSON.
    pub async fn send(&self, data: &impl Display) -> Result<(), Disconnected> {
        let event = Bytes::from(format!("data: {data}\n\n"));
        self.sender.send_timeout(event, SEND_TIMEOUT).await.map_err(|_| Disconnected)
    }

    /// Sends the event after the last one.
    pub async fn done(&self) -> Result<(), Disconnected> {
        self.send(&"[DONE]").await?;
        self.is_done.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Waits until the client has left.
    pub async fn closed(&self) {
        self.sender.closed().await;
    }
}

/// The events as a body. One that ends before its last event breaks off, so that nobody takes it for whole.
struct EventStream {
    receiver: Receiver<Bytes>,
    is_done: Arc<AtomicBool>,
}

impl Stream for EventStream {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.receiver.poll_recv(context) {
            Poll::Ready(None) if !self.is_done.swap(true, Ordering::Relaxed) => {
                Poll::Ready(Some(Err(io::ErrorKind::ConnectionAborted.into())))
            }
            polled => polled.map(|event| event.map(Ok)),
        }
    }
}
