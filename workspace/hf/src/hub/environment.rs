//! The hub's settings in the environment, as Hugging Face's own programs read them.

use std::path::PathBuf;

use crate::hub_cache::{home, path};

pub(crate) fn endpoint() -> String {
    std::env::var("HF_ENDPOINT").unwrap_or_else(|_| "https://huggingface.co".to_string())
}

/// Returns whether only the cache may be used: `HF_HUB_OFFLINE`.
pub(crate) fn is_offline() -> bool {
    std::env::var("HF_HUB_OFFLINE").is_ok_and(|value| {
        ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
    })
}

/// Returns the login token: `HF_TOKEN`, the file named by `HF_TOKEN_PATH`, or the file of `hf auth login`.
/// Returns `None` if `HF_HUB_DISABLE_IMPLICIT_TOKEN` is set.
pub(crate) fn token() -> Option<String> {
    let text = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    if text("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_some() {
        return None;
    }
    text("HF_TOKEN").or_else(|| {
        let files = path("HF_TOKEN_PATH").into_iter().chain([home().join("token")]);
        let read = |file: PathBuf| std::fs::read_to_string(file).ok();
        let mut texts = files.filter_map(read).map(|text| text.trim().to_string());
        texts.find(|text| !text.is_empty())
    })
}
