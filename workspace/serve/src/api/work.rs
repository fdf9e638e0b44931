//! Work that would keep the other clients waiting, on threads of its own. Work on less never waits for work on more, and what
//! may not end is given up after some time: its thread is left alone, and neither requests nor the program's end wait for
//! it.

use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use super::ApiError;

/// Bytes from which work on a text is long.
pub(super) const LONG_BYTES: usize = 64 << 10;
/// Bytes from which it is not little.
const SOME_BYTES: usize = 4 << 10;
/// Little work that is done at the same time, some work, and long work of each kind.
static LITTLE: Semaphore = Semaphore::const_new(4);
static SOME: Semaphore = Semaphore::const_new(4);
static LONG: [Semaphore; 2] = [Semaphore::const_new(1), Semaphore::const_new(1)];
/// Work with a limit of its time that is done at the same time.
static LIMITED: Semaphore = Semaphore::const_new(8);
/// Threads with such work at most, those that were given up among them; one with much work counts as several.
const THREADS: usize = 24;
static THREAD_PLACES: Semaphore = Semaphore::const_new(THREADS);
/// The stack of a thread, of which only what is used takes memory: values of a template may be deep.
const STACK_BYTES: usize = 1 << 28;
/// The time that such work may take, and may wait for its turn.
const LIMIT: Duration = Duration::from_secs(2);

/// What work is done on.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Body,
    Text,
}

/// Does work on so many bytes.
pub(super) async fn off_thread<R: Send + 'static>(
    kind: Kind,
    bytes: usize,
    work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    let places = match bytes {
        0..SOME_BYTES => &LITTLE,
        SOME_BYTES..LONG_BYTES => &SOME,
        _ => &LONG[kind as usize],
    };
    let place = places.acquire().await.map_err(|_| failed())?;
    start(work, place)?.await.unwrap_or_else(|_| Err(failed()))
}

/// Does work that may not end, and that takes `threads` of the [`THREADS`] places; errors call it `what`.
pub(super) async fn within_limit<R: Send + 'static>(
    what: &str,
    threads: usize,
    work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    let busy = || {
        let message =
            format!("{what} of other requests takes all the time for it: ask again later");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
    };
    let Ok(Ok(_place)) = timeout(LIMIT, LIMITED.acquire()).await else { return Err(busy()) };
    let places = THREAD_PLACES.try_acquire_many(threads.min(THREADS) as u32).map_err(|_| busy())?;
    match timeout(LIMIT, start(work, places)?).await {
        Ok(done) => done.unwrap_or_else(|_| Err(failed())),
        Err(_) => {
            let message = format!("{what} takes longer than {} seconds", LIMIT.as_secs());
            Err(ApiError::invalid(message, None))
        }
    }
}

/// Starts work, which keeps `held` until it ends.
fn start<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
    held: impl Send + 'static,
) -> Result<oneshot::Receiver<Result<R, ApiError>>, ApiError> {
    let (sender, done) = oneshot::channel();
    let thread = std::thread::Builder::new().name("work".to_owned()).stack_size(STACK_BYTES);
    let begun = thread.spawn(move || {
        let result = work();
        drop(held);
        // The client may have left.
        let _ = sender.send(result);
    });
    begun.map_err(|_| failed())?;
    Ok(done)
}

fn failed() -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the request made the server fail")
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn what_does_not_end_is_given_up_and_keeps_nobody_waiting() {
        let start = Instant::now();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        let ends = std::sync::Arc::new(std::sync::Mutex::new(ends));
        let endless = || {
            let ends = std::sync::Arc::clone(&ends);
            tokio::spawn(within_limit("it", 2, move || {
                Ok(ends.lock().is_ok_and(|it| it.recv().is_ok()))
            }))
        };
        // All places at first, and later all threads.
        let first: Vec<_> = (0..THREADS / 2).map(|_| endless()).collect();
        assert_eq!(off_thread(Kind::Text, 1, || Ok(1)).await, Ok(1));
        assert_eq!(off_thread(Kind::Body, LONG_BYTES, || Ok(2)).await, Ok(2));
        assert!(start.elapsed() < LIMIT);
        for task in first {
            let error = task.await.unwrap().unwrap_err();
            assert!(matches!(error.status.as_u16(), 400 | 503), "{error:?}");
        }
        assert!(start.elapsed() < 4 * LIMIT);
        drop(end);
        // Threads that were given up leave their places when they end.
        drop(THREAD_PLACES.acquire_many(THREADS as u32).await);
        assert_eq!(within_limit("it", 1, || Ok(3)).await, Ok(3));
    }
}
