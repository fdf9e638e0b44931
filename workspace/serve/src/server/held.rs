//! A body that keeps a value until the last of its bytes is sent or dropped.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};

/// A body, and a value that is dropped with the last of its bytes.
#[derive(Debug)]
pub struct Held<H>(Body, Arc<H>);

impl<H> Held<H> {
    /// Keeps `held` with a body.
    pub fn new(body: Body, held: H) -> Self {
        Held(body, Arc::new(held))
    }
}

/// Bytes of the body, which keep the value.
struct Part<H> {
    bytes: Bytes,
    _held: Arc<H>,
}

impl<H> AsRef<[u8]> for Part<H> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl<H: Send + Sync + 'static> HttpBody for Held<H> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Held(body, held) = &mut *self;
        let part = |bytes| Bytes::from_owner(Part { bytes, _held: Arc::clone(held) });
        Pin::new(body).poll_frame(context).map_ok(|frame| frame.map_data(part))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;

    use super::*;

    #[tokio::test]
    async fn what_is_held_is_kept_until_the_last_byte_is_dropped() {
        let held = Arc::new(());
        let body = Held::new(Body::from("12"), Arc::clone(&held));
        assert_eq!(body.size_hint().exact(), Some(2));
        let mut stream = Body::new(body).into_data_stream();
        let mut sent = stream.next().await.unwrap().unwrap();
        drop(stream);
        assert_eq!((sent.split_off(1), Arc::strong_count(&held)), (Bytes::from("2"), 2));
        drop(sent);
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
