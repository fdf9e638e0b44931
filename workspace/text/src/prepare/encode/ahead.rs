//! Loads a tokenizer into the faster library while the slower library loads it: with a hundred thousand tokens, each
//! load takes a third of a second.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use moh_data::{TokenizerJson, TokenizerSource};

use super::library::Pipeline;

/// A tokenizer that its own thread loads into the faster library.
#[derive(Debug)]
pub struct LoadAhead(Mutex<Option<JoinHandle<Option<Loaded>>>>);

type Loaded = (TokenizerJson, Pipeline);

impl LoadAhead {
    /// Starts to load a `tokenizer.json`. If the faster library rejects the file, the tokenizer is loaded later, as the
    /// slower library writes it.
    pub fn start(path: &Path) -> Self {
        let path = path.to_path_buf();
        let load = move || {
            let json = TokenizerJson::of_file(&TokenizerSource::read(&path).ok()?.json).ok()?;
            let pipeline = Pipeline::load(&json).ok()?;
            Some((json, pipeline))
        };
        Self(Mutex::new(Some(std::thread::spawn(load))))
    }

    /// Returns the loaded tokenizer, once, if the slower library has loaded the same.
    pub(super) fn take(&self, json: &TokenizerJson) -> Option<Pipeline> {
        let thread = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (loaded, pipeline) = thread?.join().ok()??;
        let is_same = loaded.tokens == json.tokens
            && loaded.merges.get() == json.merges.get()
            && pipeline.has_fields_of(json);
        is_same.then_some(pipeline)
    }
}
