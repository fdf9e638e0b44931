//! Verifies all of a token file: its tables, every id, the record of its content, and signs in its documents of how it
//! was made. The file is read once, in order, [`WAVE_BYTES`] at a time by all threads. 16 bytes of each document stay
//! in memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rayon::iter::{IntoParallelRefIterator as _, ParallelIterator as _};
use rayon::slice::{ParallelSlice as _, ParallelSliceMut as _};
use serde::Serialize;

use crate::pending::with_ending;
use crate::token_file::{ALL_IDS, StoredDocument};
use crate::{DocumentEnd, Error, Result, TokenFile, TokenType};

/// Bytes of the documents that the threads read at a time.
const WAVE_BYTES: u64 = 64 << 20;
const WAVE_DOCUMENTS: usize = 1 << 16;
/// Bytes from which several threads read one document; a multiple of every token's bytes.
const LARGE_BYTES: usize = 1 << 20;
/// The low bits of a [`Mark`]: the document's number. The hash has the other 88.
const NUMBER_BITS: u32 = 40;

/// A document's hash in the high bits, and its number in the low bits.
type Mark = u128;

/// The input of [`Verify::run`].
#[derive(Clone, Copy, Debug)]
pub struct Verify<'a> {
    /// The token file's path without its endings.
    pub prefix: &'a Path,
    /// Exclusive upper bound of the ids; by default the recorded size of the vocabulary.
    pub vocabulary: Option<u64>,
    /// The id of the recorded end of text; by default the id that ends most documents.
    pub end_of_text: Option<u32>,
}

/// The result of [`Verify::run`].
#[derive(Clone, Debug)]
pub struct Verification {
    /// Documents in the file; 0 if its tables cannot be used.
    pub documents: u64,
    /// Tokens in the file.
    pub tokens: u64,
    /// The bound that every id was compared with. `None` if no size of the vocabulary is known: only ids outside every
    /// vocabulary were found.
    pub vocabulary: Option<u64>,
    /// One problem for each kind that was found, the faults first.
    pub problems: Vec<Problem>,
}

/// A kind of problem that a token file has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The kind.
    pub kind: ProblemKind,
    /// The number of places with the problem.
    pub count: u64,
    /// The first document with the problem, counted from 0; `None` for kinds that do not concern documents.
    pub document: Option<u64>,
    /// The problem and its first place, as one sentence.
    pub message: String,
}

/// The kinds of problems. Training on a file with a fault fails or reads other text. Other problems may be intended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProblemKind {
    /// The tables of the `.idx` contradict themselves or the `.bin`: nothing else is verified.
    Tables,
    /// Sequences that do not follow each other in the `.bin`.
    Offsets,
    /// Bytes in the `.bin` that belong to no document.
    Size,
    /// The `.json` describes other files, or is not a token file's metadata.
    Record,
    /// The mask belongs to another file, or has bytes other than 0 and 1.
    Mask,
    /// Ids outside the vocabulary.
    Ids,
    /// Documents that do not end with the recorded end of text.
    EndOfText,
    /// Documents without tokens.
    Empty,
    /// Documents that repeat an earlier one.
    Duplicates,
    /// Documents without a token that is trained on, by the mask.
    Untrained,
}

impl ProblemKind {
    /// Returns whether the kind is a fault of the file, not of its text.
    pub fn is_fault(self) -> bool {
        !matches!(self, Self::EndOfText | Self::Empty | Self::Duplicates | Self::Untrained)
    }
}

impl Verify<'_> {
    /// Verifies the file. `progress` gets the bytes of tokens read so far, and the bytes of all tokens.
    ///
    /// # Errors
    /// Fails if a file is missing or cannot be read. Faults of its content are [`Problem`]s.
    pub fn run(self, progress: &mut dyn FnMut(u64, u64)) -> Result<Verification> {
        let mut file = match TokenFile::open_without_info(self.prefix) {
            Ok(file) => file,
            Err(fault @ Error::TokenFile { .. }) => {
                let tables = problem(ProblemKind::Tables, 1, None, fault.to_string());
                let problems = vec![tables];
                return Ok(Verification { documents: 0, tokens: 0, vocabulary: None, problems });
            }
            Err(error) => return Err(error),
        };
        let mut problems = tables(&file);
        problems.extend(record(&mut file)?);
        problems.extend(masks::faults(&file));
        let recorded = file.info().map(|info| info.vocabulary_size);
        let vocabulary = self.vocabulary.or(recorded);
        let mut scan = Scan::new(&file);
        scan.read(&file, vocabulary.unwrap_or(ALL_IDS), progress);
        problems.extend(scan.ids(&file, vocabulary));
        if let Some(DocumentEnd::Token(token)) = file.info().map(|info| &info.eos_token) {
            problems.extend(scan.ends(&file, token, self.end_of_text));
        }
        problems.extend(scan.empty(&file));
        problems.extend(scan.duplicates(&file));
        problems.extend(masks::untrained(&file));
        let (documents, tokens) = (file.num_documents(), file.num_tokens());
        Ok(Verification { documents, tokens, vocabulary, problems })
    }
}

fn problem(kind: ProblemKind, count: u64, document: Option<u64>, message: String) -> Problem {
    Problem { kind, count, document, message }
}

/// Creates the problem of `count` documents, the first of them `first`.
fn of_documents(
    file: &TokenFile,
    kind: ProblemKind,
    count: u64,
    first: u64,
    what: &str,
) -> Problem {
    let documents = of(count, "document", file.num_documents());
    problem(kind, count, Some(first), format!("{}: {documents} {what}", bin(file).display()))
}

fn bin(file: &TokenFile) -> PathBuf {
    with_ending(file.prefix(), ".bin")
}

/// Returns problems of the tables that training tolerates, but that a token file should not have.
fn tables(file: &TokenFile) -> Vec<Problem> {
    let mut problems = Vec::new();
    if let (count, Some(first)) = file.displaced() {
        let path = with_ending(file.prefix(), ".idx");
        let message = format!(
            "{}: {} do not begin where the one before ends, first sequence {first}",
            path.display(),
            of(count, "sequence", file.num_sequences()),
        );
        problems.push(problem(ProblemKind::Offsets, count, None, message));
    }
    // `TokenIndex::open` has checked that the product fits.
    let expected = file.num_tokens() * file.token_type().bytes() as u64;
    let found = file.bin_bytes();
    if found != expected {
        let message = format!(
            "{}: {found} bytes, but the documents of the index have {expected}: not the .bin of this index",
            bin(file).display()
        );
        problems.push(problem(ProblemKind::Size, found.abs_diff(expected), None, message));
    }
    problems
}

/// Reads `PREFIX.json` and the mask, and compares the recorded content with the files.
fn record(file: &mut TokenFile) -> Result<Option<Problem>> {
    let read = file.read_info().map_err(|error| (ProblemKind::Record, error));
    let read = read.and_then(|()| file.open_mask().map_err(|error| (ProblemKind::Mask, error)));
    let read = read.and_then(|()| {
        file.ids_below(&file.content()).map_err(|error| (ProblemKind::Record, error))
    });
    match read {
        Ok(_) => Ok(None),
        Err((kind, fault @ Error::TokenFile { .. })) => {
            Ok(Some(problem(kind, 1, None, fault.to_string())))
        }
        Err((_, error)) => Err(error),
    }
}

/// Formats a count: `3 of 50 documents`.
fn of(count: u64, noun: &str, all: u64) -> String {
    let plural = if all == 1 { "" } else { "s" };
    format!("{count} of {all} {noun}{plural}")
}

struct Scan {
    outside: u64,
    /// Document, position and id of the first id outside the vocabulary.
    first_outside: Option<(u64, u64, i64)>,
    /// By last id: the number of documents that end with it, and the first of these documents.
    ends: BTreeMap<i64, (u64, u64)>,
    empty: u64,
    first_empty: Option<u64>,
    marks: Vec<Mark>,
}

struct Found {
    /// The number of ids outside the vocabulary, and the first such id with its index in the document.
    outside: (u64, Option<(u64, i64)>),
    /// The last id; `None` without tokens.
    end: Option<i64>,
    mark: Mark,
}

impl Scan {
    fn new(file: &TokenFile) -> Self {
        // Fits usize: the index has more bytes than the file has documents.
        let marks = Vec::with_capacity(file.num_documents() as usize);
        let ends = BTreeMap::new();
        Self { outside: 0, first_outside: None, ends, empty: 0, first_empty: None, marks }
    }

    fn read(&mut self, file: &TokenFile, limit: u64, progress: &mut dyn FnMut(u64, u64)) {
        let item = file.token_type().bytes() as u64;
        let mut documents = file.documents();
        let mut wave = next_wave(&mut documents, item);
        while let Some(last) = wave.last() {
            let done = (last.start + last.tokens) * item;
            let next = next_wave(&mut documents, item);
            if let (Some(first), Some(last)) = (next.first(), next.last()) {
                file.read_ahead(first.start, last.start + last.tokens - first.start);
            }
            let found: Vec<Found> =
                wave.par_iter().map(|document| examine(file, document, limit)).collect();
            for (document, found) in wave.iter().zip(&found) {
                self.add(document, found);
            }
            progress(done, file.num_tokens() * item);
            wave = next;
        }
    }

    fn add(&mut self, document: &StoredDocument, found: &Found) {
        let (count, first) = found.outside;
        self.outside += count;
        if let (None, Some((at, id))) = (self.first_outside, first) {
            self.first_outside = Some((document.number, document.start + at, id));
        }
        match found.end {
            Some(id) => {
                self.ends.entry(id).or_insert((0, document.number)).0 += 1;
                self.marks.push(found.mark);
            }
            None => {
                self.empty += 1;
                self.first_empty = self.first_empty.or(Some(document.number));
            }
        }
    }

    fn ids(&self, file: &TokenFile, vocabulary: Option<u64>) -> Option<Problem> {
        let (document, position, id) = self.first_outside?;
        let vocabulary = match vocabulary {
            Some(size) => format!("the vocabulary of {size}"),
            None => "every vocabulary".to_owned(),
        };
        let message = format!(
            "{}: the ids of {} are outside {vocabulary}, first {id}, token {position}, in document {document}",
            bin(file).display(),
            of(self.outside, "token", file.num_tokens()),
        );
        Some(problem(ProblemKind::Ids, self.outside, Some(document), message))
    }

    /// Returns the problem of documents that do not end with the token `end`. Without `id`, the most frequent last id
    /// is the token's.
    fn ends(&self, file: &TokenFile, end: &str, id: Option<u32>) -> Option<Problem> {
        let most = || self.ends.iter().rev().max_by_key(|(_, (count, _))| count).map(|(&id, _)| id);
        let assumed = id.map_or_else(most, |id| Some(i64::from(id)))?;
        let others = || self.ends.iter().filter(|&(&id, _)| id != assumed).map(|(_, end)| end);
        let count = others().map(|(count, _)| count).sum();
        let first = others().map(|&(_, first)| first).min()?;
        let assumed = match id {
            Some(id) => format!("of id {id}"),
            None => format!("assumed to have the id {assumed}, which ends most of them"),
        };
        let what = format!("do not end with {end}, {assumed}, first document {first}");
        Some(of_documents(file, ProblemKind::EndOfText, count, first, &what))
    }

    fn empty(&self, file: &TokenFile) -> Option<Problem> {
        let first = self.first_empty?;
        let what = format!("have no tokens, first document {first}");
        Some(of_documents(file, ProblemKind::Empty, self.empty, first, &what))
    }

    fn duplicates(&mut self, file: &TokenFile) -> Option<Problem> {
        self.marks.par_sort_unstable();
        let number = |mark: &Mark| (mark & ((1 << NUMBER_BITS) - 1)) as u64;
        let groups = self.marks.chunk_by(|a, b| a >> NUMBER_BITS == b >> NUMBER_BITS);
        let (mut count, mut first) = (0, None);
        for group in groups {
            count += group.len() as u64 - 1;
            // Sorted by number within a group.
            if let [original, copy, ..] = group {
                let pair = (number(copy), number(original));
                first = Some(first.map_or(pair, |first: (u64, u64)| first.min(pair)));
            }
        }
        let (copy, original) = first?;
        let percent = 100.0 * count as f64 / file.num_documents() as f64;
        let what = format!(
            "({percent:.2}%) repeat an earlier one, first document {copy}, which repeats document {original}"
        );
        Some(of_documents(file, ProblemKind::Duplicates, count, copy, &what))
    }
}

fn next_wave(
    documents: &mut impl Iterator<Item = StoredDocument>,
    item: u64,
) -> Vec<StoredDocument> {
    let (mut wave, mut bytes) = (Vec::new(), 0u64);
    while bytes < WAVE_BYTES && wave.len() < WAVE_DOCUMENTS {
        let Some(document) = documents.next() else { break };
        bytes = bytes.saturating_add(document.tokens * item);
        wave.push(document);
    }
    wave
}

fn examine(file: &TokenFile, document: &StoredDocument, limit: u64) -> Found {
    let dtype = file.token_type();
    let mut hasher = blake3::Hasher::new();
    let (mut count, mut first, mut end, mut passed) = (0, None, None, 0);
    for bytes in file.stored(document) {
        if bytes.len() < LARGE_BYTES {
            hasher.update(bytes)
        } else {
            hasher.update_rayon(bytes)
        };
        let (found, at) = outside(dtype, bytes, limit);
        count += found;
        first = first.or(at.map(|(at, id)| (passed + at, id)));
        end = dtype.last(bytes).or(end);
        passed += (bytes.len() / dtype.bytes()) as u64;
    }
    let mut hash = [0; 16];
    hash.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    let mark = u128::from_le_bytes(hash) << NUMBER_BITS | u128::from(document.number);
    Found { outside: (count, first), end, mark }
}

/// Computes [`TokenType::outside`], with several threads for many ids.
fn outside(dtype: TokenType, bytes: &[u8], limit: u64) -> (u64, Option<(u64, i64)>) {
    if bytes.len() < 2 * LARGE_BYTES {
        return dtype.outside(bytes, limit);
    }
    let tokens = (LARGE_BYTES / dtype.bytes()) as u64;
    let parts: Vec<_> =
        bytes.par_chunks(LARGE_BYTES).map(|part| dtype.outside(part, limit)).collect();
    let first = parts.iter().zip(0u64..).find_map(|((_, first), part)| {
        let (at, id) = (*first)?;
        Some((part * tokens + at, id))
    });
    (parts.iter().map(|(count, _)| count).sum(), first)
}

mod masks;
#[cfg(test)]
mod tests;
