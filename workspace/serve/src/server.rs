//! Connections within limits: their number, the size of a request's head, and the times to send the head and to read an
//! answer. If all places are taken, the connections that have waited longest for their clients are closed. Answers have
//! fewer places than connections, so that some connections can always be closed. If an answer finds no place, its
//! client is told to come again. A client that has left is noticed, whatever it has sent before.

mod client_stream;
mod held;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use client_stream::{Writing, has_closed, has_sent_much};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::api::ApiError;

pub use held::Held;

/// The time in which the head of a request has to arrive. For the first request, it starts with the connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// The time in which a client has to read some of an answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_HEAD_BYTES: usize = 32 << 10;
const MAX_HEADERS: usize = 64;
/// The time between two attempts to accept a connection or to find a place.
const PAUSE: Duration = Duration::from_millis(100);
/// After this wait for its client, a connection may be closed together with others.
const MIN_WAIT: Duration = Duration::from_secs(1);
/// One in so many connections has no place for an answer, so that it can be closed.
const NOT_ANSWERED: usize = 16;
/// The time between two looks whether a client has left.
const LOOK: Duration = Duration::from_millis(200);

/// The phase of a connection: it waits for its client, or its client waits for an answer. An answer takes a place.
#[derive(Debug)]
pub struct Phase {
    since: Mutex<Option<Instant>>,
    places: Arc<Semaphore>,
}

impl Phase {
    fn waits_since(&self) -> MutexGuard<'_, Option<Instant>> {
        // A panic leaves no partial value: values are replaced whole.
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts an answer, which takes a place.
    ///
    /// # Errors
    /// Fails if all places are taken.
    pub fn answers(&self) -> Result<(), ApiError> {
        let place = self.places.try_acquire().map_err(|_| {
            let message = "as many clients wait for answers as may: ask again later";
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
        })?;
        // `Answered` returns the place at the end of the answer.
        place.forget();
        *self.waits_since() = None;
        Ok(())
    }
}

/// Ends an answer when it is dropped: the connection waits for the next request.
struct Answered(Arc<Phase>);

impl Drop for Answered {
    fn drop(&mut self) {
        if self.0.waits_since().replace(Instant::now()).is_none() {
            self.0.places.add_permits(1);
        }
    }
}

/// The connections, including some that may have ended.
type Connections = Vec<(Arc<Phase>, AbortHandle)>;

/// Closes a quarter of the connections that have waited [`MIN_WAIT`] for their clients, the longest waits first. If no
/// connection has waited so long, closes the connection with the longest wait.
fn make_room(connections: &Connections) {
    let since =
        connections.iter().filter_map(|(phase, task)| Some(((*phase.waits_since())?, task)));
    let mut waiting: Vec<_> = since.collect();
    waiting.sort_by_key(|(since, _)| *since);
    let long = waiting.partition_point(|(since, _)| since.elapsed() >= MIN_WAIT);
    let count = long.div_ceil(4).max(1);
    waiting.into_iter().take(count).for_each(|(_, task)| task.abort());
}

/// Serves `app` until `stop` is done, and then finishes the requests that have begun.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    max_connections: usize,
    stop: impl Future<Output = ()>,
) {
    let places = Arc::new(Semaphore::new(max_connections));
    let answers = max_connections - max_connections.div_ceil(NOT_ANSWERED);
    let answers = Arc::new(Semaphore::new(answers.max(1)));
    let mut connections = Connections::new();
    let graceful = GracefulShutdown::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        connections.retain(|(_, task)| !task.is_finished());
        let accepted = tokio::select! {
            accepted = accept(&listener, &places, &connections) => accepted,
            () = &mut stop => break,
        };
        let Some((stream, place)) = accepted else { continue };
        // Sends a token at once; without this option it waits for the next token.
        let _ = stream.set_nodelay(true);
        let since = Mutex::new(Some(Instant::now()));
        let phase = Arc::new(Phase { since, places: Arc::clone(&answers) });
        let (inner, of_requests) = (TowerToHyperService::new(app.clone()), Arc::clone(&phase));
        let service = service_fn(move |mut request: hyper::Request<Incoming>| {
            request.extensions_mut().insert(Arc::clone(&of_requests));
            let answered = Answered(Arc::clone(&of_requests));
            let response = inner.call(request);
            async move {
                let body = |body| Body::new(Held::new(body, answered));
                response.await.map(|response| response.map(body))
            }
        });
        let of_stream = Arc::clone(&phase);
        let has_left = move |stream: &TcpStream| {
            has_closed(stream) || of_stream.waits_since().is_none() && has_sent_much(stream)
        };
        let stream = Writing::new(stream, WRITE_TIMEOUT, has_left);
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(MAX_HEAD_BYTES)
            .max_headers(MAX_HEADERS)
            .serve_connection(TokioIo::new(stream), service);
        let connection = graceful.watch(connection);
        let task = tokio::spawn(async move {
            let _place = place;
            let mut connection = std::pin::pin!(connection);
            let mut look = interval(LOOK);
            look.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    // An error of a client that has left is ignored.
                    _ = &mut connection => return,
                    // Polls the connection again, which looks whether its client has left.
                    _ = look.tick() => {}
                }
            }
        });
        connections.push((phase, task.abort_handle()));
    }
    drop(listener);
    graceful.shutdown().await;
}

/// Accepts the next connection, and waits for its place. Returns `None` after an error.
async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
    connections: &Connections,
) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let Ok((stream, _)) = listener.accept().await else {
        // An error of one connection, or too many open files.
        make_room(connections);
        tokio::time::sleep(PAUSE).await;
        return None;
    };
    loop {
        if let Ok(place) = Arc::clone(places).try_acquire_owned() {
            return Some((stream, place));
        }
        make_room(connections);
        if let Ok(place) = timeout(PAUSE, Arc::clone(places).acquire_owned()).await {
            return Some((stream, place.ok()?));
        }
    }
}
