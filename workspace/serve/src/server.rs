//! Connections, within limits: of their number, of the size of a request's head, and of the times in which it arrives and
//! in which an answer is taken.

mod writing;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use writing::Writing;

/// The time in which the head of a request has to arrive, the first one's from the connection on.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// The time in which a client has to take some of an answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
/// Bytes of a head at most.
const MAX_HEAD_BYTES: usize = 32 << 10;
/// Headers of a request at most.
const MAX_HEADERS: usize = 64;
/// The time between two attempts to accept, after one has failed.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves `app` until `stop` is done, and then finishes what was begun.
pub async fn serve(
    listener: TcpListener,
    app: Router,
    max_connections: usize,
    stop: impl Future<Output = ()>,
) {
    let connections = Arc::new(Semaphore::new(max_connections));
    let graceful = GracefulShutdown::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        let accepted = tokio::select! {
            accepted = accept(&listener, &connections) => accepted,
            () = &mut stop => break,
        };
        let Some((stream, permit)) = accepted else { continue };
        // A token is sent as soon as it is there; without this option it waits for the next one.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(app.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(MAX_HEAD_BYTES)
            .max_headers(MAX_HEADERS)
            .serve_connection(TokioIo::new(Writing::new(stream, WRITE_TIMEOUT)), service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // A client that has left is no concern of the others.
            let _ = connection.await;
            drop(permit);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

/// The next connection, when there may be one more.
async fn accept(
    listener: &TcpListener,
    connections: &Arc<Semaphore>,
) -> Option<(TcpStream, OwnedSemaphorePermit)> {
    let permit = Arc::clone(connections).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => Some((stream, permit)),
        Err(_) => {
            // Of one connection, or of too many open files.
            tokio::time::sleep(PAUSE).await;
            None
        }
    }
}

/// The address of a server in a browser.
pub fn url(address: SocketAddr) -> String {
    format!("http://{address}/")
}
