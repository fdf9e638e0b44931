//! Chat templates: the Jinja template by which a tokenizer's model expects messages, rendered as
//! transformers' `apply_chat_template` does.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, bail};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, context};
use minijinja_contrib::pycompat;
use serde_json::Value;

/// A template in a file of its own.
const TEMPLATE_FILE: &str = "chat_template.jinja";
/// The tokenizer's settings: its special tokens, and the template if it has no file.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Maximum instructions of a rendering, so that every template ends.
const MAX_INSTRUCTIONS: u64 = 100_000_000;

/// A chat template with the special tokens that it may name.
#[derive(Debug)]
pub struct ChatTemplate {
    source: String,
    path: PathBuf,
    /// `bos_token` and the others by their names.
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Reads the template of the tokenizer in `directory`: `chat_template.jinja`, or else
    /// `chat_template` of `tokenizer_config.json` (a string, or a list of named templates, of which
    /// `default` is used).
    ///
    /// # Errors
    /// Fails if a file cannot be read or there is no template.
    pub fn load(directory: &Path) -> anyhow::Result<Self> {
        let path = directory.join(TOKENIZER_CONFIG);
        let config: Value = match read(&path)? {
            Some(text) => serde_json::from_str(&text)
                .with_context(|| format!("{}: not valid JSON", path.display()))?,
            None => Value::Null,
        };
        let special_tokens = special_tokens(&config);
        let file = directory.join(TEMPLATE_FILE);
        if let Some(source) = read(&file)? {
            return Ok(ChatTemplate { source, path: file, special_tokens });
        }
        match default_template(&config) {
            Some(source) => Ok(ChatTemplate { source, path, special_tokens }),
            None => bail!(
                "{}: the tokenizer has no chat template, neither {TEMPLATE_FILE} nor chat_template in \
                 {TOKENIZER_CONFIG}: leave out --chat",
                directory.display()
            ),
        }
    }

    /// The prompt of a conversation, up to where the model's answer begins. Each message has the role
    /// `system`, `user` or `assistant`.
    ///
    /// # Errors
    /// Fails if the template is invalid or rejects the messages.
    pub fn render(&self, messages: &[Message<'_>]) -> anyhow::Result<String> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment.set_fuel(Some(MAX_INSTRUCTIONS));
        environment.set_unknown_method_callback(pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| {
            Err::<String, _>(minijinja::Error::new(minijinja::ErrorKind::InvalidOperation, message))
        });
        let messages: Vec<_> = messages
            .iter()
            .map(|message| context! { role => message.role, content => message.content })
            .collect();
        let tokens = minijinja::Value::from_pairs(self.special_tokens.clone());
        let variables = context! { messages, add_generation_prompt => true, ..tokens };
        environment
            .render_str(&self.source, variables)
            .map_err(|error| anyhow!("{}: chat template: {error}", self.path.display()))
    }
}

/// A message of a conversation.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    /// `system`, `user` or `assistant`.
    pub role: &'a str,
    /// The text.
    pub content: &'a str,
}

/// The text of a file; `None` if it does not exist.
fn read(path: &Path) -> anyhow::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

fn default_template(config: &Value) -> Option<String> {
    let template = match config.get("chat_template")? {
        Value::Array(templates) => {
            templates.iter().find(|template| template["name"] == "default")?.get("template")?
        }
        template => template,
    };
    Some(template.as_str()?.to_owned())
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
    use serde_json::json;

    use super::*;

    const QUESTION: [Message<'_>; 2] = [
        Message { role: "system", content: "Be brief." },
        Message { role: "user", content: " Why? <b> " },
    ];

    fn directory(config: &Value, file: Option<&str>) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(TOKENIZER_CONFIG), config.to_string()).unwrap();
        if let Some(text) = file {
            fs::write(dir.path().join(TEMPLATE_FILE), text).unwrap();
        }
        dir
    }

    fn rendered(config: &Value, file: Option<&str>) -> Result<String, String> {
        let dir = directory(config, file);
        let template = ChatTemplate::load(dir.path()).map_err(|error| error.to_string())?;
        template.render(&QUESTION).map_err(|error| error.to_string())
    }

    #[test]
    fn blocks_and_python_methods_render_as_in_transformers() {
        // In the form of Llama 3's: a block's line and its newline vanish, special tokens and the methods of
        // strings are known, text is not escaped. The expected text is that of jinja2.
        let template = "{{- bos_token }}\n{% for message in messages %}\n    \
             {%- if message['role'] not in ['system', 'user'] %}\n        \
             {{- raise_exception('role') }}\n    {%- endif %}\n\
             {{ '<|' + message['role'].upper() + '|>\\n' + message.content.strip() + eot_token }}\n\
             {% endfor %}\n{% if add_generation_prompt %}\n{{ '<|assistant|>\\n' }}{% endif %}";
        let config = json!({
            "bos_token": "<s>", "eot_token": { "content": "</s>", "special": true },
            "chat_template": template, "model_max_length": 7,
        });
        let expected = "<s>\n<|SYSTEM|>\nBe brief.</s>\n<|USER|>\nWhy? <b></s>\n<|assistant|>\n";
        assert_eq!(rendered(&config, None).unwrap(), expected);
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
    fn faults_are_one_sentence_that_names_the_file() {
        for (config, expected) in [
            (json!({}), "no chat template"),
            (json!({ "chat_template": null }), "no chat template"),
            (json!({ "chat_template": 3 }), "no chat template"),
            (json!([1]), "no chat template"),
            (json!({ "chat_template": "{% for" }), "tokenizer_config.json: chat template: "),
            (json!({ "chat_template": "{{ raise_exception('only one turn') }}" }), "only one turn"),
            (json!({ "chat_template": "{{ missing.field.deep }}" }), "chat template: "),
        ] {
            let message = rendered(&config, None).unwrap_err();
            assert!(message.contains(expected) && !message.contains('\n'), "{message}");
        }
        let endless = "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}\
             {% endfor %}{% endfor %}{% endfor %}";
        assert!(rendered(&json!({ "chat_template": endless }), None).unwrap_err().contains("fuel"));
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(TOKENIZER_CONFIG), "{\"chat_template\": \"a").unwrap();
        let message = ChatTemplate::load(dir.path()).unwrap_err().to_string();
        assert!(message.contains("not valid JSON"), "{message}");
    }
}
