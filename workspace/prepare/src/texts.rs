//! The texts of several inputs, one after another on one thread: what a tokenizer is trained on.

use std::sync::Arc;
use std::time::Duration;

use crate::fields::Fields;
use crate::reader::{self, Format, ReadOptions, Reader};
use crate::remote::Downloads;
use crate::{Error, Result};

/// Bytes of memory for a text.
const MEMORY: u64 = 2_000_000_000;
/// Time after which the caller hears that no text has arrived.
const WAIT: Duration = Duration::from_millis(50);

/// A text, with the bytes of input, as they are stored, that were read for it.
type Text = (String, u64);

/// Iterates over texts; a large document is several texts. `None` says that nothing has arrived for a while, as while
/// an input is downloaded.
pub(crate) struct Texts<'a> {
    inputs: &'a Downloads,
    /// The number of inputs that were opened.
    opened: usize,
    options: Arc<ReadOptions>,
    format: Option<Format>,
    /// The readers of an input's parts that are left, the next one last.
    readers: Vec<Box<dyn Reader>>,
    ready: std::vec::IntoIter<Text>,
}

impl<'a> Texts<'a> {
    pub(crate) fn new(inputs: &'a Downloads, format: Option<Format>, fields: Fields) -> Self {
        // A text for training may be cut anywhere.
        let options =
            ReadOptions::new(Arc::new(fields), MEMORY, Arc::new(|text: &str| Some(text.len())));
        Self {
            inputs,
            opened: 0,
            options: Arc::new(options),
            format,
            readers: Vec::new(),
            ready: Vec::new().into_iter(),
        }
    }

    /// The next item; `None` at the end.
    fn next_text(&mut self) -> Result<Option<Option<Text>>> {
        loop {
            if let Some(text) = self.ready.next() {
                return Ok(Some(Some(text)));
            }
            if let Some(reader) = self.readers.last_mut() {
                match reader.next_chunk()? {
                    None => {
                        self.readers.pop();
                        if self.readers.is_empty() {
                            self.inputs.release(self.opened - 1)?;
                        }
                    }
                    Some(chunk) => {
                        let mut input_bytes = chunk.input_bytes;
                        let mut texts = Vec::new();
                        for document in chunk.documents() {
                            let document = document
                                .map_err(|bad| bad.error(self.inputs.name(self.opened - 1)))?;
                            let bytes = std::mem::take(&mut input_bytes);
                            texts.push((document.text.into_owned(), bytes));
                        }
                        self.ready = texts.into_iter();
                    }
                }
                continue;
            }
            if self.opened == self.inputs.len() {
                return Ok(None);
            }
            let Some(path) = self.inputs.path_within(self.opened, WAIT)? else {
                return Ok(Some(None));
            };
            self.opened += 1;
            let open = reader::open(&path, self.format, Arc::clone(&self.options))?;
            for part in (0..open.parts()).rev() {
                self.readers.push(open.read(part, Default::default())?);
            }
        }
    }
}

impl Iterator for Texts<'_> {
    type Item = Result<Option<Text>, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_text().transpose()
    }
}
