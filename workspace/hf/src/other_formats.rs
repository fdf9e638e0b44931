//! Directories and weights that are not a whole model in Hugging Face's layout: their formats, and how to get a model.

use std::path::Path;

use crate::weight_files::{INDEX_FILE, WEIGHTS_FILE};

/// PEFT's file of an adapter. transformers loads the adapter if this file is next to a model.
pub(crate) const ADAPTER_FILE: &str = "adapter_config.json";

const MERGE: &str =
    "merge it with its base model in PEFT, by merge_and_unload() and save_pretrained(DIR)";

/// Describes a directory that has no model, with the remedy. Returns `None` if its files are unknown.
pub(crate) fn of_directory(dir: &Path) -> Option<String> {
    if dir.join(ADAPTER_FILE).exists() {
        return Some(format!("holds an adapter of PEFT, not a model: {MERGE}"));
    }
    let entries = std::fs::read_dir(dir).ok()?.flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.retain(|name| name != WEIGHTS_FILE && name != INDEX_FILE);
    names.sort();
    FORMATS.iter().find_map(|(is_file, what)| {
        let name = names.iter().find(|name| is_file(name))?;
        Some(what.replace("NAME", name).replace("DIR/", &format!("{}/", dir.display())))
    })
}

/// Whether a file of this name belongs to a format.
type IsFile = fn(&str) -> bool;

/// The formats, each with the description of such a directory and the remedy.
const FORMATS: [(IsFile, &str); 10] = [
    (
        |name| name.starts_with("checkpoint-"),
        "holds checkpoints, not a model: name one of them, such as DIR/NAME",
    ),
    (
        |name| name == "snapshots",
        "is a repository of the hub's cache: name a directory in DIR/snapshots",
    ),
    (
        |name| name.starts_with("consolidated.") && name.ends_with(".pth"),
        "holds Meta's own format: take the repository's files in Hugging Face's layout, or convert it with transformers' \
         convert_llama_weights_to_hf.py",
    ),
    (
        |name| name == "zero_to_fp32.py" || name.starts_with("global_step"),
        "holds a checkpoint of DeepSpeed: run its zero_to_fp32.py with --safe_serialization, beside the model's config.json",
    ),
    (
        |name| name.ends_with(".distcp"),
        "holds a distributed checkpoint of PyTorch: save the model with save_pretrained(DIR) from the trainer that wrote it",
    ),
    (
        |name| name.ends_with(".gguf"),
        "holds weights of llama.cpp (.gguf): start from the model that they were made of",
    ),
    (
        |name| name.contains("-00001-of-"),
        "holds shards without model.safetensors.index.json: load it in transformers and save it with save_pretrained(DIR)",
    ),
    (
        |name| name.ends_with(".safetensors"),
        "holds weights of another name, NAME: rename it to model.safetensors if it is the whole model in Hugging Face's layout",
    ),
    (
        |name| [".bin", ".pt", ".pth"].iter().any(|end| name.ends_with(end)),
        "holds PyTorch weights, which must be saved as safetensors first: load it in transformers and save it with \
         save_pretrained(DIR)",
    ),
    (
        |name| [".h5", ".msgpack", ".onnx", ".npz", ".nemo"].iter().any(|end| name.ends_with(end)),
        "holds weights of another framework, NAME: start from the model's files in Hugging Face's layout",
    ),
];

/// Describes why a model has a tensor of this name instead of its own, with the remedy.
pub(crate) fn of_tensor(name: &str) -> Option<String> {
    if name.contains(".base_layer.") || name.contains(".lora_") {
        return Some(format!("was saved with an adapter of PEFT in it: {MERGE}"));
    }
    let prefixes = ["_orig_mod.", "module.", "base_model.model.", "_fsdp_wrapped_module."];
    let prefix = prefixes.into_iter().find(|prefix| name.starts_with(prefix))?;
    Some(format!(
        "has names that begin with {prefix}: save the model that is wrapped, not what wraps it"
    ))
}
