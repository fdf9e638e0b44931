//! A text file, one document.

use super::chunk::{BadRecord, Chunk, Content, Place};
use super::stream::Stream;
use super::{BYTE_ORDER_MARK, Reader};
use crate::prepare::Result;

pub(super) struct Text(pub(super) Stream);

impl Reader for Text {
    fn next_chunk(&mut self) -> Result<Option<Chunk>> {
        let Text(stream) = self;
        if stream.position.record > 0 {
            return Ok(None);
        }
        let most = stream.options.max_record_bytes;
        let mut bytes = Vec::new();
        // One more byte shows whether the text is too long.
        while bytes.len() <= most {
            let wanted = stream.options.chunk_bytes.max(bytes.len()).min(most + 1 - bytes.len());
            if stream.input.fill(&mut bytes, wanted)? < wanted {
                break;
            }
        }
        let read = bytes.len();
        let bad = |reason| Content::Bad(BadRecord { place: Place::Whole, reason });
        let content = if read > most {
            let reason = stream.options.too_long("text");
            bad(format!("{reason}, or make each paragraph a document with --format paragraphs"))
        } else {
            if bytes.starts_with(BYTE_ORDER_MARK) {
                bytes.drain(..BYTE_ORDER_MARK.len());
            }
            match String::from_utf8(bytes) {
                Ok(text) => Content::Text(text),
                Err(fault) => {
                    let at = fault.utf8_error().valid_up_to() + read - fault.as_bytes().len();
                    bad(format!("not UTF-8 at byte {at}"))
                }
            }
        };
        Ok(Some(stream.chunk(content, read, 1)))
    }
}
