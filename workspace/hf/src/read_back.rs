//! A weight file that is synced, read back and hashed while it is written.
//!
//! A thread follows the writer. As soon as enough has been written it syncs that to the disk, reads
//! it back ([`DiskReader`]), and hashes it. So one part of a file is checked while the next ones
//! are converted, and little remains to be done when the last one is written. The writer waits for
//! a thread that falls far behind, which bounds the memory.

use std::fs::File;
use std::io::{self, Write};
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Scope, ScopedJoinHandle};

use blake3::{Hash, Hasher};
use moh_files::DiskReader;

use crate::model_directory::PIECE_BYTES;

/// Bytes that are synced at a time: some tenths of a second of a disk's work.
const SYNC_BYTES: u64 = 128 << 20;
/// Writes by which the thread may be behind: of whole pieces half a gigabyte.
const WRITES_AHEAD: usize = 64;

/// What a file's thread has found.
#[derive(Debug)]
pub(crate) struct ReadBack {
    /// The hash of each part.
    pub hashes: Vec<Hash>,
    /// Whether all bytes came from the disk; otherwise they may have come from the system's memory.
    pub is_direct: bool,
}

type Thread<'scope> = ScopedJoinHandle<'scope, io::Result<ReadBack>>;

/// A new file of consecutive parts, each of which is hashed when it is written and when it is read
/// back.
pub(crate) struct CheckedFile<'scope> {
    file: File,
    hashes: PartHashes,
    length: u64,
    written: SyncSender<u64>,
    /// `None` when it has failed.
    thread: Option<Thread<'scope>>,
}

/// A complete file, of which the last bytes may still have to be read back.
pub(crate) struct WrittenFile<'scope> {
    hashes: Vec<Hash>,
    thread: Thread<'scope>,
}

impl<'scope> CheckedFile<'scope> {
    /// Creates a file that will have parts of these lengths, and starts its thread, which reads it
    /// past the page cache or in the ordinary way.
    ///
    /// # Errors
    /// Fails if the file exists, or cannot be created or opened.
    pub fn create(
        scope: &'scope Scope<'scope, '_>,
        path: &Path,
        parts: Vec<u64>,
        past_cache: bool,
    ) -> io::Result<Self> {
        let file = File::create_new(path)?;
        // Syncing takes a file that is open for writing on some systems.
        let synced = file.try_clone()?;
        let (written, receiver) = sync_channel(WRITES_AHEAD);
        let reader = DiskReader::open(path, past_cache)?;
        let lengths = parts.clone();
        let thread = std::thread::Builder::new()
            .name("read back".to_string())
            .spawn_scoped(scope, move || follow(reader, synced, lengths, receiver))?;
        let hashes = PartHashes::new(parts);
        Ok(CheckedFile { file, hashes, length: 0, written, thread: Some(thread) })
    }

    /// Ends writing. The file is synced and read to its end in the background.
    ///
    /// # Errors
    /// Fails if the thread has failed, or if bytes are missing.
    pub fn finish(self) -> io::Result<WrittenFile<'scope>> {
        match (self.hashes.finish(), self.thread) {
            (Some(hashes), Some(thread)) => Ok(WrittenFile { hashes, thread }),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

impl Write for CheckedFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.is_empty() {
            return Ok(0);
        }
        let CheckedFile { file, hashes, .. } = self;
        rayon::in_place_scope(|scope| {
            scope.spawn(|_| hashes.update(bytes, Hasher::update_rayon));
            file.write_all(bytes)
        })?;
        self.length += bytes.len() as u64;
        if self.written.send(self.length).is_ok() {
            return Ok(bytes.len());
        }
        // The thread is gone before the file was complete: it says why.
        match self.thread.take().map(ScopedJoinHandle::join) {
            Some(Ok(Err(error))) => Err(error),
            Some(Err(panic)) => resume_unwind(panic),
            Some(Ok(Ok(_))) | None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl WrittenFile<'_> {
    /// Waits until the file is synced and read back. The result has the hashes of the bytes as they
    /// were written and the bytes that were read back.
    ///
    /// # Errors
    /// Fails if the file cannot be synced or read.
    pub fn wait(self) -> io::Result<(Vec<Hash>, ReadBack)> {
        match self.thread.join() {
            Ok(found) => Ok((self.hashes, found?)),
            Err(panic) => resume_unwind(panic),
        }
    }
}

/// Syncs and reads a file while it grows. It ends early, without all hashes, if the writer does.
fn follow(
    mut reader: DiskReader,
    file: File,
    parts: Vec<u64>,
    written: Receiver<u64>,
) -> io::Result<ReadBack> {
    let total = parts.iter().sum();
    let mut synced = Synced { file, written, total, length: 0 };
    let mut hashes = PartHashes::new(parts);
    let mut start = 0;
    while start < total {
        let end = total.min(start + PIECE_BYTES as u64);
        if !synced.reach(end)? {
            return Ok(ReadBack { hashes: Vec::new(), is_direct: reader.is_direct() });
        }
        // At most the bytes of a piece.
        let bytes = reader.read(start, (end - start) as usize)?;
        // By this thread alone: the writer, which waits for it, may be the last free thread of
        // rayon's pool.
        hashes.update(bytes, Hasher::update);
        if !reader.is_direct() {
            // A large model would fill the page cache, and the system's search for memory takes
            // processor time.
            reader.release(start, (end - start) as usize);
        }
        start = end;
    }
    synced.file.sync_all()?;
    Ok(ReadBack { hashes: hashes.finish().unwrap_or_default(), is_direct: reader.is_direct() })
}

/// How much of a growing file is on the disk.
struct Synced {
    file: File,
    /// The file's length after each write.
    written: Receiver<u64>,
    /// The length of the complete file.
    total: u64,
    /// Bytes on the disk.
    length: u64,
}

impl Synced {
    /// Waits until the disk has the file up to `end`; `false` if the writer stops before that.
    fn reach(&mut self, end: u64) -> io::Result<bool> {
        while self.length < end {
            let target = self.total.min(self.length + SYNC_BYTES);
            let mut length = self.length;
            while length < target {
                match self.written.recv() {
                    Ok(written) => length = written,
                    Err(_) => return Ok(false),
                }
            }
            self.file.sync_data()?;
            self.length = length;
        }
        Ok(true)
    }
}

/// [`Hasher::update`] or [`Hasher::update_rayon`].
type Update = for<'a> fn(&'a mut Hasher, &[u8]) -> &'a mut Hasher;

/// The hashes of the consecutive parts of a stream of bytes.
struct PartHashes {
    parts: Vec<u64>,
    /// Those of the parts that are complete.
    hashes: Vec<Hash>,
    /// Of the next part.
    hasher: Hasher,
    /// Bytes that the next part lacks.
    missing: u64,
}

impl PartHashes {
    fn new(parts: Vec<u64>) -> Self {
        let missing = parts.first().copied().unwrap_or(0);
        let mut hashes = PartHashes { parts, hashes: Vec::new(), hasher: Hasher::new(), missing };
        hashes.end_parts();
        hashes
    }

    /// Hashes the next bytes, of which there are no more than the parts have.
    fn update(&mut self, mut bytes: &[u8], hash: Update) {
        while !bytes.is_empty() && self.hashes.len() < self.parts.len() {
            let count = usize::try_from(self.missing).unwrap_or(usize::MAX).min(bytes.len());
            let (part, rest) = bytes.split_at(count);
            hash(&mut self.hasher, part);
            self.missing -= count as u64;
            self.end_parts();
            bytes = rest;
        }
    }

    /// Ends the parts of which all bytes are there: several if some are empty.
    fn end_parts(&mut self) {
        while self.missing == 0 && self.hashes.len() < self.parts.len() {
            self.hashes.push(self.hasher.finalize());
            self.hasher.reset();
            self.missing = self.parts.get(self.hashes.len()).copied().unwrap_or(0);
        }
    }

    /// The hashes of all parts; `None` if bytes are missing.
    fn finish(self) -> Option<Vec<Hash>> {
        (self.hashes.len() == self.parts.len()).then_some(self.hashes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread::scope;

    #[test]
    fn parts_are_hashed_however_their_bytes_arrive() {
        let bytes: Vec<u8> = (0..100).collect();
        for parts in [vec![100], vec![0, 1, 0, 0, 60, 39, 0], vec![], vec![0], vec![33, 33]] {
            let total = parts.iter().sum::<u64>() as usize;
            for size in [1, 7, 100] {
                let mut hashes = PartHashes::new(parts.clone());
                for piece in bytes[..total].chunks(size) {
                    hashes.update(piece, Hasher::update);
                }
                let mut start = 0;
                let expected = parts.iter().map(|&length| {
                    let end = start + length as usize;
                    blake3::hash(&bytes[std::mem::replace(&mut start, end)..end])
                });
                let expected: Vec<_> = expected.collect();
                assert_eq!(hashes.finish(), Some(expected), "{parts:?} {size}");
            }
        }
        let mut hashes = PartHashes::new(vec![2, 3]);
        hashes.update(&bytes[..4], Hasher::update_rayon);
        assert_eq!(hashes.finish(), None);
    }

    #[test]
    fn what_reads_back_differently_has_another_hash() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let length = PIECE_BYTES as u64 + 10_000;
        let (written, found) = scope(|scope| {
            let mut file = CheckedFile::create(scope, &path, vec![8, length, 5], true).unwrap();
            file.write_all(&[1; 8]).unwrap();
            file.write_all(&vec![2; length as usize]).unwrap();
            // Nothing is read before the file is complete or has the bytes that are synced at a
            // time.
            let mut other = File::options().write(true).open(&path).unwrap();
            other.write_all(&[1, 1, 1, 1, 1, 1, 1, 1, 3]).unwrap();
            file.write_all(&[4; 5]).unwrap();
            file.finish().unwrap().wait().unwrap()
        });
        assert_eq!(written[1], blake3::hash(&vec![2; length as usize]));
        assert_eq!(found.hashes.len(), 3);
        let equal: Vec<bool> = written.iter().zip(&found.hashes).map(|(a, b)| a == b).collect();
        assert_eq!(equal, [true, false, true]);
    }

    #[test]
    fn long_files_are_read_while_they_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let piece = vec![7; PIECE_BYTES];
        let pieces = 2 * SYNC_BYTES / PIECE_BYTES as u64 + 1;
        let hashes = scope(|scope| {
            let total = pieces * PIECE_BYTES as u64;
            let mut file = CheckedFile::create(scope, &path, vec![total], false).unwrap();
            for _ in 0..pieces {
                file.write_all(&piece).unwrap();
            }
            let (written, found) = file.finish().unwrap().wait().unwrap();
            assert_eq!(written, found.hashes);
            written
        });
        let mut expected = Hasher::new();
        (0..pieces).for_each(|_| {
            expected.update_rayon(&piece);
        });
        assert_eq!(hashes, [expected.finalize()]);
    }

    #[test]
    fn a_writer_is_told_why_its_thread_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        scope(|scope| {
            let mut file = CheckedFile::create(scope, &path, vec![2 * SYNC_BYTES], true).unwrap();
            // The file ends before the thread's range.
            file.written.send(SYNC_BYTES).unwrap();
            let error = (0..).find_map(|_| file.write_all(&[1]).err()).unwrap();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        });
        let path = path.with_extension("short");
        scope(|scope| {
            let mut file = CheckedFile::create(scope, &path, vec![4, 4], true).unwrap();
            file.write_all(&[1; 7]).unwrap();
            assert_eq!(file.finish().err().unwrap().kind(), io::ErrorKind::UnexpectedEof);
        });
    }
}
