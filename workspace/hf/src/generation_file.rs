//! `generation_config.json`: the tokens that end generated text.

use std::path::Path;

use moh_model::ModelConfig;

use crate::Error;
use crate::config_file::{fields::Fields, read_object};
use crate::model_directory::GENERATION_FILE;

/// Returns the tokens that end generation by the model in `directory`: `eos_token_id` of
/// `generation_config.json`. As in transformers, `config.json` is used if that file or its field is
/// missing.
pub fn end_tokens(directory: &Path, config: &ModelConfig) -> Result<Vec<u32>, Error> {
    let path = directory.join(GENERATION_FILE);
    if !moh_files::is_file(&path)? {
        return Ok(config.eos_token_ids.clone());
    }
    let map = read_object(&path)?;
    let fields = Fields { map: &map, path: &path, prefix: "" };
    Ok(fields.tokens("eos_token_id")?.unwrap_or_else(|| config.eos_token_ids.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generation_file_comes_before_the_configuration() {
        let dir = tempfile::tempdir().unwrap();
        let config = crate::config_file::tests::small_llama(false).config;
        let found = || end_tokens(dir.path(), &config).map_err(|error| error.to_string());
        assert_eq!(found(), Ok(vec![2]));
        for (text, expected) in [
            ("{\"eos_token_id\": [3, 5]}", Ok(vec![3, 5])),
            ("{\"eos_token_id\": 4}", Ok(vec![4])),
            ("{\"eos_token_id\": null}", Ok(vec![2])),
            ("{}", Ok(vec![2])),
            ("{\"eos_token_id\": []}", Ok(vec![])),
            ("{\"eos_token_id\": -1}", Err("eos_token_id: expected a token id, found -1")),
            ("{\"eos_token_id\": [\"a\"]}", Err("eos_token_id: expected a token id, found \"a\"")),
            ("[2]", Err("expected a JSON object, found a list")),
            ("{\"eos_token_id\": 4", Err("not valid JSON")),
            ("\u{0}", Err("not valid JSON")),
        ] {
            std::fs::write(dir.path().join(GENERATION_FILE), text).unwrap();
            match expected {
                Ok(ids) => assert_eq!(found(), Ok(ids), "{text}"),
                Err(part) => {
                    let message = found().unwrap_err();
                    assert!(message.contains("generation_config.json: "), "{message}");
                    assert!(message.contains(part), "{message}");
                }
            }
        }
    }
}
