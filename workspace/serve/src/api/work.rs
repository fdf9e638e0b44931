//! Runs work that would delay other clients on threads of its own. Short work passes long work. Work that may not end
//! is given up after some time: its thread runs on, but neither requests nor the program's end wait for it.

use std::cmp::Reverse;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use super::ApiError;

/// Bytes from which work on a text is long.
pub(super) const LONG_BYTES: usize = 64 << 10;
/// Bytes from which work on a text is no longer little.
const SOME_BYTES: usize = 4 << 10;
/// Places of little work, of some work, and of long work of each kind.
static LITTLE: Places = Places::new(4);
static SOME: Places = Places::new(4);
static LONG: [Places; 2] = [Places::new(1), Places::new(1)];
/// The extra wait of work for each of its bytes: a thousand times the time of a long word.
const TURN_OF_BYTE: Duration = Duration::from_millis(1);
/// Threads for work with a time limit, including threads that were given up. Large work counts as several threads.
const THREADS: usize = 8;
static THREAD_PLACES: Semaphore = Semaphore::const_new(THREADS);
/// The stack of a thread: values of a template may be nested deeply. Only the used part needs memory.
const STACK_BYTES: usize = 1 << 28;
/// The most time that such work may run, and the most time that it may wait.
const LIMIT: Duration = Duration::from_secs(2);

/// The input of work.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Body,
    Text,
}

/// The turn of work that waits, and the sender of its place.
type Waiting = (Instant, oneshot::Sender<Place>);

/// The number of free places for work, and the work that waits for a place, the next last.
struct Places(Mutex<(usize, Vec<Waiting>)>);

/// A place. Dropping it frees the place.
struct Place(&'static Places);

impl Places {
    const fn new(count: usize) -> Self {
        Places(Mutex::new((count, Vec::new())))
    }

    /// Waits for a place for work on `bytes` bytes. Work on fewer bytes passes it until it has waited long.
    async fn acquire(&'static self, bytes: usize) -> Option<Place> {
        let (sender, place) = oneshot::channel();
        self.give(0, Some((Instant::now() + TURN_OF_BYTE * bytes as u32, sender)));
        place.await.ok()
    }

    /// Adds free places and waiting work, and assigns places.
    fn give(&'static self, freed: usize, waits: Option<Waiting>) {
        let (free, waiting) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *free += freed;
        waiting.retain(|(_, sender)| !sender.is_closed());
        waiting.extend(waits);
        waiting.sort_by_key(|(turn, _)| Reverse(*turn));
        while *free > 0
            && let Some((_, sender)) = waiting.pop()
        {
            match sender.send(Place(self)) {
                Ok(()) => *free -= 1,
                // The client has left.
                Err(place) => std::mem::forget(place),
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.give(1, None);
    }
}

/// Runs work on `bytes` bytes.
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
    let place = places.acquire(bytes).await.ok_or_else(failed)?;
    start(work, place)?.await.unwrap_or_else(|_| Err(failed()))
}

/// Runs work that may not end, and that occupies `threads` of the [`THREADS`] places. Errors call it `what`.
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
    let places = THREAD_PLACES.acquire_many(threads.min(THREADS) as u32);
    let Ok(Ok(places)) = timeout(LIMIT, places).await else { return Err(busy()) };
    match timeout(LIMIT, start(work, places)?).await {
        Ok(done) => done.unwrap_or_else(|_| Err(failed())),
        Err(_) => {
            let message = format!("{what} takes longer than {} seconds", LIMIT.as_secs());
            Err(ApiError::invalid(message, None))
        }
    }
}

/// Starts work. The work keeps `held` until it ends.
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

pub(super) fn failed() -> ApiError {
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
        // Half of the tasks take all places, and the other half find no place.
        let tasks: Vec<_> = (0..THREADS).map(|_| endless()).collect();
        assert_eq!(off_thread(Kind::Text, 1, || Ok(1)).await, Ok(1));
        assert_eq!(off_thread(Kind::Body, LONG_BYTES, || Ok(2)).await, Ok(2));
        assert!(start.elapsed() < LIMIT);
        for (number, task) in tasks.into_iter().enumerate() {
            let error = task.await.unwrap().unwrap_err();
            let expected = if number < THREADS / 2 { 400 } else { 503 };
            assert_eq!(error.status, expected, "{error:?}");
        }
        assert!(start.elapsed() < 4 * LIMIT);
        drop(end);
        // Threads that were given up free their places when they end.
        drop(THREAD_PLACES.acquire_many(THREADS as u32).await);
        assert_eq!(within_limit("it", 1, || Ok(3)).await, Ok(3));
    }

    #[tokio::test]
    async fn work_on_less_overtakes_work_on_more() {
        static PLACES: Places = Places::new(1);
        let first = PLACES.acquire(1).await;
        let works = [4_000, 63_000, 5_000].map(|bytes| tokio::spawn(PLACES.acquire(bytes)));
        tokio::task::yield_now().await;
        let [left, long, short] = works;
        // Work with a client that has left keeps no place.
        left.abort();
        drop(first);
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
        assert!(short.is_finished() && !long.is_finished());
        drop(short.await.unwrap());
        assert!(long.await.unwrap().is_some());
    }
}
