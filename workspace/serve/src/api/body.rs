//! The body of a request, within limits of its size and of the time in which it arrives.

use std::time::Duration;

use axum::body::{Body, HttpBody as _};
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use tokio_stream::StreamExt as _;

use super::{ApiError, Fields};

/// Bytes of a body at most: more than the text of any context.
const MAX_BYTES: usize = 32 << 20;
/// The time in which a body has to arrive.
const PATIENCE: Duration = Duration::from_secs(30);

impl<S: Sync> FromRequest<S> for Fields {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self, ApiError> {
        let reading = read(request.into_body(), MAX_BYTES);
        match tokio::time::timeout(PATIENCE, reading).await {
            Ok(body) => Fields::parse(&body?),
            Err(_) => {
                let message =
                    format!("the body did not arrive within {} seconds", PATIENCE.as_secs());
                Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message))
            }
        }
    }
}

async fn read(body: Body, most: usize) -> Result<Vec<u8>, ApiError> {
    let too_long = || {
        let message = format!("the body is longer than {most} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
    };
    if body.size_hint().lower() > most as u64 {
        return Err(too_long());
    }
    let (mut bytes, mut stream) = (Vec::new(), body.into_data_stream());
    while let Some(part) = stream.next().await {
        let part = part.map_err(|error| {
            ApiError::invalid(format!("the body cannot be read: {error}"), None)
        })?;
        if bytes.len() + part.len() > most {
            return Err(too_long());
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
        // Without a length.
        let parts = ["123", "456"].map(Ok::<_, std::convert::Infallible>);
        let endless = Body::from_stream(tokio_stream::iter(parts));
        assert_eq!(read(endless, 5).await.unwrap_err(), error);
    }
}
