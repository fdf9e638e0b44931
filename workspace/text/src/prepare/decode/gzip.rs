//! gzip of several members. What follows the last one is ignored, as gzip itself does: zeros that fill a
//! tape's block, or a signature.

use std::io::{self, BufRead, Read};

use flate2::bufread::GzDecoder;

/// The first bytes of a member.
const MAGIC: &[u8] = b"\x1f\x8b";

/// Decodes the members of `reader` one after another.
pub(super) struct Members<R> {
    /// Always there between calls.
    member: Option<GzDecoder<R>>,
    is_finished: bool,
}

impl<R: BufRead> Members<R> {
    pub(super) fn new(reader: R) -> Self {
        Self { member: Some(GzDecoder::new(reader)), is_finished: false }
    }
}

impl<R: BufRead> Read for Members<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while let (Some(member), false) = (&mut self.member, self.is_finished || buffer.is_empty())
        {
            let read = member.read(buffer)?;
            if read > 0 {
                return Ok(read);
            }
            let Some(mut reader) = self.member.take().map(GzDecoder::into_inner) else { break };
            // A buffer of the reader may end between the two bytes; one of them is enough to go on.
            let rest = reader.fill_buf()?;
            self.is_finished = rest.is_empty() || !MAGIC.starts_with(&rest[..rest.len().min(2)]);
            self.member = Some(GzDecoder::new(reader));
        }
        Ok(0)
    }
}
