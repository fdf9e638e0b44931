//! The chat template of a tokenizer, and the files that it is read from.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use moh_files::{GIT_LFS, IS_POINTER, json_fault, parent, unusable};
use serde_json::Value;

use crate::reads::Reads;
use crate::{Renderer, Result, TextTokenizer, generation};

const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The directory of further templates, each `NAME.jinja`.
const NAMED_TEMPLATES: &str = "additional_chat_templates";
/// The names of the template of conversations with tools, and of the template of all others.
const FOR_TOOLS: &str = "tool_use";
const DEFAULT: &str = "default";
/// The tokenizer's settings, with the templates if they have no files.
pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const MAX_FILE_BYTES: u64 = 64 << 20;

/// A chat template with the special tokens that it may name, and optionally another template for conversations with
/// tools.
#[derive(Debug)]
pub struct ChatTemplate {
    pub(crate) default: Source,
    pub(crate) for_tools: Option<Source>,
    /// Special tokens by name, such as `bos_token`.
    pub(crate) special_tokens: BTreeMap<String, String>,
    blake3: String,
}

#[derive(Debug)]
pub(crate) struct Source {
    /// The text with calls in the place of blocks `generation`.
    pub(crate) calls: String,
    text: String,
    pub(crate) has_generation: bool,
    pub(crate) path: PathBuf,
    /// The words of the text, with all keys of messages that it names.
    pub(crate) names: BTreeSet<String>,
    /// The form in which the template reads messages, found on first use.
    pub(crate) reads: OnceLock<Reads>,
}

impl Source {
    fn new(path: PathBuf, text: &str) -> Self {
        // As Jinja does. The hash is computed from the file's bytes.
        let lines = text.replace("\r\n", "\n").replace('\r', "\n");
        let (calls, has_generation) = generation::as_calls(&lines);
        let words = text.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
        let names = words.map(str::to_owned).collect();
        let (text, reads) = (text.to_owned(), OnceLock::new());
        Self { calls, text, has_generation, path, names, reads }
    }
}

impl ChatTemplate {
    /// Reads the templates beside a tokenizer, as transformers does: `chat_template.jinja` and the files in
    /// `additional_chat_templates`. Without files, reads `chat_template` of `tokenizer_config.json`, a text or
    /// templates by name. The template `tool_use`, if any, renders conversations with tools. The template `default`
    /// renders all others.
    pub fn load(tokenizer: &TextTokenizer) -> Result<Self> {
        Self::find(tokenizer)?.ok_or_else(|| {
            let reason = format!(
                "the tokenizer has no chat template, neither {TEMPLATE_FILE} nor chat_template in \
                 {TOKENIZER_CONFIG}, or none with the name {DEFAULT}: leave out --chat"
            );
            unusable(parent(tokenizer.path()), reason).into()
        })
    }

    /// Reads the templates as [`ChatTemplate::load`]. Returns `None` without a template for conversations without
    /// tools.
    pub fn find(tokenizer: &TextTokenizer) -> Result<Option<Self>> {
        let directory = parent(tokenizer.path());
        let config = settings(directory)?;
        let additional = directory.join(NAMED_TEMPLATES);
        let mut texts = [None, None];
        for (found, name) in texts.iter_mut().zip([DEFAULT, FOR_TOOLS]) {
            let mut file = additional.join(format!("{name}.jinja"));
            if name == DEFAULT && !file.exists() {
                file = directory.join(TEMPLATE_FILE);
            }
            *found = read(&file)?.map(|text| Source::new(file, &text));
        }
        let has_files = texts.iter().any(Option::is_some) || has_templates(&additional);
        if !has_files {
            texts = [DEFAULT, FOR_TOOLS].map(|name| {
                let text = named(&config["chat_template"], name)?;
                Some(Source::new(directory.join(TOKENIZER_CONFIG), text))
            });
        }
        let [default, for_tools] = texts;
        let tokens = tokenizer.special_tokens();
        Ok(default.map(|default| Self::of(default, for_tools, tokens.clone())))
    }

    /// Creates a template of this text, with its special tokens by name, such as `bos_token`. Errors name the template
    /// `path`.
    pub fn new(path: PathBuf, text: &str, special_tokens: BTreeMap<String, String>) -> Self {
        Self::of(Source::new(path, text), None, special_tokens)
    }

    fn of(
        default: Source,
        for_tools: Option<Source>,
        special_tokens: BTreeMap<String, String>,
    ) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(default.text.as_bytes());
        if let Some(other) = &for_tools {
            // No template has this byte.
            hasher.update(&[0xff]).update(other.text.as_bytes());
        }
        let blake3 = hasher.finalize().to_hex().to_string();
        Self { default, for_tools, special_tokens, blake3 }
    }

    /// Returns the text of the template of conversations without tools, as in its file.
    pub fn text(&self) -> &str {
        &self.default.text
    }

    /// Returns the template's blake3, in hexadecimal. With a template for tools, hashes both with the byte 255 in
    /// between.
    pub fn blake3(&self) -> &str {
        &self.blake3
    }

    /// Compiles the template.
    pub fn renderer(&self) -> Result<Renderer<'_>> {
        Renderer::new(self)
    }
}

/// Reads the settings of a tokenizer; null without a file of settings.
pub(crate) fn settings(directory: &Path) -> Result<Value> {
    let path = directory.join(TOKENIZER_CONFIG);
    let text = read(&path)?.unwrap_or_else(|| "null".to_owned());
    let fault = |error| unusable(&path, json_fault(&error, text.as_bytes()));
    Ok(serde_json::from_str(&text).map_err(fault)?)
}

/// Reads the text of a file. Returns `None` if the file does not exist.
fn read(path: &Path) -> Result<Option<String>> {
    let bytes = moh_files::read_bounded_if_any(path, MAX_FILE_BYTES, "a file with a template")?;
    if bytes.as_ref().is_some_and(|bytes| bytes.starts_with(GIT_LFS)) {
        return Err(unusable(path, IS_POINTER).into());
    }
    Ok(bytes.map(|bytes| moh_files::utf8(path, bytes)).transpose()?)
}

/// Returns whether a directory has templates, so that the templates of the settings do not count.
fn has_templates(directory: &Path) -> bool {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| entry.path().extension().is_some_and(|end| end == "jinja"))
}

/// Returns the template of this name. A text is the default template.
fn named<'c>(templates: &'c Value, name: &str) -> Option<&'c str> {
    match templates {
        Value::String(text) => (name == DEFAULT).then_some(text.as_str()),
        // If a name occurs twice, the last template counts.
        Value::Array(list) => {
            list.iter().rfind(|template| template["name"] == name)?["template"].as_str()
        }
        templates => templates[name].as_str(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use moh_testkit::small_tokenizer::{WORDS, write_tokenizer};
    use serde_json::json;

    use super::*;
    use crate::Conversation;

    fn load(directory: &Path) -> Result<ChatTemplate> {
        ChatTemplate::load(&TextTokenizer::load(directory)?)
    }

    fn rendered(config: &Value, file: Option<&str>) -> Result<String, String> {
        rendered_in(config, file, &[], &Value::Null)
    }

    /// Renders with templates in their own files, for a conversation with these tools.
    fn rendered_in(
        config: &Value,
        file: Option<&str>,
        named: &[[&str; 2]],
        tools: &Value,
    ) -> Result<String, String> {
        let dir = tempfile::tempdir().unwrap();
        write_tokenizer(dir.path(), &WORDS);
        fs::remove_file(dir.path().join("special_tokens_map.json")).unwrap();
        fs::write(dir.path().join(TOKENIZER_CONFIG), config.to_string()).unwrap();
        if let Some(text) = file {
            fs::write(dir.path().join(TEMPLATE_FILE), text).unwrap();
        }
        fs::create_dir(dir.path().join(NAMED_TEMPLATES)).unwrap();
        for [name, text] in named {
            fs::write(dir.path().join(NAMED_TEMPLATES).join(name), text).unwrap();
        }
        let template = load(dir.path()).map_err(|error| error.to_string())?;
        let renderer = template.renderer().map_err(|error| error.to_string())?;
        let asked =
            json!([{ "role": "system", "content": "s" }, { "role": "user", "content": "q" }]);
        let asked = Conversation::from_json(asked, tools.clone()).unwrap();
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
        let (tools, files) = (json!([{ "name": "f" }]), [["tool_use.jinja", "of a file"]]);
        let by_name = json!({ "chat_template": { "default": "d", "tool_use": "t" } });
        for (config, file, files, expected) in [
            (&named, None, &[][..], "tools"),
            (&by_name, None, &[], "t"),
            (&json!({ "chat_template": "one" }), None, &[], "one"),
            (&named, Some("file"), &files, "of a file"),
            (&named, Some("file"), &[["default.jinja", "other"]], "other"),
        ] {
            assert_eq!(rendered_in(config, file, files, &tools).unwrap(), expected);
        }
        // Files count, whatever the settings have.
        assert!(
            rendered_in(&named, None, &files, &tools).unwrap_err().contains("no chat template")
        );
        let of = |for_tools: Option<&str>| {
            let other = for_tools.map(|text| Source::new(PathBuf::new(), text));
            ChatTemplate::of(Source::new(PathBuf::new(), "d"), other, BTreeMap::new()).blake3
        };
        assert_eq!(of(None), blake3::hash(b"d").to_hex().to_string());
        assert_ne!(of(None), of(Some("")));
    }

    #[test]
    fn special_tokens_are_strings_or_objects() {
        let mut config = json!({
            "bos_token": "<s>", "eot_token": { "content": "</s>", "__type": "AddedToken" }, "model_max_length": 7,
            "chat_template": "{{ bos_token }}{{ eot_token }}{{ model_max_length }}",
        });
        assert_eq!(rendered(&config, None).unwrap(), "<s></s>");
        // Older tokenizers have special tokens in another file.
        let dir = tempfile::tempdir().unwrap();
        write_tokenizer(dir.path(), &WORDS);
        let map = dir.path().join("special_tokens_map.json");
        fs::write(map, r#"{"bos_token": {"content": "<b>"}}"#).unwrap();
        let mut bos_token = |decoder| {
            config["added_tokens_decoder"] = decoder;
            let fields = config.as_object_mut().unwrap();
            fields.retain(|_, value| !value.is_null());
            fs::write(dir.path().join(TOKENIZER_CONFIG), config.to_string()).unwrap();
            load(dir.path()).unwrap().special_tokens["bos_token"].clone()
        };
        assert_eq!([bos_token(Value::Null), bos_token(json!({}))], ["<b>", "<s>"]);
    }

    #[test]
    fn a_directory_without_a_template_is_named() {
        for config in [json!({}), json!({ "chat_template": null }), json!({ "chat_template": 3 })] {
            let message = rendered(&config, None).unwrap_err();
            assert!(message.contains("no chat template") && !message.contains('\n'), "{message}");
        }
        let message = rendered(&json!({ "chat_template": "{% for" }), None).unwrap_err();
        assert!(message.contains("tokenizer_config.json: chat template: "), "{message}");
        let pointer = "version https://git-lfs.github.com/spec/v1\n";
        assert!(rendered(&json!({}), Some(pointer)).unwrap_err().ends_with(IS_POINTER));
    }
}
