//! The Python code with which transformers loads a Mixture-of-Head model, embedded from `tools/hf`.
//! A model directory has the files of its `model_type`, which `auto_map` in its `config.json`
//! names.

use std::path::Path;

use crate::Error;
use crate::origin::read_text;

/// A file of Python code: its name in a model directory, and its text.
type CodeFile = (&'static str, &'static str);

const LLAMA: [CodeFile; 2] = [
    ("configuration_moh_llama.py", include_str!("../../../tools/hf/configuration_moh_llama.py")),
    ("modeling_moh_llama.py", include_str!("../../../tools/hf/modeling_moh_llama.py")),
];

/// Beside [`LLAMA`], which these import.
const QWEN3: [CodeFile; 2] = [
    ("configuration_moh_qwen3.py", include_str!("../../../tools/hf/configuration_moh_qwen3.py")),
    ("modeling_moh_qwen3.py", include_str!("../../../tools/hf/modeling_moh_qwen3.py")),
];

/// The files of a model with this `model_type`; none for a dense model.
pub(crate) fn files(model_type: &str) -> Vec<CodeFile> {
    match model_type {
        "moh_llama" => LLAMA.to_vec(),
        "moh_qwen3" => [LLAMA, QWEN3].concat(),
        _ => Vec::new(),
    }
}

/// A hash of the code of this `model_type`: changed code is not this program's.
pub(crate) fn hash(model_type: &str) -> String {
    hash_of(files(model_type).into_iter())
}

/// The same of the code in a model directory.
///
/// # Errors
/// Fails if a file cannot be read.
pub(crate) fn hash_in(directory: &Path) -> Result<String, Error> {
    let mut found = Vec::new();
    for (name, _) in LLAMA.iter().chain(&QWEN3) {
        found.extend(read_text(&directory.join(name))?.map(|text| (*name, text)));
    }
    Ok(hash_of(found.iter().map(|(name, text)| (*name, text.as_str()))))
}

fn hash_of<'a>(files: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut hasher = blake3::Hasher::new();
    for (name, text) in files {
        hasher.update(format!("{name} {}\n{text}", text.len()).as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// Whether a model directory of this program may have code of that name.
pub(crate) fn is_name(name: &str) -> bool {
    LLAMA.iter().chain(&QWEN3).any(|(file, _)| *file == name)
}
