//! A body that keeps something until it is sent or given up, and is sent in pieces: hyper takes the next one when little is
//! left of those before.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};

/// Bytes of a piece.
const PIECE: usize = 64 << 10;

/// A body, and what is dropped with it.
#[derive(Debug)]
pub struct Held<H> {
    body: Body,
    /// The rest of a frame.
    rest: Bytes,
    _held: H,
}

impl<H> Held<H> {
    /// Keeps `held` with a body.
    pub fn new(body: Body, held: H) -> Self {
        Held { body, rest: Bytes::new(), _held: held }
    }
}

impl<H: Unpin> HttpBody for Held<H> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(context)).transpose()? {
                None => return Poll::Ready(None),
                Some(frame) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
            }
        }
        let length = self.rest.len().min(PIECE);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (rest, mut hint) = (self.rest.len() as u64, self.body.size_hint());
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + rest);
        }
        hint.set_lower(hint.lower() + rest);
        hint
    }
}

#[cfg(test)]
mod tests {
    use tokio_stream::StreamExt as _;

    use super::*;

    #[tokio::test]
    async fn what_is_held_is_kept_until_the_last_piece_is_taken() {
        let held = std::sync::Arc::new(());
        let bytes: Vec<u8> = (0..2 * PIECE + 5).map(|i| i as u8).collect();
        let body = Held::new(Body::from(bytes.clone()), std::sync::Arc::clone(&held));
        assert_eq!(body.size_hint().exact(), Some(bytes.len() as u64));
        let mut stream = Body::new(body).into_data_stream();
        let mut taken = Vec::new();
        for length in [PIECE, PIECE, 5] {
            assert_eq!(std::sync::Arc::strong_count(&held), 2);
            let piece = stream.next().await.unwrap().unwrap();
            assert_eq!(piece.len(), length);
            taken.extend(piece);
        }
        assert!(stream.next().await.is_none());
        assert_eq!(taken, bytes);
    }
}
