//! A token file: Megatron's indexed dataset (`PREFIX.bin` + `PREFIX.idx`), with an optional `PREFIX.json`, and an
//! optional mask of the tokens that are trained on (`mask.rs`). Documents are read as one concatenated sequence of
//! tokens, addressed by position. `token_index.rs` validates the tables. Ids are validated on every read.

use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use rayon::iter::{IntoParallelIterator as _, ParallelIterator as _};

use crate::mapped::{map, read_ahead};
use crate::mask::Mask;
use crate::pending::with_ending;
use crate::token_index::TokenIndex;
use crate::{Error, Result, TokenFileContent, TokenFileInfo, TokenType, mask};

/// The number of u32 ids: without another limit, all of them are valid.
pub(crate) const ALL_IDS: u64 = 1 << 32;
/// Tokens that a thread of [`TokenFile::largest_id`] reads at a time.
const SCAN_TOKENS: usize = 1 << 18;

#[derive(Clone, Debug)]
pub(crate) struct StoredDocument {
    /// Counted from 0.
    pub(crate) number: u64,
    /// The position of its first token.
    pub(crate) start: u64,
    pub(crate) tokens: u64,
    sequences: Range<usize>,
}

/// An open token file. Cheap to share between threads.
pub struct TokenFile {
    prefix: PathBuf,
    bin_path: PathBuf,
    bin: Mmap,
    index: TokenIndex,
    info: Option<TokenFileInfo>,
    mask: Option<Mask>,
    /// Reading this id or a larger one is an error.
    limit: u64,
}

impl TokenFile {
    /// Opens `PREFIX.bin`, `PREFIX.idx` and, if they exist, `PREFIX.json` and `PREFIX.mask`.
    ///
    /// # Errors
    /// Fails if a file is missing or its tables are inconsistent: everything except the ids and the bytes
    /// of the mask is validated here. A mask without a record in an existing `PREFIX.json`, or a record
    /// without a mask, is an error.
    pub fn open(prefix: &Path) -> Result<Self> {
        let mut file = Self::open_without_info(prefix)?;
        file.read_info()?;
        file.open_mask()?;
        Ok(file)
    }

    /// Opens the token file as [`TokenFile::open`], without `PREFIX.json` and `PREFIX.mask`.
    pub(crate) fn open_without_info(prefix: &Path) -> Result<Self> {
        let idx_path = with_ending(prefix, ".idx");
        let named_whole =
            prefix.extension().is_some_and(|ending| ending == "bin" || ending == "idx");
        if named_whole && !idx_path.exists() {
            return Err(Error::token_file(
                prefix,
                format!(
                    "name a token file without its ending, here {}",
                    prefix.with_extension("").display()
                ),
            ));
        }
        let bin_path = with_ending(prefix, ".bin");
        let bin = map(&bin_path)?;
        let index = TokenIndex::open(&idx_path, bin.len() as u64)?;
        let prefix = prefix.to_path_buf();
        Ok(Self { prefix, bin_path, bin, index, info: None, mask: None, limit: ALL_IDS })
    }

    /// Reads `PREFIX.json`, if it exists.
    pub(crate) fn read_info(&mut self) -> Result<()> {
        let path = with_ending(&self.prefix, ".json");
        let Some(info) = TokenFileInfo::read(&path)? else { return Ok(()) };
        let (documents, tokens) = (self.num_documents(), self.num_tokens());
        if (info.documents, info.tokens) != (documents, tokens) {
            return Err(Error::token_file(
                &path,
                format!(
                    "it describes {} documents and {} tokens, but the index has {documents} and \
                     {tokens}: the files do not belong together",
                    info.documents, info.tokens
                ),
            ));
        }
        self.info = Some(info);
        Ok(())
    }

    /// Opens `PREFIX.mask`, if it exists.
    pub(crate) fn open_mask(&mut self) -> Result<()> {
        self.mask = Mask::open(&self.prefix, self.num_tokens())?;
        let Some(info) = &self.info else { return Ok(()) };
        let path = with_ending(&self.prefix, mask::ENDING);
        match (&info.mask, &self.mask) {
            (Some(_), None) => Err(Error::token_file(
                &path,
                "it is missing, and the .json records a mask of the tokens that are trained on: fetch it \
                 again, or prepare the text again",
            )),
            (None, Some(_)) => Err(Error::token_file(
                &path,
                "the .json records no mask: remove the mask if it is another file's, or record it by \
                 \"mask\": {\"trained_tokens\": N} in the .json",
            )),
            _ => Ok(()),
        }
    }

    /// Returns the path without its endings.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// Returns the number of tokens in the file.
    pub fn num_tokens(&self) -> u64 {
        self.index.tokens
    }

    /// Returns the number of documents in the file.
    pub fn num_documents(&self) -> u64 {
        self.index.documents as u64
    }

    /// Returns the number of tokens of the longest document; 0 without documents.
    pub fn longest_document(&self) -> u64 {
        self.documents().map(|document| document.tokens).max().unwrap_or(0)
    }

    pub(crate) fn num_sequences(&self) -> u64 {
        self.index.sequences as u64
    }

    /// Returns the stored type of a token.
    pub fn token_type(&self) -> TokenType {
        self.index.dtype
    }

    /// Returns the contents of `PREFIX.json`, if it exists.
    pub fn info(&self) -> Option<&TokenFileInfo> {
        self.info.as_ref()
    }

    /// Returns whether a mask selects the tokens that are trained on. Without a mask, all are.
    pub fn has_mask(&self) -> bool {
        self.mask.is_some()
    }

    pub(crate) fn mask(&self) -> Option<&Mask> {
        self.mask.as_ref()
    }

    /// Reads the mask of `out.len()` tokens from position `start`: 1 if the token is trained on, otherwise 0.
    pub fn read_mask(&self, start: u64, out: &mut [u8]) -> Result<()> {
        self.check_range(start, out.len() as u64)?;
        match &self.mask {
            Some(mask) => mask.read(start, out),
            None => {
                out.fill(1);
                Ok(())
            }
        }
    }

    /// Returns the number of tokens at `positions` that are trained on.
    pub fn count_trained(&self, positions: Range<u64>) -> Result<u64> {
        let count = positions.end.saturating_sub(positions.start);
        self.check_range(positions.start, count)?;
        match &self.mask {
            Some(mask) if count > 0 => mask.count(positions),
            Some(_) => Ok(0),
            None => Ok(count),
        }
    }

    pub(crate) fn documents(&self) -> impl Iterator<Item = StoredDocument> + '_ {
        let (mut next, mut position) = (0, 0);
        (0..self.index.documents).map(move |number| {
            let sequences = next..self.index.first_sequence(number + 1);
            next = sequences.end;
            let tokens = sequences.clone().map(|sequence| self.index.length(sequence)).sum();
            let document =
                StoredDocument { number: number as u64, start: position, tokens, sequences };
            position += tokens;
            document
        })
    }

    /// Counts the sequences that do not start at the end of the sequence before. Also returns the first of them.
    pub(crate) fn displaced(&self) -> (u64, Option<u64>) {
        if self.index.is_contiguous {
            return (0, None);
        }
        let (mut count, mut first, mut end) = (0, None, 0);
        for sequence in 0..self.index.sequences {
            if self.index.offset(sequence) != end {
                count += 1;
                first = first.or(Some(sequence as u64));
            }
            end = self.index.offset(sequence)
                + self.index.length(sequence) * self.token_type().bytes() as u64;
        }
        (count, first)
    }

    pub(crate) fn bin_bytes(&self) -> u64 {
        self.bin.len() as u64
    }

    /// Returns the stored bytes of a document, one slice for each of its sequences.
    pub(crate) fn stored<'a>(
        &'a self,
        document: &StoredDocument,
    ) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let item = self.token_type().bytes();
        document.sequences.clone().map(move |sequence| {
            // In bounds: `TokenIndex::open` has checked every sequence against the length of the map.
            let (start, tokens) = (self.index.offset(sequence), self.index.length(sequence));
            &self.bin[start as usize..start as usize + tokens as usize * item]
        })
    }

    /// Makes reading an id of `vocab_size` or above an error.
    pub fn limit_vocabulary(&mut self, vocab_size: usize) {
        self.limit = (vocab_size as u64).min(ALL_IDS);
    }

    /// Identifies the content of the file. Reads all of the index, and at most 1 MiB each of the tokens and of the
    /// mask.
    pub fn content(&self) -> TokenFileContent {
        let mask = self.mask.as_ref().map(|mask| &mask.bytes()[..]);
        TokenFileContent::from_bytes(&self.index.map, &self.bin, mask)
    }

    /// Returns an exclusive upper bound of the ids, known without reading them. If `PREFIX.json` records this
    /// `content`, the bound is the recorded size of the vocabulary. If it records no content, the bound is the number
    /// of ids that the stored type can hold. Returns `None` for a signed type without a record, because it may hold
    /// negative ids.
    pub fn ids_below(&self, content: &TokenFileContent) -> Result<Option<u64>> {
        let recorded = self.info.as_ref().and_then(|info| {
            let described = info.content.as_ref()?;
            Some((described, info.vocabulary_size))
        });
        match recorded {
            Some((described, _)) if described != content => Err(Error::token_file(
                &with_ending(&self.prefix, ".json"),
                "it describes another .bin, .idx or .mask than those beside it: prepare the text again, or \
                 remove this file if the others are right",
            )),
            Some((_, vocabulary)) => Ok(Some(vocabulary)),
            None => Ok(self.token_type().num_ids()),
        }
    }

    /// Returns the largest id in a range of positions, or 0 if the range is empty. The range is divided among the
    /// threads.
    pub fn largest_id(&self, range: Range<u64>) -> Result<u32> {
        self.check_range(range.start, range.end.saturating_sub(range.start))?;
        let pieces: Vec<u64> = range.clone().step_by(SCAN_TOKENS).collect();
        let largest: Vec<Result<u32>> = pieces
            .into_par_iter()
            .map(|start| {
                let piece = start..range.end.min(start + SCAN_TOKENS as u64);
                Ok(self.ids(piece)?.into_iter().max().unwrap_or(0))
            })
            .collect();
        largest.into_iter().try_fold(0, |largest, piece| Ok(largest.max(piece?)))
    }

    /// Reads `out.len()` tokens from position `start` on, across documents.
    ///
    /// # Errors
    /// Fails beyond the end of the file, or on an id outside the vocabulary (see
    /// [`TokenFile::limit_vocabulary`]). The contents of `out` are unspecified then.
    pub fn read(&self, start: u64, out: &mut [u32]) -> Result<()> {
        self.check_range(start, out.len() as u64)?;
        let item = self.token_type().bytes() as u64;
        if self.index.is_contiguous {
            return self.widen(start * item, start, out, self.limit);
        }
        let (mut sequence, first) = self.index.locate(start);
        let (mut position, mut skipped, mut rest) = (start, start - first, out);
        while !rest.is_empty() {
            let here = (self.index.length(sequence) - skipped).min(rest.len() as u64);
            // At most rest.len().
            let (part, later) = rest.split_at_mut(here as usize);
            let offset = self.index.offset(sequence) + skipped * item;
            self.widen(offset, position, part, self.limit)?;
            (position, skipped, rest) = (position + here, 0, later);
            sequence += 1;
        }
        Ok(())
    }

    /// Returns the tokens at these positions.
    pub fn ids(&self, positions: Range<u64>) -> Result<Vec<u32>> {
        let count = positions.end.saturating_sub(positions.start);
        self.check_range(positions.start, count)?;
        // Tokens of a mapped file, so their number fits usize.
        let mut ids = vec![0; count as usize];
        self.read(positions.start, &mut ids)?;
        Ok(ids)
    }

    /// Asks the system to read `count` tokens from position `start` from the disk, without waiting, so that a later
    /// [`TokenFile::read`] finds them in memory. If documents are not stored in order, the bytes stored from the first
    /// token on are read.
    pub fn read_ahead(&self, start: u64, count: u64) {
        let item = self.token_type().bytes() as u64;
        let offset = match self.index.is_contiguous {
            true => start.saturating_mul(item),
            false if start < self.num_tokens() => {
                let (sequence, first) = self.index.locate(start);
                self.index.offset(sequence) + (start - first) * item
            }
            false => return,
        };
        read_ahead(&self.bin, offset, count.saturating_mul(item));
    }

    /// Reads consecutive tokens from byte `offset` on. The first token is token `position`.
    fn widen(&self, offset: u64, position: u64, out: &mut [u32], limit: u64) -> Result<()> {
        let item = self.token_type().bytes();
        // In bounds: `TokenIndex::open` has checked every sequence against the length of the map.
        let bytes = &self.bin[offset as usize..offset as usize + out.len() * item];
        self.token_type().widen(bytes, out, limit).map_err(|(at, id)| {
            Error::outside_vocabulary(&self.bin_path, position + at as u64, id, limit)
        })
    }

    /// Returns the first positions of all documents that start inside `range`, in order. Empty documents are skipped.
    pub fn document_starts(&self, range: Range<u64>) -> Result<Vec<u64>> {
        self.check_range(range.start, range.end.saturating_sub(range.start))?;
        let (mut sequence, mut position) = self.index.locate(range.start);
        // A document that starts in an earlier, empty sequence has its first token here as well.
        while sequence > 0 && position == range.start && self.index.length(sequence - 1) == 0 {
            sequence -= 1;
        }
        if position < range.start {
            position += self.index.length(sequence);
            sequence += 1;
        }
        let mut starts = Vec::new();
        for document in self.index.documents_before(|first| first < sequence)..self.index.documents
        {
            let first = self.index.first_sequence(document);
            position += (sequence..first).map(|passed| self.index.length(passed)).sum::<u64>();
            sequence = first;
            if position >= range.end {
                break;
            }
            if starts.last() != Some(&position) {
                starts.push(position);
            }
        }
        Ok(starts)
    }

    /// Returns the numbers of the documents that the tokens at `positions` belong to. An empty range counts
    /// as its first position.
    pub fn documents_of(&self, positions: Range<u64>) -> Result<Range<u64>> {
        self.check_range(positions.start, positions.end.saturating_sub(positions.start).max(1))?;
        // The number of documents that start below a position. If several documents start at one position, all but the
        // last are empty.
        let below = |position| {
            self.index.documents_before(|sequence| self.index.start(sequence) < position) as u64
        };
        // At least the first document starts below the position after the first token.
        Ok(below(positions.start + 1).saturating_sub(1)
            ..below(positions.end.max(positions.start + 1)))
    }

    /// Returns the positions of a document's tokens.
    pub fn document(&self, number: u64) -> Result<Range<u64>> {
        let documents = self.num_documents();
        if number >= documents {
            let reason = format!("the file has {documents} documents, counted from 0");
            return Err(Error::argument("document", number, reason));
        }
        let bound = |document| self.index.start(self.index.first_sequence(document));
        Ok(bound(number as usize)..bound(number as usize + 1))
    }

    fn check_range(&self, start: u64, count: u64) -> Result<()> {
        match start.checked_add(count) {
            Some(end) if end <= self.num_tokens() => Ok(()),
            end => Err(Error::Invalid(format!(
                "{}: cannot read tokens {start}..{}: the file has {}",
                self.bin_path.display(),
                end.unwrap_or(u64::MAX),
                self.num_tokens()
            ))),
        }
    }
}

impl std::fmt::Debug for TokenFile {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("TokenFile")
            .field("prefix", &self.prefix)
            .field("documents", &self.index.documents)
            .field("sequences", &self.index.sequences)
            .field("tokens", &self.index.tokens)
            .finish_non_exhaustive()
    }
}
