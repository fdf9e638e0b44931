//! A body that keeps something until it is sent or given up.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};

/// A body, and what is dropped with it.
#[derive(Debug)]
pub struct Held<H> {
    body: Body,
    _held: H,
}

impl<H> Held<H> {
    /// Keeps `held` with a body.
    pub fn new(body: Body, held: H) -> Self {
        Held { body, _held: held }
    }
}

impl<H: Unpin> HttpBody for Held<H> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
