//! Connections, within limits: of their number, of the size of a request's head, and of the times in which it arrives and
//! in which an answer is taken. Where there is no place for one more, those that have waited longest for their clients
//! make room; as some always do, requests that are answered have places too, and where there is none the client is told to
//! come again. A client that has left is noticed, whatever it has sent before.

mod held;
mod writing;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
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
use writing::{Writing, has_closed, has_sent_much};

use crate::api::ApiError;

pub use held::Held;

/// The time in which the head of a request has to arrive, the first one's from the connection on.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// The time in which a client has to take some of an answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_HEAD_BYTES: usize = 32 << 10;
const MAX_HEADERS: usize = 64;
/// The time between two attempts to accept, after one has failed, or to find a place.
const PAUSE: Duration = Duration::from_millis(100);
/// The time after which a connection that waits for its client makes room with others.
const MIN_WAIT: Duration = Duration::from_secs(1);
/// One of so many connections does not wait for an answer, and can make room.
const NOT_ANSWERED: usize = 16;
/// The time between two looks whether a client has left.
const LOOK: Duration = Duration::from_millis(200);

/// What a connection does: it waits for its client, or its client waits for an answer, which takes one of the places.
#[derive(Debug)]
pub struct Phase {
    since: Mutex<Option<Instant>>,
    places: Arc<Semaphore>,
}

impl Phase {
    fn waits_since(&self) -> MutexGuard<'_, Option<Instant>> {
        // A value is replaced whole: a panic leaves no half of one.
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request has arrived, which is answered now.
    ///
    /// # Errors
    /// Fails if as many others are answered as may be.
    pub fn answers(&self) -> Result<(), ApiError> {
        let place = self.places.try_acquire().map_err(|_| {
            let message = "as many clients wait for answers as may: ask again later";
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
        })?;
        // Until the end of the answer.
        place.forget();
        *self.waits_since() = None;
        Ok(())
    }
}

/// The end of an answer: the next request is waited for.
struct Answered(Arc<Phase>);

impl Drop for Answered {
    fn drop(&mut self) {
        if self.0.waits_since().replace(Instant::now()).is_none() {
            self.0.places.add_permits(1);
        }
    }
}

/// The connections, some of which may have ended.
type Connections = Vec<(Arc<Phase>, AbortHandle)>;

/// Closes a quarter of the connections that wait for their clients, those that have waited longest; where none has
/// waited for [`MIN_WAIT`], the one that has waited longest.
fn make_room(connections: &Connections) {
    let since =
        connections.iter().filter_map(|(phase, task)| Some(((*phase.waits_since())?, task)));
    let mut waiting: Vec<_> = since.collect();
    waiting.sort_by_key(|(since, _)| *since);
    let long = waiting.partition_point(|(since, _)| since.elapsed() >= MIN_WAIT);
    let count = long.div_ceil(4).max(1);
    waiting.into_iter().take(count).for_each(|(_, task)| task.abort());
}

/// Serves `app` until `stop` is done, and then finishes what was begun.
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
        // A token is sent as soon as it is there; without this option it waits for the next one.
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
                    // A client that has left is no concern of the others.
                    _ = &mut connection => return,
                    // The connection is polled again, and looks.
                    _ = look.tick() => {}
                }
            }
        });
        connections.push((phase, task.abort_handle()));
    }
    drop(listener);
    graceful.shutdown().await;
}

/// Returns the next connection, and its place.
async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
    connections: &Connections,
) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let Ok((stream, _)) = listener.accept().await else {
        // Of one connection, or of too many open files.
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
