//! The memory of answers: bounded for each answer, and for all large answers together until they are sent. A whole
//! answer reserves its estimate until its text is made, and then the bytes of the text.

use axum::http::StatusCode;
use tokio::sync::Semaphore;

use super::ApiError;
use super::body::Room;

/// The most bytes of an answer.
const MAX_BYTES: usize = 256 << 20;
/// The most bytes of an answer that needs no room.
const SMALL_BYTES: usize = 256 << 10;
/// KiB of all answers that need room.
static ROOM_KIB: Semaphore = Semaphore::const_new(512 << 10);

/// Reserves room for an answer of `bytes` bytes.
pub(super) fn reserve(bytes: usize) -> Result<Room, ApiError> {
    if bytes > MAX_BYTES {
        let (megabytes, most) = (bytes >> 20, MAX_BYTES >> 20);
        let message = format!(
            "the answer may take {megabytes} MiB of memory, and {most} MiB are the most: ask for fewer choices, \
             prompts, tokens, log-probabilities or heads"
        );
        return Err(ApiError::invalid(message, None));
    }
    if bytes <= SMALL_BYTES {
        return Ok(None);
    }
    ROOM_KIB.try_acquire_many((bytes >> 10) as u32).map(Some).map_err(|_| {
        let message = "the answers to other requests take all the memory for them: ask again later";
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, message)
    })
}

/// Releases all of an answer's room except `bytes`.
pub(super) fn shrink(room: Room, bytes: usize) -> Room {
    room.and_then(|mut room| room.split(room.num_permits().min(bytes >> 10)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_answers_have_room_for_all_of_them_together() {
        let error = reserve(MAX_BYTES + 1).unwrap_err();
        assert_eq!(error.status, StatusCode::BAD_REQUEST);
        let two = [(); 2].map(|()| reserve(MAX_BYTES).unwrap());
        let error = reserve(SMALL_BYTES + 1024).unwrap_err();
        assert_eq!(error.status, StatusCode::TOO_MANY_REQUESTS);
        assert!(reserve(SMALL_BYTES).is_ok());
        let texts = two.map(|room| shrink(room, 2 << 20));
        let room = reserve(MAX_BYTES).unwrap();
        assert_eq!(ROOM_KIB.available_permits(), (256 - 4) << 10);
        drop((texts, shrink(room, 2 * MAX_BYTES)));
        assert_eq!(ROOM_KIB.available_permits(), 512 << 10);
    }
}
