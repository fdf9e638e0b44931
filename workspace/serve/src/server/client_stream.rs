//! A stream that fails if its client reads nothing for some time, or has left. While bytes that follow a request wait,
//! hyper reads no more, and so would miss the end of the stream behind them.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Sleep, sleep};

/// Bytes that a client may send behind a request before its answer. Behind more bytes, the end of its stream would be
/// missed.
const MAX_BEHIND: usize = 64 << 10;
/// The time for which a client may still get an answer after it has closed its side.
const LAST_ANSWER: Duration = Duration::from_millis(300);

/// A stream that limits how long a write may wait for its client.
pub(super) struct Writing<S, F> {
    stream: S,
    has_left: F,
    /// When the stream first saw that the client has left.
    left: Option<Instant>,
    timeout: Duration,
    /// The deadline of a write that waits.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<S, F> Writing<S, F> {
    /// Creates a stream. A write waits at most `timeout`, and `has_left` says whether the client has left.
    pub fn new(stream: S, timeout: Duration, has_left: F) -> Self {
        Writing { stream, has_left, left: None, timeout, deadline: None }
    }

    /// Returns `polled`, or an error if it has been pending too long.
    fn within_time<R>(
        &mut self,
        context: &mut Context<'_>,
        polled: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if polled.is_ready() {
            self.deadline = None;
            return polled;
        }
        let timeout = self.timeout;
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(sleep(timeout)));
        ready!(deadline.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Returns whether a client has closed its side, even if bytes that it sent before are unread.
pub(super) fn has_closed(stream: &TcpStream) -> bool {
    let ready = std::pin::pin!(stream.ready(Interest::READABLE));
    let ready = ready.poll(&mut Context::from_waker(Waker::noop()));
    matches!(ready, Poll::Ready(Ok(ready)) if ready.is_read_closed())
}

/// Returns whether a client has sent so much behind its request that the end of its stream would be missed.
pub(super) fn has_sent_much(stream: &TcpStream) -> bool {
    let mut bytes = vec![0; MAX_BEHIND];
    let mut buffer = ReadBuf::new(&mut bytes);
    let peeked = stream.poll_peek(&mut Context::from_waker(Waker::noop()), &mut buffer);
    matches!(peeked, Poll::Ready(Ok(MAX_BEHIND)))
}

impl<S: AsyncRead + Unpin, F: Unpin> AsyncRead for Writing<S, F> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin, F: Fn(&S) -> bool + Unpin> AsyncWrite for Writing<S, F> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.within_time(context, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.within_time(context, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    // hyper flushes whenever its connection is polled.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if (self.has_left)(&self.stream) {
            let left = *self.left.get_or_insert_with(Instant::now);
            if left.elapsed() >= LAST_ANSWER {
                return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
            }
        }
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        self.within_time(context, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(context);
        self.within_time(context, polled)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

    use super::*;

    #[tokio::test]
    async fn a_reader_that_takes_nothing_is_left() {
        let (near, _far) = tokio::io::duplex(8);
        let mut writing = Writing::new(near, Duration::from_millis(20), |_: &DuplexStream| false);
        writing.write_all(b"12345678").await.unwrap();
        let error = writing.write_all(b"9").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_slow_reader_gets_all() {
        let (near, mut far) = tokio::io::duplex(1);
        let mut writing = Writing::new(near, Duration::from_secs(60), |_: &DuplexStream| false);
        let sent = tokio::spawn(async move { writing.write_all(b"1234").await });
        let mut taken = [0; 4];
        far.read_exact(&mut taken).await.unwrap();
        sent.await.unwrap().unwrap();
        assert_eq!(taken, *b"1234");
    }
}
