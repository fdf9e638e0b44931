//! The body of a request, within limits of its size and of the time in which it arrives.

use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use tokio::sync::Semaphore;
use tokio_stream::StreamExt as _;

use super::{ApiError, Fields, off_thread};

/// Bytes of a body at most: more than the text of any context.
const MAX_BYTES: usize = 8 << 20;
/// The time in which a body has to arrive.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// KiB of the bodies that are read or parsed at the same time.
static BODY_KIB: Semaphore = Semaphore::const_new(256 << 10);

impl<S: Sync> FromRequest<S> for Fields {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let body = request.into_body();
        check_length(&body, MAX_BYTES)?;
        // Of a body without a length, as much as it may have.
        let length = body.size_hint().exact().map_or(MAX_BYTES, |bytes| bytes as usize);
        let kib = (length >> 10) as u32 + 1;
        let reading = async {
            let room = BODY_KIB.acquire_many(kib).await;
            Ok::<_, ApiError>((room, read(body, MAX_BYTES).await?))
        };
        let Ok(read) = tokio::time::timeout(READ_TIMEOUT, reading).await else {
            let seconds = READ_TIMEOUT.as_secs();
            let message = format!("the body did not arrive within {seconds} seconds");
            return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message));
        };
        let (_room, bytes) = read?;
        off_thread(move || Fields::parse(&bytes)).await
    }
}

/// Refuses a body that says that it is longer.
fn check_length(body: &Body, most: usize) -> Result<(), ApiError> {
    match body.size_hint().lower() > most as u64 {
        true => Err(too_long(most)),
        false => Ok(()),
    }
}

fn too_long(most: usize) -> ApiError {
    let message = format!("the body is longer than {most} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
}

async fn read(body: Body, most: usize) -> Result<Vec<u8>, ApiError> {
    let (mut bytes, mut stream) = (Vec::new(), body.into_data_stream());
    while let Some(part) = stream.next().await {
        let part = part.map_err(|error| {
            ApiError::invalid(format!("the body cannot be read: {error}"), None)
        })?;
        if bytes.len() + part.len() > most {
            return Err(too_long(most));
        }
        bytes.extend_from_slice(&part);
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_body_is_read_up_to_its_limit() {
        assert_eq!(read(Body::from("12345"), 5).await.unwrap(), b"12345");
        let error = read(Body::from("123456"), 5).await.unwrap_err();
        assert_eq!(error.to_json()["error"]["code"], 413);
        assert_eq!(check_length(&Body::from("123456"), 5), Err(error.clone()));
        assert_eq!(check_length(&Body::from("12345"), 5), Ok(()));
        // Without a length.
        let parts = ["123", "456"].map(Ok::<_, std::convert::Infallible>);
        let endless = Body::from_stream(tokio_stream::iter(parts));
        assert_eq!(read(endless, 5).await.unwrap_err(), error);
    }
}
