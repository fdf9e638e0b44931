//! The decompressed bytes of an input: a file, or standard input, named `-`. The first bytes decide the compression,
//! never the name. Memory holds only the decoder's window and the bytes that were peeked at.

mod compression;
#[cfg(test)]
pub(super) mod tests;

use std::fs::File;
use std::io::{self, BufReader, Cursor, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::prepare::{Error, Result};

pub(crate) use compression::Compression;
pub(crate) use compression::refusal;

/// Bytes at the start of an input that identify its encoding.
const MAGIC_BYTES: u64 = 10;
const BUFFER_BYTES: usize = 1 << 18;
/// Bytes that are discarded at once on the way to a place in a compressed input.
const SKIPPED_BYTES: u64 = 1 << 20;

/// The decoded bytes of an input, from a place on.
pub(crate) struct Decoded {
    path: PathBuf,
    pub(crate) compression: Compression,
    source: Box<dyn Read + Send>,
    /// Decoded bytes that were peeked at, but not read.
    ahead: Vec<u8>,
    /// Stored bytes of the file that were read.
    stored: Arc<AtomicU64>,
    /// Decoded bytes that left the decoder.
    decoded: u64,
}

impl Decoded {
    /// Decodes `path`, which is read from `source`. A decoder's window has at most `max_window_bytes`.
    pub(crate) fn new(path: &Path, source: Source, max_window_bytes: usize) -> Result<Self> {
        let stored = Arc::new(AtomicU64::new(0));
        let mut source = Counted { source, stored: stored.clone() };
        let mut start = Vec::new();
        let mut limited = source.by_ref().take(MAGIC_BYTES);
        limited.read_to_end(&mut start).map_err(moh_files::io(path))?;
        if let Some(reason) = refusal(path, &start) {
            return Err(Error::unusable(path, reason));
        }
        let compression = Compression::of(&start);
        let (source, ahead): (Box<dyn Read + Send>, _) = match compression {
            Compression::None => (Box::new(source), start),
            _ => {
                let start = Cursor::new(start).chain(source);
                let start = BufReader::with_capacity(BUFFER_BYTES, start);
                let decoder = compression.decoder(start, max_window_bytes);
                (decoder.map_err(moh_files::io(path))?, Vec::new())
            }
        };
        let (path, decoded) = (path.to_path_buf(), ahead.len() as u64);
        Ok(Self { path, compression, source, ahead, stored, decoded })
    }

    /// Decodes a file from `offset` on, counted in decoded bytes.
    pub(crate) fn open_at(path: &Path, offset: u64, max_window_bytes: usize) -> Result<Self> {
        let open = || File::open(path).map_err(moh_files::io(path));
        let mut decoded = Self::new(path, Box::new(open()?), max_window_bytes)?;
        if decoded.compression == Compression::None && offset > 0 {
            let mut file = open()?;
            let end = file.metadata().map_err(moh_files::io(path))?.len();
            file.seek(SeekFrom::Start(offset.min(end))).map_err(moh_files::io(path))?;
            let (source, stored) = (Box::new(file), decoded.stored.clone());
            decoded.source = Box::new(Counted { source, stored });
            decoded.stored.store(offset, Ordering::Relaxed);
            decoded.ahead.clear();
            decoded.decoded = offset.min(end);
        }
        let mut skipped = Vec::new();
        while decoded.offset() < offset {
            let bytes = (offset - decoded.offset()).min(SKIPPED_BYTES) as usize;
            skipped.clear();
            if decoded.fill(&mut skipped, bytes)? == 0 {
                return Err(Error::unusable(
                    path,
                    format!("ends after {} bytes of text; it was longer before", decoded.offset()),
                ));
            }
        }
        Ok(decoded)
    }

    /// Returns the number of decoded bytes before the next byte.
    pub(crate) fn offset(&self) -> u64 {
        self.decoded - self.ahead.len() as u64
    }

    pub(crate) fn stored_bytes(&self) -> u64 {
        self.stored.load(Ordering::Relaxed)
    }

    /// Appends up to `bytes` bytes to `buffer`, fewer only at the end. Returns their number.
    pub(crate) fn fill(&mut self, buffer: &mut Vec<u8>, bytes: usize) -> Result<usize> {
        let from_ahead = bytes.min(self.ahead.len());
        buffer.extend(self.ahead.drain(..from_ahead));
        Ok(from_ahead + self.decode(buffer, bytes - from_ahead)?)
    }

    /// Returns the next bytes without reading them, fewer than `bytes` only at the end.
    pub(crate) fn peek(&mut self, bytes: usize) -> Result<&[u8]> {
        let mut ahead = std::mem::take(&mut self.ahead);
        let missing = bytes.saturating_sub(ahead.len());
        let read = self.decode(&mut ahead, missing);
        self.ahead = ahead;
        read?;
        Ok(&self.ahead)
    }

    fn decode(&mut self, buffer: &mut Vec<u8>, bytes: usize) -> Result<usize> {
        let before = buffer.len();
        // Not more: the buffer may be a record of many megabytes.
        buffer.reserve_exact(bytes);
        let read = self.source.by_ref().take(bytes as u64).read_to_end(buffer);
        let decoded = buffer.len() - before;
        self.decoded += decoded as u64;
        read.map_err(|error| self.fault(error))
    }

    /// Returns the error of a decoder, or of the file that it reads.
    fn fault(&self, error: io::Error) -> Error {
        if self.compression == Compression::None || error.raw_os_error().is_some() {
            return moh_files::io(&self.path)(error).into();
        }
        let text = error.to_string();
        let end = self.decoded;
        let reason = if text.contains("too much memory") || text.contains("memory limit") {
            format!(
                "needs more memory to decompress than --memory gives it ({text}): raise --memory"
            )
        } else if error.kind() == ErrorKind::UnexpectedEof || text.contains("premature eof") {
            format!("compressed data ends early after {end} bytes of text: fetch it again")
        } else {
            format!("compressed data is damaged after {end} bytes of text ({text}): fetch it again")
        };
        Error::unusable(&self.path, reason)
    }
}

/// Fails as [`Decoded::fill`].
impl Read for Decoded {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if !self.ahead.is_empty() {
            let read = self.ahead.as_slice().read(buffer)?;
            self.ahead.drain(..read);
            return Ok(read);
        }
        match self.source.read(buffer) {
            Ok(read) => {
                self.decoded += read as u64;
                Ok(read)
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Err(error),
            Err(error) => Err(io::Error::other(self.fault(error))),
        }
    }
}

/// A file, or standard input.
pub(crate) type Source = Box<dyn Read + Send>;

struct Counted {
    source: Source,
    stored: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer)?;
        self.stored.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}
