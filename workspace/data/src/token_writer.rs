//! Writes a token file: `PREFIX.bin`, `PREFIX.idx`, `PREFIX.json` and, with a mask, `PREFIX.mask`. Documents of any
//! number stream to temporary files beside the final files. The names are created at the end, the index last, so a
//! token file that can be opened is complete.

use std::io::{BufReader, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use moh_files::Publication;
use serde::{Deserialize, Serialize};

use crate::mask::{self, MaskInfo, ones};
use crate::pending::{Pending, refuse_existing, with_ending};
use crate::token_index::{HEADER_BYTES, MAGIC, VERSION};
use crate::{Error, Result, TokenFileContent, TokenFileInfo, TokenType};

/// A token file being written. Dropping it without [`TokenFileWriter::finish`] leaves no files, unless the file was
/// started by [`TokenFileWriter::resume`].
pub struct TokenFileWriter {
    prefix: PathBuf,
    overwrite: bool,
    /// Directory of the files until they are complete; `None` for temporary names.
    directory: Option<PathBuf>,
    bin: Pending,
    /// `None` if all tokens are trained on.
    mask: Option<Pending>,
    /// Header (still zeros) and lengths; `finish` derives the other tables from the lengths.
    idx: Pending,
    dtype: TokenType,
    vocab_size: usize,
    written: Written,
    bytes: Vec<u8>,
}

/// Size of a token file that is being written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Complete documents.
    pub documents: u64,
    /// Tokens of these documents.
    pub tokens: u64,
}

impl TokenFileWriter {
    /// Starts a token file for ids below `vocab_size`.
    pub fn create(prefix: &Path, vocab_size: usize) -> Result<Self> {
        Self::start(prefix, vocab_size, false, None, Written::default())
    }

    /// Starts a token file as [`TokenFileWriter::create`], but `finish` replaces existing files.
    pub fn replace(prefix: &Path, vocab_size: usize) -> Result<Self> {
        Self::start(prefix, vocab_size, true, None, Written::default())
    }

    /// Starts a token file, or resumes it after `written` and removes later contents. Its files lie in `directory`
    /// until they are complete, also after the writer is dropped. `overwrite` lets `finish` replace existing files.
    pub fn resume(
        prefix: &Path,
        vocab_size: usize,
        overwrite: bool,
        directory: &Path,
        written: Written,
    ) -> Result<Self> {
        Self::start(prefix, vocab_size, overwrite, Some(directory), written)
    }

    fn start(
        prefix: &Path,
        vocab_size: usize,
        overwrite: bool,
        directory: Option<&Path>,
        written: Written,
    ) -> Result<Self> {
        let outputs = Self::outputs(prefix);
        for path in &outputs {
            refuse_existing(path, overwrite)?;
        }
        let [bin, idx, ..] = outputs;
        let dtype = TokenType::for_vocabulary(vocab_size);
        let lengths = HEADER_BYTES as u64 + 4 * written.documents;
        let bin = open(&bin, directory, written.tokens * dtype.bytes() as u64)?;
        let mut idx = open(&idx, directory, if written.documents == 0 { 0 } else { lengths })?;
        if written.documents == 0 {
            idx.write(&[0; HEADER_BYTES])?;
        }
        Ok(Self {
            prefix: prefix.to_path_buf(),
            overwrite,
            directory: directory.map(Path::to_path_buf),
            bin,
            mask: None,
            idx,
            dtype,
            vocab_size,
            written,
            bytes: Vec::new(),
        })
    }

    /// Returns the paths of a token file: `.bin`, `.idx`, `.json` and the optional `.mask`.
    pub fn outputs(prefix: &Path) -> [PathBuf; 4] {
        [".bin", ".idx", ".json", mask::ENDING].map(|ending| with_ending(prefix, ending))
    }

    /// Adds a mask of the tokens that are trained on. Call it before more documents are appended.
    pub fn with_mask(mut self) -> Result<Self> {
        let [.., mask] = Self::outputs(&self.prefix);
        self.mask = Some(open(&mask, self.directory.as_deref(), self.written.tokens)?);
        Ok(self)
    }

    /// Returns the path of the token file without its endings.
    pub fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// Appends a document. If the file has a mask, all of the document's tokens are trained on.
    pub fn push_document(&mut self, tokens: &[u32]) -> Result<()> {
        if let Some(mask) = &mut self.mask {
            mask.write(&vec![1; tokens.len()])?;
        }
        self.push_unmasked(tokens)
    }

    /// Appends a document, with 1 in `mask` for each of its tokens that is trained on, and 0 for the others.
    pub fn push_masked_document(&mut self, tokens: &[u32], mask: &[u8]) -> Result<()> {
        let fault = |reason| Error::argument("bytes in a mask", mask.len() as u64, reason);
        let Some(file) = &mut self.mask else {
            return Err(fault("the token file is written without a mask"));
        };
        if mask.len() != tokens.len() || mask.iter().any(|&byte| byte > 1) {
            return Err(fault("expected 0 or 1 for each token of the document"));
        }
        file.write(mask)?;
        self.push_unmasked(tokens)
    }

    /// Appends a document. Its mask, if any, is written already.
    fn push_unmasked(&mut self, tokens: &[u32]) -> Result<()> {
        // Finding the largest id without a branch is several times as fast as searching for the first id outside.
        let largest = tokens.iter().copied().max().unwrap_or(0);
        let is_outside = |&id: &u32| id as usize >= self.vocab_size;
        if is_outside(&largest)
            && let Some(place) = tokens.iter().position(is_outside)
        {
            let position = self.written.tokens + place as u64;
            let (path, id) = (self.bin.path(), i64::from(tokens[place]));
            return Err(Error::outside_vocabulary(path, position, id, self.vocab_size as u64));
        }
        self.bytes.resize(tokens.len() * self.dtype.bytes(), 0);
        match self.dtype {
            // Below 65,500, as `for_vocabulary` ensures.
            TokenType::U16 => store(tokens, &mut self.bytes, |id| (id as u16).to_le_bytes()),
            _ => {
                if i32::try_from(largest).is_err() {
                    let reason = format!("the format stores ids up to {}", i32::MAX);
                    return Err(Error::argument("token id", u64::from(largest), reason));
                }
                store(tokens, &mut self.bytes, u32::to_le_bytes);
            }
        }
        self.bin.write(&self.bytes)?;
        let count = tokens.len() as u64;
        let length = i32::try_from(count).map_err(|_| {
            let reason = format!("the format stores at most {}: split the document", i32::MAX);
            Error::argument("tokens in a document", count, reason)
        })?;
        self.idx.write(&length.to_le_bytes())?;
        self.written.documents += 1;
        self.written.tokens += count;
        Ok(())
    }

    /// Returns the complete documents so far.
    pub fn written(&self) -> Written {
        self.written
    }

    /// Syncs all complete documents to disk: [`TokenFileWriter::resume`] can continue after them.
    pub fn sync(&mut self) -> Result<()> {
        self.bin.sync()?;
        if let Some(mask) = &mut self.mask {
            mask.sync()?;
        }
        self.idx.sync()
    }

    /// Returns the first tokens of the file, at most `count`.
    pub fn beginning(&mut self, count: usize) -> Result<Vec<u32>> {
        let (item, bin) = (self.dtype.bytes(), self.bin.map()?);
        let tokens = bin[..bin.len().min(count * item)].chunks_exact(item);
        Ok(tokens
            .map(|token| match *token {
                [low, high] => u32::from(u16::from_le_bytes([low, high])),
                // Four bytes: the only other type that this writer stores.
                _ => token.iter().rev().fold(0, |id, &byte| id << 8 | u32::from(byte)),
            })
            .collect())
    }

    /// Completes the index and renames the files to their final names.
    ///
    /// # Errors
    /// Fails if the disk is full, or if a name was taken meanwhile. No files remain then, except after `resume`.
    pub fn finish(self, info: TokenFileInfo) -> Result<TokenFileInfo> {
        let overwrite = self.overwrite;
        let complete = self.complete(info)?;
        let info = complete.info.clone();
        publish_token_files(vec![complete], overwrite)?;
        Ok(info)
    }

    /// Completes the files and syncs them to disk, so that publishing only renames.
    pub fn complete(mut self, info: TokenFileInfo) -> Result<CompleteTokenFile> {
        self.write_tables()?;
        let (content, trained_tokens) = self.content()?;
        let given = info.mask.unwrap_or_default();
        let info = TokenFileInfo {
            vocabulary_size: self.vocab_size as u64,
            documents: self.written.documents,
            tokens: self.written.tokens,
            mask: trained_tokens.map(|trained_tokens| MaskInfo { trained_tokens, ..given }),
            dtype: self.dtype,
            content: Some(content),
            ..info
        };
        let [_, _, json, _] = Self::outputs(&self.prefix);
        let mut json = open(&json, self.directory.as_deref(), 0)?;
        json.write(&info.to_json())?;
        let Self { mut bin, mut mask, mut idx, directory, .. } = self;
        for file in [&mut bin, &mut idx, &mut json].into_iter().chain(&mut mask) {
            file.sync()?;
        }
        Ok(CompleteTokenFile { bin, mask, json, idx, info, stays: directory.is_some() })
    }

    /// Returns the content of the complete files, and the number of trained tokens if there is a mask.
    fn content(&mut self) -> Result<(TokenFileContent, Option<u64>)> {
        let (idx, bin) = (self.idx.map()?, self.bin.map()?);
        let mask = self.mask.as_mut().map(Pending::map).transpose()?;
        let mask = mask.as_deref();
        Ok((TokenFileContent::from_bytes(&idx, &bin, mask), mask.map(ones)))
    }

    /// Appends offsets and document bounds after the lengths, then writes the header.
    fn write_tables(&mut self) -> Result<()> {
        let documents = self.written.documents;
        let path = self.idx.path().to_path_buf();
        let failed = |error| Error::io(&path, "write")(error);
        let lengths = self.idx.flushed()?.try_clone().map_err(failed)?;
        let item = self.dtype.bytes() as i64;
        // Clones share one cursor, so the lengths are read in pieces between the writes.
        let mut offset = 0i64;
        let mut piece = Vec::new();
        for first in (0..documents).step_by(1 << 16) {
            let count = (documents - first).min(1 << 16);
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
        for bound in 0..=documents {
            self.idx.write(&bound.to_le_bytes())?;
        }
        let file = self.idx.flushed()?;
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend_from_slice(&MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.push(self.dtype.code());
        header.extend_from_slice(&documents.to_le_bytes());
        header.extend_from_slice(&(documents + 1).to_le_bytes());
        file.write_all(&header).map_err(failed)
    }
}

/// Opens a file of a token file. It gets the name `path` when it is complete.
fn open(path: &Path, directory: Option<&Path>, length: u64) -> Result<Pending> {
    match directory {
        Some(directory) => Pending::resume(path, directory, length),
        None => Pending::create(path),
    }
}

/// A token file that lacks only its names.
pub struct CompleteTokenFile {
    bin: Pending,
    mask: Option<Pending>,
    json: Pending,
    idx: Pending,
    info: TokenFileInfo,
    /// Whether renamed files keep their names if a later rename fails: [`publish_remaining`] continues.
    stays: bool,
}

/// Renames the files of a complete token file in `directory` to their final names, unless an interrupted
/// [`publish_token_files`] has renamed them. `has_mask` is whether the token file has a mask.
pub fn publish_remaining(
    prefix: &Path,
    directory: &Path,
    overwrite: bool,
    has_mask: bool,
) -> Result<()> {
    let [bin, idx, json, mask] = TokenFileWriter::outputs(prefix);
    if overwrite && !has_mask {
        remove_old(&mask)?;
    }
    // In the order of `publish_token_files`.
    for path in [bin, mask, json, idx] {
        let working = directory.join(path.file_name().unwrap_or_default());
        match working.metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io(&working, "read")(error)),
            Ok(file) => Pending::resume(&path, directory, file.len())?.publish(overwrite)?,
        }
    }
    Ok(())
}

/// Renames the files of complete token files to their final names.
///
/// # Errors
/// Fails if a name was taken meanwhile, and removes the files that were renamed before. Files of
/// [`TokenFileWriter::resume`] stay; [`publish_remaining`] continues with them.
pub fn publish_token_files(
    files: Vec<CompleteTokenFile>,
    overwrite: bool,
) -> Result<Vec<TokenFileInfo>> {
    let _publication = Publication::start();
    if overwrite {
        for CompleteTokenFile { bin, mask, idx, .. } in &files {
            // Neither an old index nor an old mask may exist beside a new .bin.
            remove_old(idx.path())?;
            if mask.is_none() {
                remove_old(&bin.path().with_extension(&mask::ENDING[1..]))?;
            }
        }
    }
    let (mut published, mut infos) = (Vec::new(), Vec::new());
    for CompleteTokenFile { bin, mask, json, idx, info, stays } in files {
        for file in [Some(bin), mask, Some(json), Some(idx)].into_iter().flatten() {
            let path = file.path().to_path_buf();
            if let Err(error) = file.publish(overwrite) {
                for path in published {
                    // Only the first error is reported.
                    let _ = std::fs::remove_file(path);
                }
                return Err(error);
            }
            if !stays {
                published.push(path);
            }
        }
        infos.push(info);
    }
    Ok(infos)
}

fn remove_old(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io(path, "replace")(error)),
        _ => Ok(()),
    }
}

fn store<const N: usize>(ids: &[u32], bytes: &mut [u8], stored: impl Fn(u32) -> [u8; N]) {
    bytes.as_chunks_mut().0.iter_mut().zip(ids).for_each(|(bytes, &id)| *bytes = stored(id));
}
