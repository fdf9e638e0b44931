//! The token files being written: their documents, and their progress.

mod bad;
mod file;
mod journal;
mod seen;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use moh_data::{TokenFileWriter, publish_token_files, with_ending};
use moh_files::Registered;
use serde::{Deserialize, Serialize};

pub(crate) use self::file::prefixes;
pub(crate) use self::journal::{Checkpoint, Request};

use self::bad::BadList;
use self::file::{Output, publish_again};
use self::journal::{Journal, Recorded};
use self::seen::Seen;
use crate::prepare::end_of_text::Ending;
use crate::prepare::names::can_continue;
use crate::prepare::pipeline::{Batch, Document, Event, Place};
use crate::prepare::preparation::{Prepared, PreparedFile};
use crate::prepare::reader::{Format, Identity};
use crate::prepare::{ChatNotes, Error, Prepare, Result};

/// The ending of the directory of token files until they are complete.
const DIRECTORY: &str = ".prepare";

/// Counts of the inputs' records by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Records that were read, including bad records.
    pub records: u64,
    /// Records that are not documents.
    pub bad: u64,
    /// Documents without tokens.
    pub empty: u64,
    /// Documents with fewer tokens than `min_tokens`.
    pub short: u64,
    /// Documents with more tokens than `max_tokens`.
    pub long: u64,
    /// Documents outside the sample.
    pub not_sampled: u64,
    /// Documents with the text of an earlier document.
    pub duplicates: u64,
}

pub(crate) struct Outputs<'a> {
    options: &'a Prepare<'a>,
    paths: &'a [PathBuf],
    directory: PathBuf,
    journal: Journal,
    /// The inputs as an interrupted preparation found them.
    inputs: BTreeMap<usize, Identity>,
    files: Vec<Output>,
    seen: Option<Seen>,
    bad: BadList,
    /// The contents of the next checkpoint, except the state of the files.
    state: Checkpoint,
    synced: Instant,
    /// Whether a preparation that ends now can be resumed.
    pub(crate) has_checkpoint: bool,
    /// Set if an input can be read only once: the directory is removed when a signal ends the program.
    is_temporary: Option<Registered>,
}

pub(crate) enum Begun<'a> {
    /// Documents are to be written, from this place on.
    Outputs(Box<Outputs<'a>>, Place),
    /// An interrupted preparation has written all documents.
    Complete(Prepared),
}

impl<'a> Outputs<'a> {
    /// Starts the token files, or resumes an interrupted preparation. Fails if an output exists, if another process
    /// prepares it, or if the interrupted preparation had another request.
    pub(crate) fn begin(
        options: &'a Prepare<'a>,
        paths: &'a [PathBuf],
        request: &Request,
    ) -> Result<Begun<'a>> {
        let directory = with_ending(options.prefix, DIRECTORY);
        let prefixes = prefixes(options);
        if options.begin_anew {
            moh_files::remove_directory(&directory).map_err(moh_files::io(&directory))?;
        }
        if !directory.exists() {
            for path in prefixes.iter().flat_map(|prefix| TokenFileWriter::outputs(prefix)) {
                moh_data::refuse_existing(&path, options.overwrite)?;
            }
            fs::create_dir_all(&directory).map_err(moh_files::io(&directory))?;
        }
        let is_temporary = (!can_continue(paths)).then(|| Registered::directory(&directory));
        let (journal, recorded) = Journal::open(&directory.join("journal.jsonl"), request)?;
        let bad_list = with_ending(options.prefix, ".bad.jsonl");
        if recorded.is_complete {
            let list = BadList::complete(&bad_list, &directory)?;
            let bad_list = list.map(BadList::publish).transpose()?.flatten();
            let files = publish_again(options, &prefixes, &directory)?;
            let Checkpoint { counts, notes, .. } = recorded.checkpoint.unwrap_or_default();
            return Ok(Begun::Complete(Prepared { files, counts, notes, bad_list }));
        }
        let Recorded { checkpoint, inputs, .. } = recorded;
        let has_checkpoint = checkpoint.is_some();
        let state = checkpoint.unwrap_or_default();
        let mut files = Vec::with_capacity(prefixes.len());
        for (number, prefix) in prefixes.iter().enumerate() {
            let file = state.files.get(number).cloned().unwrap_or_default();
            files.push(Output::resume(options, prefix, &directory, file)?);
        }
        let seen = || Seen::resume(&directory.join("seen"), state.seen, options.memory / 4);
        let seen = options.selection.exact_dedup.then(seen).transpose()?;
        let bad = BadList::resume(&bad_list, &directory, state.bad_bytes)?;
        let place = state.place;
        let outputs = Outputs {
            options,
            paths,
            directory,
            journal,
            inputs,
            files,
            seen,
            bad,
            state,
            synced: Instant::now(),
            has_checkpoint,
            is_temporary,
        };
        Ok(Begun::Outputs(Box::new(outputs), place))
    }

    /// Receives an event of the pipeline. Fails if an input changed since an interrupted preparation read it, or if the
    /// disk is full. Also fails if a record is bad and bad records are not skipped, or if too many are bad.
    pub(crate) fn receive(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Opened(number, identity) => self.opened(number, identity),
            Event::Batch(batch) => self.batch(batch),
            Event::Finished(number) => {
                // The next process need not fetch the input again to find its end.
                self.state.place = Place { input: number + 1, ..Place::default() };
                Ok(())
            }
            Event::Waiting => Ok(()),
        }
    }

    fn opened(&mut self, number: usize, identity: Option<Identity>) -> Result<()> {
        let Some(identity) = identity else { return Ok(()) };
        match self.inputs.get(&number) {
            Some(known) if *known != identity => {
                let reason = "has changed since the interrupted preparation read it: restore it, or begin \
                              anew with --begin-anew";
                Err(Error::unusable(&self.paths[number], reason))
            }
            Some(_) => Ok(()),
            None => {
                self.inputs.insert(number, identity.clone());
                self.journal.input(number, identity)
            }
        }
    }

    fn batch(&mut self, batch: Batch) -> Result<()> {
        let path = &self.paths[batch.end.input];
        for record in &batch.bad {
            self.state.counts.records += 1;
            self.state.counts.bad += 1;
            self.bad.push(path, record, self.options.bad_records, self.state.counts)?;
        }
        for document in &batch.documents {
            self.document(document)?;
        }
        self.state.notes.add(&batch.notes);
        self.state.input_bytes += batch.input_bytes;
        self.state.place = batch.end;
        if self.synced.elapsed() >= self.options.sync_every {
            self.checkpoint()?;
        }
        Ok(())
    }

    fn document(&mut self, document: &Document) -> Result<()> {
        self.state.counts.records += 1;
        if document.is_wanted && document.ids.is_empty() {
            self.state.counts.empty += 1;
            return Ok(());
        }
        if !self.selects(document)? {
            return Ok(());
        }
        let (number, _) = self.written();
        let is_validation = self.options.split.is_some_and(|split| split.is_validation(number));
        let output = &mut self.files[usize::from(is_validation)];
        match self.options.chat {
            None => output.writer.push_document(&document.ids)?,
            Some(_) => output.writer.push_masked_document(&document.ids, &document.mask)?,
        }
        output.count(document.text_bytes, &document.special);
        output.trained += document.mask.iter().map(|&byte| u64::from(byte)).sum::<u64>();
        Ok(())
    }

    /// Returns whether a document is written. Counts skipped documents.
    fn selects(&mut self, document: &Document) -> Result<bool> {
        let tokens = document.ids.len() as u64;
        let selection = &self.options.selection;
        let counts = &mut self.state.counts;
        let left_out = if !document.is_wanted {
            &mut counts.not_sampled
        } else if selection.min_tokens.is_some_and(|least| tokens < least) {
            &mut counts.short
        } else if selection.max_tokens.is_some_and(|most| tokens > most) {
            &mut counts.long
        } else {
            let is_new = match (&mut self.seen, &document.hash) {
                (Some(seen), Some(hash)) => seen.insert(hash)?,
                _ => true,
            };
            if is_new {
                return Ok(true);
            }
            &mut counts.duplicates
        };
        *left_out += 1;
        Ok(false)
    }

    pub(crate) fn written(&self) -> (u64, u64) {
        let written = self.files.iter().map(|file| file.writer.written());
        written.fold((0, 0), |(documents, tokens), file| {
            (documents + file.documents, tokens + file.tokens)
        })
    }

    /// Returns the directory of inputs that are downloaded for this preparation alone.
    pub(crate) fn downloads(&self) -> PathBuf {
        self.directory.join("downloads")
    }

    /// Returns whether a part of an input was downloaded for this preparation alone.
    pub(crate) fn has_downloads(&self) -> bool {
        // Each download has its own directory. A failed download leaves no bytes in it.
        let entries = |directory: &Path| fs::read_dir(directory).into_iter().flatten().flatten();
        let mut files = entries(&self.downloads()).flat_map(|directory| entries(&directory.path()));
        files.any(|file| file.metadata().is_ok_and(|file| file.len() > 0))
    }

    /// Returns the stored bytes of the inputs that were read.
    pub(crate) fn input_bytes(&self) -> u64 {
        self.state.input_bytes
    }

    /// Records the progress of the preparation, unless an input can be read only once.
    pub(crate) fn checkpoint(&mut self) -> Result<()> {
        if self.is_temporary.is_some() {
            return Ok(());
        }
        self.state.files.clear();
        for file in &mut self.files {
            file.writer.sync()?;
            self.state.files.push(file.state());
        }
        if let Some(seen) = &mut self.seen {
            seen.sync()?;
            self.state.seen = seen.count();
        }
        self.state.bad_bytes = self.bad.sync()?;
        self.journal.checkpoint(&self.state)?;
        self.has_checkpoint = true;
        self.synced = Instant::now();
        Ok(())
    }

    /// Removes the written files, unless a checkpoint makes them worth keeping.
    pub(crate) fn abandon(self) {
        if !self.has_checkpoint {
            // The error that ended the preparation is reported instead.
            let _ = moh_files::remove_directory(&self.directory);
        }
    }

    /// Checks that the written files are worth publishing.
    pub(crate) fn check(&self) -> Result<()> {
        self.bad.check(self.options.bad_records, self.state.counts, true)?;
        let fault = |reason: &str| Err(Error::Invalid(reason.to_owned()));
        let (documents, _) = self.written();
        let counts = &self.state.counts;
        if documents == 0 && counts.records > counts.bad + counts.empty {
            return fault("no document is left: the options leave all of them out");
        }
        if self.files.iter().all(|file| file.text_bytes == 0) {
            return fault("the inputs contain no text");
        }
        if self.options.chat.is_some() && self.files.iter().all(|file| file.trained == 0) {
            return fault(
                "no token would be trained on: no conversation has a text of the assistant's",
            );
        }
        let Some(file) = self.files.iter().find(|file| file.writer.written().documents == 0) else {
            return Ok(());
        };
        // No share divides a single document, such as a book.
        let remedy = match documents {
            1 if self.options.format != Some(Format::Paragraphs) => {
                "--format paragraphs makes each paragraph of a text a document"
            }
            _ => "add documents, or give it a larger share in --split",
        };
        fault(&format!(
            "{}: would have no document, of {documents} in all: {remedy}",
            file.writer.prefix().display()
        ))
    }

    pub(crate) fn finish(mut self, ending: &Ending) -> Result<Prepared> {
        // Records the counts, in case of an interruption from here on.
        self.checkpoint()?;
        let mut complete = Vec::with_capacity(self.files.len());
        let prefixes = prefixes(self.options);
        for file in self.files {
            complete.push(file.complete(self.options, self.paths, ending)?);
        }
        self.bad.sync()?;
        self.journal.complete()?;
        let infos = publish_token_files(complete, self.options.overwrite)?;
        let bad_list = self.bad.publish()?;
        drop(self.journal);
        moh_files::remove_directory(&self.directory).map_err(moh_files::io(&self.directory))?;
        let files = prefixes.into_iter().zip(infos);
        let files = files.map(|(prefix, info)| PreparedFile { prefix, info }).collect();
        Ok(Prepared { files, counts: self.state.counts, notes: self.state.notes, bad_list })
    }
}
