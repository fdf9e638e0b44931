//! Files of datasets on Hugging Face's hub as inputs, `hf://datasets/OWNER/NAME[@REVISION]/GLOB`. They are
//! [downloaded](Downloads) while the inputs before them are read.

mod address;
mod ahead;
mod hub;

pub(crate) use address::{moved, scheme};
pub(crate) use ahead::Downloads;
pub(crate) use hub::{Hub, RemoteFile};
