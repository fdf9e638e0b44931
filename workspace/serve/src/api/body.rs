//! The body of a request, within limits of its size and its arrival time. A body reserves memory only for the bytes and
//! JSON values that have arrived, so that bodies that never arrive delay no other request.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};
use tokio_stream::StreamExt as _;

use super::work::{Kind, LONG_BYTES, off_thread};
use super::{ApiError, Fields};
use crate::server::Phase;

/// The most bytes of a body: more than the text of any context.
const MAX_BYTES: usize = 8 << 20;
/// The most values of a body. A list or an object counts as several values.
const MAX_VALUES: usize = 1 << 20;
/// Approximate bytes of memory of a value, without its text.
const VALUE_BYTES: usize = 64;
/// Values that need as much memory as a list or an object with its first entries.
const LIST_VALUES: usize = 5;
const OBJECT_VALUES: usize = 6;
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// The time in which the next [`LONG_BYTES`] of a long body have to arrive, or to find room.
const PART_TIMEOUT: Duration = Duration::from_secs(2);
/// KiB for bodies that have arrived and are not yet processed, and for their values. The first [`LONG_BYTES`] of each
/// body do not count.
static ROOM_KIB: Semaphore = Semaphore::const_new(128 << 10);

/// The reserved room of a body or an answer. Dropping it releases the room.
pub(super) type Room = Option<SemaphorePermit<'static>>;

impl<S: Sync> FromRequest<S> for Fields {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let phase = request.extensions().get::<Arc<Phase>>().cloned();
        let body = request.into_body();
        let (bytes, room) = read(body, PART_TIMEOUT).await?;
        if let Some(phase) = phase {
            phase.answers()?;
        }
        off_thread(Kind::Body, bytes.len(), move || Fields::parse(&bytes, room)).await
    }
}

fn too_long() -> ApiError {
    let message = format!("the body is longer than {MAX_BYTES} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
}

async fn read(body: Body, part_timeout: Duration) -> Result<(Vec<u8>, Room), ApiError> {
    // The body may declare its length.
    if body.size_hint().lower() > MAX_BYTES as u64 {
        return Err(too_long());
    }
    let (mut bytes, mut values, mut room) = (Vec::new(), 0, Room::None);
    let mut stream = body.into_data_stream();
    let end = Instant::now() + READ_TIMEOUT;
    let (mut last, mut part_end) = (0, end);
    loop {
        let Ok(part) = timeout_at(part_end, stream.next()).await else {
            let message = "the body does not arrive: send it faster, or a shorter one";
            return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message));
        };
        let Some(part) = part else { return Ok((bytes, room)) };
        let part = part.map_err(|error| {
            ApiError::invalid(format!("the body cannot be read: {error}"), None)
        })?;
        if bytes.len() + part.len() > MAX_BYTES {
            return Err(too_long());
        }
        bytes.extend_from_slice(&part);
        values += values_in(&part);
        if values > MAX_VALUES {
            let message = format!("the body has more than {MAX_VALUES} values: divide it");
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message));
        }
        let memory = bytes.len() + values * VALUE_BYTES;
        let needed = memory.saturating_sub(LONG_BYTES).div_ceil(1 << 10);
        let more = needed - room.as_ref().map_or(0, SemaphorePermit::num_permits);
        if more > 0 {
            let found =
                timeout_at(Instant::now() + part_timeout, ROOM_KIB.acquire_many(more as u32));
            let Ok(Ok(found)) = found.await else {
                let message = "the bodies of other requests take all the room: ask again later";
                return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message));
            };
            match &mut room {
                Some(room) => room.merge(found),
                None => room = Some(found),
            }
        }
        if bytes.len() - last >= LONG_BYTES {
            (last, part_end) = (bytes.len(), end.min(Instant::now() + part_timeout));
        }
    }
}

/// Returns the number of JSON values in a part of a body, or more. Values in texts also count, because the arguments of
/// a tool call are JSON in a text.
fn values_in(part: &[u8]) -> usize {
    let count = |byte: &u8| match byte {
        b',' => 1,
        b'[' => LIST_VALUES,
        b'{' => OBJECT_VALUES,
        _ => 0,
    };
    part.iter().map(count).sum()
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    const SHORT: Duration = Duration::from_millis(50);

    #[tokio::test]
    async fn a_body_is_read_up_to_its_limit_and_reserves_what_has_arrived() {
        let longest = vec![b'1'; MAX_BYTES];
        assert_eq!(read(Body::from(longest.clone()), SHORT).await.unwrap().0, longest);
        let error = read(Body::from([&longest[..], b"1"].concat()), SHORT).await.unwrap_err();
        assert_eq!(error.to_json()["error"]["code"], 413);
        // A body without a declared length.
        let parts = [longest, b"1".to_vec()].map(Ok::<_, Infallible>);
        let endless = Body::from_stream(tokio_stream::iter(parts));
        assert_eq!(read(endless, SHORT).await.unwrap_err(), error);

        let stalled = |bytes: usize| {
            let begin = tokio_stream::once(Ok::<_, Infallible>(vec![b' '; bytes]));
            Body::from_stream(begin.chain(tokio_stream::pending()))
        };
        // Short parts of bodies reserve no room.
        let all = ROOM_KIB.available_permits();
        let open = tokio::spawn(read(stalled(LONG_BYTES), SHORT));
        // A long body has to continue, and returns its room.
        let long = tokio::spawn(read(stalled(LONG_BYTES + 5000), SHORT));
        tokio::task::yield_now().await;
        assert_eq!(ROOM_KIB.available_permits(), all - 5);
        let error = long.await.unwrap().unwrap_err();
        assert_eq!((error.status.as_u16(), ROOM_KIB.available_permits()), (408, all));
        open.abort();
    }

    #[tokio::test]
    async fn a_body_has_a_limited_number_of_values() {
        assert_eq!(values_in(br#"{"a": [1, "[2,3]", {}]}"#), 2 * (OBJECT_VALUES + LIST_VALUES) + 3);
        // Rejected before it reserves any room.
        let list = Body::from("1,".repeat(MAX_VALUES + 1));
        let error = read(list, SHORT).await.unwrap_err();
        assert_eq!(error.status, StatusCode::PAYLOAD_TOO_LARGE);
    }
}
