//! The chat template of a tokenizer, and the files that it is read from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use moh_files::unusable;
use serde_json::Value;

use crate::{Renderer, Result, generation};

/// A template in a file of its own.
const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The tokenizer's settings: its special tokens, and the template if it has no file.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Maximum bytes of either file.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// A chat template with the special tokens that it may name.
#[derive(Debug)]
pub struct ChatTemplate {
    /// With the blocks `generation` in terms of Jinja.
    pub(crate) source: String,
    /// As the file has it.
    text: String,
    /// Whether it has such blocks.
    pub(crate) has_generation: bool,
    pub(crate) path: PathBuf,
    /// `bos_token` and the others by their names.
    pub(crate) special_tokens: BTreeMap<String, String>,
    blake3: String,
}

impl ChatTemplate {
    /// Reads the template of the tokenizer in `directory`: `chat_template.jinja`, or else
    /// `chat_template` of `tokenizer_config.json` (a string, or a list of named templates, of which
    /// `default` is used).
    pub fn load(directory: &Path) -> Result<Self> {
        Self::find(directory)?.ok_or_else(|| {
            let reason = format!(
                "the tokenizer has no chat template, neither {TEMPLATE_FILE} nor chat_template in \
                 {TOKENIZER_CONFIG}: leave out --chat"
            );
            unusable(directory, reason).into()
        })
    }

    /// As [`ChatTemplate::load`]; `None` if there is no template.
    pub fn find(directory: &Path) -> Result<Option<Self>> {
        let path = directory.join(TOKENIZER_CONFIG);
        let config: Value = match read(&path)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|error| unusable(&path, format!("not valid JSON: {error}")))?,
            None => Value::Null,
        };
        let special_tokens = special_tokens(&config);
        let file = directory.join(TEMPLATE_FILE);
        if let Some(text) = read(&file)? {
            return Ok(Some(Self::new(file, &text, special_tokens)));
        }
        Ok(default_template(&config).map(|text| Self::new(path, text, special_tokens)))
    }

    /// A template of these words, which errors name `path`, with its special tokens by their names, such as
    /// `bos_token`.
    pub fn new(path: PathBuf, text: &str, special_tokens: BTreeMap<String, String>) -> Self {
        let blake3 = blake3::hash(text.as_bytes()).to_hex().to_string();
        let (source, has_generation) = generation::as_calls(text);
        Self { source, text: text.to_owned(), has_generation, path, special_tokens, blake3 }
    }

    /// The template as its file has it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// blake3 of the template, in hexadecimal.
    pub fn blake3(&self) -> &str {
        &self.blake3
    }

    /// Compiles the template.
    pub fn renderer(&self) -> Result<Renderer<'_>> {
        Renderer::new(self)
    }
}

/// The text of a file; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<String>> {
    let bytes = moh_files::read_bounded_if_any(path, MAX_FILE_BYTES, "a file with a template")?;
    Ok(bytes.map(|bytes| moh_files::utf8(path, bytes)).transpose()?)
}

fn default_template(config: &Value) -> Option<&str> {
    match config.get("chat_template")? {
        Value::Array(templates) => {
            templates.iter().find(|template| template["name"] == "default")?.get("template")?
        }
        template => template,
    }
    .as_str()
}

/// The fields such as `bos_token`, each a string or an object with the field `content`.
fn special_tokens(config: &Value) -> BTreeMap<String, String> {
    let fields = config.as_object().into_iter().flatten();
    let token = |(name, value): (&String, &Value)| {
        let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
        name.ends_with("_token").then(|| (name.clone(), text.to_owned()))
    };
    fields.filter_map(token).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::Conversation;

    fn rendered(config: &Value, file: Option<&str>) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(TOKENIZER_CONFIG), config.to_string()).unwrap();
        if let Some(text) = file {
            fs::write(dir.path().join(TEMPLATE_FILE), text).unwrap();
        }
        let template = ChatTemplate::load(dir.path()).map_err(|error| error.to_string())?;
        let renderer = template.renderer().map_err(|error| error.to_string())?;
        let asked = Conversation::of_texts([("system", "s"), ("user", "q")]);
        renderer.render(&asked, true).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_comes_before_the_configuration_and_default_before_other_templates() {
        let named = json!({ "chat_template": [
            { "name": "tool_use", "template": "tools" },
            { "name": "default", "template": "{{ messages | length }}" },
        ] });
        assert_eq!(rendered(&named, None).unwrap(), "2");
        assert_eq!(rendered(&named, Some("file")).unwrap(), "file");
    }

    #[test]
    fn special_tokens_are_strings_or_objects() {
        let config = json!({
            "bos_token": "<s>", "eot_token": { "content": "</s>", "special": true }, "model_max_length": 7,
            "chat_template": "{{ bos_token }}{{ eot_token }}{{ model_max_length }}",
        });
        assert_eq!(rendered(&config, None).unwrap(), "<s></s>");
    }

    #[test]
    fn a_directory_without_a_template_is_named() {
        for config in
            [json!({}), json!({ "chat_template": null }), json!({ "chat_template": 3 }), json!([1])]
        {
            let message = rendered(&config, None).unwrap_err();
            assert!(message.contains("no chat template") && !message.contains('\n'), "{message}");
        }
        let message = rendered(&json!({ "chat_template": "{% for" }), None).unwrap_err();
        assert!(message.contains("tokenizer_config.json: chat template: "), "{message}");
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(TOKENIZER_CONFIG), "{\"chat_template\": \"a").unwrap();
        let message = ChatTemplate::load(dir.path()).unwrap_err().to_string();
        assert!(message.contains("not valid JSON"), "{message}");
    }
}
