//! The Python code with which transformers loads a Mixture-of-Head model, embedded from `tools/hf`.
//! A model directory has the code files of its `model_type`. `auto_map` in its `config.json` names
//! them.

/// A file of Python code: its name in a model directory, and its text.
type CodeFile = (&'static str, &'static str);

const LLAMA: [CodeFile; 2] = [
    ("configuration_moh_llama.py", include_str!("../../../tools/hf/configuration_moh_llama.py")),
    ("modeling_moh_llama.py", include_str!("../../../tools/hf/modeling_moh_llama.py")),
];

/// Needed in addition to [`LLAMA`], which these files import.
const QWEN3: [CodeFile; 2] = [
    ("configuration_moh_qwen3.py", include_str!("../../../tools/hf/configuration_moh_qwen3.py")),
    ("modeling_moh_qwen3.py", include_str!("../../../tools/hf/modeling_moh_qwen3.py")),
];

/// Returns the files of a model with this `model_type`. Empty for a dense model.
pub(crate) fn files(model_type: &str) -> Vec<CodeFile> {
    match model_type {
        "moh_llama" => LLAMA.to_vec(),
        "moh_qwen3" => [LLAMA, QWEN3].concat(),
        _ => Vec::new(),
    }
}

/// Returns whether a model directory of this program may have a code file of this name.
pub(crate) fn is_name(name: &str) -> bool {
    LLAMA.iter().chain(&QWEN3).any(|(file, _)| *file == name)
}
