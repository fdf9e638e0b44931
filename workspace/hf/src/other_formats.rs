//! Directories and weights that are not a whole model in Hugging Face's layout: what they are, and how to get one.

use std::path::Path;

/// PEFT's file of an adapter. transformers loads the adapter where this file is beside a model.
pub(crate) const ADAPTER_FILE: &str = "adapter_config.json";

const MERGE: &str =
    "merge it with its base model in PEFT, by merge_and_unload() and save_pretrained(DIR)";

/// What a directory holds in place of a model, and what to do; `None` if its files do not tell.
pub(crate) fn of_directory(dir: &Path) -> Option<String> {
    if dir.join(ADAPTER_FILE).exists() {
        return Some(format!("holds an adapter of PEFT, not a model: {MERGE}"));
    }
    let entries = std::fs::read_dir(dir).ok()?.flatten();
    let names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    let has = |matches: &dyn Fn(&str) -> bool| names.iter().any(|name| matches(name));
    let save = "load it in transformers and save it with save_pretrained(DIR)";
    if has(&|name| name.starts_with("consolidated.") && name.ends_with(".pth")) {
        let script = "convert_llama_weights_to_hf.py";
        return Some(format!(
            "holds Meta's own format: take the repository's files in Hugging Face's layout, or convert it with transformers' {script}"
        ));
    }
    if has(&|name| name.ends_with(".gguf")) {
        return Some(
            "holds weights of llama.cpp (.gguf): start from the model that they were made of"
                .to_owned(),
        );
    }
    if has(&|name| [".bin", ".pt", ".pth"].iter().any(|end| name.ends_with(end))) {
        return Some(format!(
            "holds PyTorch weights, which must be saved as safetensors first: {save}"
        ));
    }
    None
}

/// Why a model has a tensor of this name in place of its own, and what to do.
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
