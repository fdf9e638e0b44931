//! Writes a token file: `PREFIX.bin`, `PREFIX.idx` and `PREFIX.json`. Documents of any number
//! stream to temporary files beside the final ones. The three names are created at the end, the
//! index last, so a token file that can be opened is complete.

use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use moh_files::Publication;

use crate::mapped::map_file;
use crate::pending::{Pending, refuse_existing, with_ending};
use crate::token_index::{HEADER_BYTES, MAGIC, VERSION};
use crate::{Error, Provenance, Result, TokenFileContent, TokenFileInfo, TokenType};

/// A token file being written. Dropping it without [`TokenFileWriter::finish`] leaves no files.
pub struct TokenFileWriter {
    prefix: PathBuf,
    overwrite: bool,
    bin: Pending,
    /// Header (still zeros) and lengths; `finish` derives the other tables from these.
    idx: Pending,
    dtype: TokenType,
    vocab_size: usize,
    documents: u64,
    tokens: u64,
    bytes: Vec<u8>,
}

impl TokenFileWriter {
    /// Starts a token file for ids below `vocab_size`.
    ///
    /// # Errors
    /// Fails if one of its three files exists, or the directory is not writable.
    pub fn create(prefix: &Path, vocab_size: usize) -> Result<Self> {
        Self::start(prefix, vocab_size, false)
    }

    /// Like [`TokenFileWriter::create`], but `finish` replaces existing files.
    ///
    /// # Errors
    /// Fails if the directory is not writable.
    pub fn replace(prefix: &Path, vocab_size: usize) -> Result<Self> {
        Self::start(prefix, vocab_size, true)
    }

    fn start(prefix: &Path, vocab_size: usize, overwrite: bool) -> Result<Self> {
        for path in Self::outputs(prefix) {
            refuse_existing(&path, overwrite)?;
        }
        let [bin, idx, _] = Self::outputs(prefix);
        let bin = Pending::create(&bin)?;
        let mut idx = Pending::create(&idx)?;
        idx.write(&[0; HEADER_BYTES])?;
        Ok(Self {
            prefix: prefix.to_path_buf(),
            overwrite,
            bin,
            idx,
            dtype: TokenType::for_vocabulary(vocab_size),
            vocab_size,
            documents: 0,
            tokens: 0,
            bytes: Vec::new(),
        })
    }

    /// The three files of a prefix: `.bin`, `.idx`, `.json`.
    pub(crate) fn outputs(prefix: &Path) -> [PathBuf; 3] {
        [".bin", ".idx", ".json"].map(|ending| with_ending(prefix, ending))
    }

    /// Appends a document.
    ///
    /// # Errors
    /// Fails if an id is outside the vocabulary, if the document has more tokens than the format
    /// can count, or if the disk is full.
    pub fn push_document(&mut self, tokens: &[u32]) -> Result<()> {
        let length = i32::try_from(tokens.len()).map_err(|_| Error::Argument {
            name: "tokens in a document",
            value: tokens.len() as u64,
            reason: format!("the format stores at most {}: split the document", i32::MAX),
        })?;
        self.bytes.clear();
        for (i, &id) in tokens.iter().enumerate() {
            if id as usize >= self.vocab_size {
                return Err(Error::Vocabulary {
                    path: self.bin.path().to_path_buf(),
                    position: self.tokens + i as u64,
                    id: i64::from(id),
                    vocabulary: self.vocab_size as u64,
                });
            }
            match self.dtype {
                // Below 65,500, as `for_vocabulary` ensures.
                TokenType::U16 => self.bytes.extend_from_slice(&(id as u16).to_le_bytes()),
                _ => self.bytes.extend_from_slice(&stored_i32(id)?.to_le_bytes()),
            }
        }
        self.bin.write(&self.bytes)?;
        self.idx.write(&length.to_le_bytes())?;
        self.documents += 1;
        self.tokens += tokens.len() as u64;
        Ok(())
    }

    /// Documents so far.
    pub(crate) fn documents(&self) -> u64 {
        self.documents
    }

    /// Completes the index and renames the three files to their final names.
    ///
    /// # Errors
    /// Fails if the disk is full, or if a name was taken meanwhile; no files are left then.
    pub fn finish(self, provenance: Provenance) -> Result<TokenFileInfo> {
        let overwrite = self.overwrite;
        let complete = self.complete(provenance)?;
        let info = complete.info.clone();
        publish(vec![complete], overwrite)?;
        Ok(info)
    }

    /// Completes the three files and syncs them to disk, so that publishing only renames.
    ///
    /// # Errors
    /// Fails if the disk is full.
    pub(crate) fn complete(mut self, provenance: Provenance) -> Result<CompleteTokenFile> {
        self.write_tables()?;
        let content = self.content()?;
        let info = TokenFileInfo {
            tokenizer_hash: provenance.tokenizer_hash,
            tokenizer_content: provenance.tokenizer_content,
            beginning_blake3: provenance.beginning_blake3,
            vocabulary_size: self.vocab_size as u64,
            documents: self.documents,
            tokens: self.tokens,
            text_bytes: provenance.text_bytes,
            sources: provenance.sources,
            eos_token: provenance.eos_token,
            special_tokens_in_text: provenance.special_tokens_in_text,
            split_special_tokens: provenance.split_special_tokens,
            dtype: self.dtype,
            content: Some(content),
        };
        let [_, _, json_path] = Self::outputs(&self.prefix);
        let mut json = Pending::create(&json_path)?;
        json.write(&info.to_json())?;
        let Self { mut bin, mut idx, .. } = self;
        for file in [&mut bin, &mut idx, &mut json] {
            file.sync()?;
        }
        Ok(CompleteTokenFile { bin, json, idx, info })
    }

    /// The content of the two files, which are complete.
    fn content(&mut self) -> Result<TokenFileContent> {
        let [bin_path, idx_path] = [&self.bin, &self.idx].map(|file| file.path().to_path_buf());
        let idx = map_file(self.idx.flushed()?, &idx_path)?;
        let bin = map_file(self.bin.flushed()?, &bin_path)?;
        Ok(TokenFileContent::from_bytes(&idx, &bin))
    }

    /// Appends offsets and document bounds after the lengths, then writes the header.
    fn write_tables(&mut self) -> Result<()> {
        let path = self.idx.path().to_path_buf();
        let failed = |error| Error::io(&path, "write")(error);
        let lengths = self.idx.flushed()?.try_clone().map_err(failed)?;
        let item = self.dtype.bytes() as i64;
        // Clones share one cursor, so the lengths are read in pieces between the writes.
        let mut offset = 0i64;
        let mut piece = Vec::new();
        for first in (0..self.documents).step_by(1 << 16) {
            let count = (self.documents - first).min(1 << 16);
            piece.clear();
            let mut reader = BufReader::new(&lengths);
            reader.seek(SeekFrom::Start(HEADER_BYTES as u64 + 4 * first)).map_err(failed)?;
            reader.take(4 * count).read_to_end(&mut piece).map_err(failed)?;
            (&lengths).seek(SeekFrom::End(0)).map_err(failed)?;
            let (items, _) = piece.as_chunks::<4>();
            for length in items {
                self.idx.write(&offset.to_le_bytes())?;
                offset += i64::from(i32::from_le_bytes(*length)) * item;
            }
            self.idx.flushed()?;
        }
        for bound in 0..=self.documents {
            self.idx.write(&bound.to_le_bytes())?;
        }
        let file = self.idx.flushed()?;
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend_from_slice(&MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.push(self.dtype.code());
        header.extend_from_slice(&self.documents.to_le_bytes());
        header.extend_from_slice(&(self.documents + 1).to_le_bytes());
        file.write_all(&header).map_err(failed)
    }
}

/// A token file that lacks only its names.
pub(crate) struct CompleteTokenFile {
    bin: Pending,
    json: Pending,
    idx: Pending,
    info: TokenFileInfo,
}

/// Renames the files of complete token files to their final names.
///
/// # Errors
/// Fails if a name was taken meanwhile; no files are left then.
pub(crate) fn publish(
    files: Vec<CompleteTokenFile>,
    overwrite: bool,
) -> Result<Vec<TokenFileInfo>> {
    let _publication = Publication::start();
    if overwrite {
        for CompleteTokenFile { idx, .. } in &files {
            // An old index must never exist beside a new .bin.
            match std::fs::remove_file(idx.path()) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(Error::io(idx.path(), "replace")(error));
                }
                _ => {}
            }
        }
    }
    let (mut published, mut infos) = (Vec::new(), Vec::new());
    for CompleteTokenFile { bin, json, idx, info } in files {
        for file in [bin, json, idx] {
            let path = file.path().to_path_buf();
            if let Err(error) = file.publish(overwrite) {
                for path in published {
                    // Only the first error is reported.
                    let _ = std::fs::remove_file(path);
                }
                return Err(error);
            }
            published.push(path);
        }
        infos.push(info);
    }
    Ok(infos)
}

/// An id as i32; ids of 2^31 or above have none.
fn stored_i32(id: u32) -> Result<i32> {
    i32::try_from(id).map_err(|_| Error::Argument {
        name: "token id",
        value: u64::from(id),
        reason: format!("the format stores ids up to {}", i32::MAX),
    })
}
