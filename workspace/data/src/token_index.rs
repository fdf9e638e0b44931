//! `PREFIX.idx` of Megatron's indexed dataset, memory-mapped. [`TokenIndex::open`] validates
//! everything, and the accessors rely on that. Little-endian: 9 bytes of magic, u64 version = 1, u8
//! type code, u64 S sequences, u64 D = documents + 1, then i32[S] lengths in tokens, i64[S] byte
//! offsets into the `.bin`, i64[D] first sequence of each document (first 0, last S).

use std::path::Path;

use memmap2::Mmap;

use crate::mapped::map;
use crate::{Error, Result, TokenType};

pub(crate) const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
pub(crate) const VERSION: u64 = 1;
/// Bytes before the tables.
pub(crate) const HEADER_BYTES: usize = 34;
/// Sequences between two entries of the table of first positions. One entry per sequence would take
/// gigabytes on the largest corpora, and adding up the lengths of a few is as fast.
const STRIDE: usize = 64;

pub(crate) struct TokenIndex {
    pub(crate) map: Mmap,
    pub(crate) dtype: TokenType,
    pub(crate) sequences: usize,
    pub(crate) documents: usize,
    pub(crate) tokens: u64,
    /// Position of the first token of sequences 0, STRIDE, 2 STRIDE, ...
    starts: Vec<u64>,
    /// Whether the sequences are consecutive in the `.bin`, starting at its first byte.
    pub(crate) is_contiguous: bool,
}

impl TokenIndex {
    /// Maps the index at `path` and validates it against a `.bin` of `bin_bytes` bytes.
    pub(crate) fn open(path: &Path, bin_bytes: u64) -> Result<Self> {
        let fault = |reason: String| Error::token_file(path, reason);
        let map = map(path)?;
        let Some(header) = map.first_chunk::<HEADER_BYTES>() else {
            return Err(fault(format!(
                "{} bytes, but the header alone has {HEADER_BYTES}: truncated, or not an index",
                map.len()
            )));
        };
        if header[..9] != MAGIC {
            return Err(fault("its first bytes are not a Megatron index's".to_owned()));
        }
        let version = u64_at(header, 9);
        if version != VERSION {
            return Err(fault(format!("version {version}, expected {VERSION}")));
        }
        let dtype = TokenType::from_code(header[17]).map_err(fault)?;
        let (sequences, bounds) = (u64_at(header, 18), u64_at(header, 26));
        let expected = index_bytes(sequences, bounds);
        if expected != Some(map.len() as u64) {
            return Err(fault(format!(
                "{} bytes for {sequences} sequences and {bounds} document bounds, expected {}: \
                 truncated or damaged",
                map.len(),
                expected.map_or("an impossible number".to_owned(), |bytes| bytes.to_string())
            )));
        }
        if bounds == 0 {
            return Err(fault("no document bounds, expected at least one".to_owned()));
        }
        // Both fit: the mapped file has more bytes than either.
        let (sequences, bounds) = (sequences as usize, bounds as usize);
        let mut index = Self {
            map,
            dtype,
            sequences,
            documents: bounds - 1,
            tokens: 0,
            starts: Vec::with_capacity(sequences.div_ceil(STRIDE)),
            is_contiguous: true,
        };
        index.check_sequences(bin_bytes).map_err(fault)?;
        index.check_documents().map_err(fault)?;
        Ok(index)
    }

    /// Validates lengths and offsets, and sets `tokens`, `starts` and `is_contiguous`.
    fn check_sequences(&mut self, bin_bytes: u64) -> Result<(), String> {
        let item = self.dtype.bytes() as u64;
        let mut tokens = 0u64;
        for sequence in 0..self.sequences {
            if sequence % STRIDE == 0 {
                self.starts.push(tokens);
            }
            let stored = i32_at(&self.map, HEADER_BYTES + 4 * sequence);
            let length = u64::try_from(stored)
                .map_err(|_| format!("sequence {sequence} has the length {stored}"))?;
            let stored = i64_at(&self.map, self.offsets() + 8 * sequence);
            let offset = u64::try_from(stored)
                .map_err(|_| format!("sequence {sequence} starts at byte {stored}"))?;
            if offset % item != 0 {
                return Err(format!(
                    "sequence {sequence} starts at byte {offset}, not a multiple of the {item} \
                     bytes of a token"
                ));
            }
            // A length below 2^31 times 8 bytes, added to an offset below 2^63, fits u64.
            let end = offset + length * item;
            if end > bin_bytes {
                return Err(format!(
                    "sequence {sequence} ends at byte {end}, but the .bin has {bin_bytes}: \
                     truncated, or not the .bin of this index"
                ));
            }
            self.is_contiguous &= offset == tokens * item;
            tokens = tokens
                .checked_add(length)
                .filter(|tokens| tokens.checked_mul(item).is_some())
                .ok_or_else(|| "its lengths add up to more than 2^64 bytes".to_owned())?;
        }
        self.tokens = tokens;
        Ok(())
    }

    /// Validates that documents cover the sequences in order.
    fn check_documents(&self) -> Result<(), String> {
        let mut last = 0;
        for document in 0..=self.documents {
            let stored = i64_at(&self.map, self.bounds() + 8 * document);
            let in_order = u64::try_from(stored)
                .is_ok_and(|first| first >= last && first <= self.sequences as u64);
            if !in_order || (document == 0 && stored != 0) {
                return Err(format!(
                    "document {document} starts at sequence {stored}, expected 0 for the first, \
                     then an increasing number up to {}",
                    self.sequences
                ));
            }
            last = stored as u64;
        }
        if last != self.sequences as u64 {
            return Err(format!(
                "its documents end at sequence {last}, expected {}",
                self.sequences
            ));
        }
        Ok(())
    }

    /// Returns the offset of the table of byte offsets.
    fn offsets(&self) -> usize {
        HEADER_BYTES + 4 * self.sequences
    }

    /// Returns the offset of the table of document bounds.
    fn bounds(&self) -> usize {
        HEADER_BYTES + 12 * self.sequences
    }

    pub(crate) fn length(&self, sequence: usize) -> u64 {
        i32_at(&self.map, HEADER_BYTES + 4 * sequence) as u64
    }

    /// Returns the offset of a sequence in the `.bin`, in bytes.
    pub(crate) fn offset(&self, sequence: usize) -> u64 {
        i64_at(&self.map, self.offsets() + 8 * sequence) as u64
    }

    /// Returns the first sequence of a document; for `documents`, the number of sequences.
    pub(crate) fn first_sequence(&self, document: usize) -> usize {
        i64_at(&self.map, self.bounds() + 8 * document) as usize
    }

    /// Counts the documents that start before a place. `is_before` returns whether a sequence starts before the place.
    pub(crate) fn documents_before(&self, is_before: impl Fn(usize) -> bool) -> usize {
        let (mut low, mut high) = (0, self.documents);
        while low < high {
            let middle = low.midpoint(high);
            let is_before = is_before(self.first_sequence(middle));
            if is_before { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// Returns the sequence that contains a token, and the position of the sequence's first token. At or beyond the
    /// end, returns the number of sequences and the number of tokens.
    pub(crate) fn locate(&self, position: u64) -> (usize, u64) {
        let block = self.starts.partition_point(|&start| start <= position);
        let mut sequence = block.saturating_sub(1) * STRIDE;
        let mut start = self.starts.get(block.saturating_sub(1)).copied().unwrap_or(0);
        while sequence < self.sequences && start + self.length(sequence) <= position {
            start += self.length(sequence);
            sequence += 1;
        }
        (sequence, start)
    }

    /// Returns the position of the first token of a sequence.
    pub(crate) fn start(&self, sequence: usize) -> u64 {
        if sequence == self.sequences {
            return self.tokens;
        }
        let block = sequence / STRIDE;
        let walked: u64 = (block * STRIDE..sequence).map(|before| self.length(before)).sum();
        self.starts[block] + walked
    }
}

/// Returns the size of an index in bytes, unless it exceeds u64.
fn index_bytes(sequences: u64, bounds: u64) -> Option<u64> {
    let tables = sequences.checked_mul(12)?.checked_add(bounds.checked_mul(8)?)?;
    tables.checked_add(HEADER_BYTES as u64)
}

/// Returns the eight bytes at `at`. The caller has checked the bounds.
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut item = [0; 8];
    item.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(item)
}

fn i64_at(bytes: &[u8], at: usize) -> i64 {
    u64_at(bytes, at) as i64
}

/// Returns the four bytes at `at`. The caller has checked the bounds.
fn i32_at(bytes: &[u8], at: usize) -> i32 {
    let mut item = [0; 4];
    item.copy_from_slice(&bytes[at..at + 4]);
    i32::from_le_bytes(item)
}
