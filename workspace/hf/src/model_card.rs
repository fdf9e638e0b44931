//! The model card, which is the `README.md` of a Mixture-of-Head model, or of a dense model that differs from its base.
//! Hugging Face's hub reads its front matter.
//!
//! The source of a card is untrusted: its files are bounded, and only plain values are copied to a card.

use std::path::{Path, PathBuf};

use moh_files::units::group_digits;
use moh_files::{read_bounded, unless_missing};
use moh_kernels::router::SharedHeads;
use moh_model::{ModelConfig, RouterKind};

use crate::Error;
use crate::config_file::architecture;

/// Name of the card in a model directory.
pub const CARD_FILE: &str = "README.md";

/// A longer README or licence is ignored.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Maximum length of a value of the front matter, and of a name.
const MAX_VALUE_CHARS: usize = 200;
/// Prefixes of the names of files with a licence's terms.
const TERMS: [&str; 5] = ["LICENSE", "LICENCE", "NOTICE", "COPYING", "USE_POLICY"];
/// The key of the front matter with the id of the licence.
const LICENCE: &str = "license";
/// The keys that state the licence.
const LICENCE_KEYS: [&str; 3] = [LICENCE, "license_name", "license_link"];
/// The id of a licence that the hub does not list.
const OTHER_LICENCE: &str = "other";

/// The content of a card in addition to the model's configuration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelCard {
    /// The name of the source model. `None` if training started with random weights.
    pub source: Option<String>,
    /// Ids on the hub of the base models. Empty if the source is in a local directory and names no base model.
    pub base_models: Vec<String>,
    /// The keys `license`, `license_name` and `license_link` of the front matter that exist.
    pub licence: Vec<(&'static str, String)>,
    /// Files with the licence's terms, which copies of the model must include.
    pub terms: Vec<PathBuf>,
    /// How the model was made, in paragraphs of Markdown.
    pub made: Vec<String>,
}

impl ModelCard {
    /// Creates the card of a model that is made from the model in the directory `source`. `files` is the directory with
    /// the source's README and licence. A model in the hub's cache is itself the base model. For any other source, the
    /// front matter names the base model.
    pub fn of_source(source: &Path, files: &Path) -> Result<Self, Error> {
        let readme = files.join(CARD_FILE);
        // A README that cannot be read is ignored.
        let readme = match moh_files::is_file(&readme)? {
            true => read_bounded(&readme, MAX_FILE_BYTES, "a README").unwrap_or_default(),
            false => Vec::new(),
        };
        let readme = String::from_utf8_lossy(&readme);
        let stated = |key| values(&readme, key);
        let source = source.canonicalize().unwrap_or_else(|_| source.to_path_buf());
        let name = source.file_name().unwrap_or(source.as_os_str()).to_string_lossy();
        let (name, base_models) = match cached_id(&source) {
            Some(id) => (short(&id).to_owned(), vec![id]),
            None => (plain(&name), stated("base_model")),
        };
        let licence = LICENCE_KEYS.into_iter().filter_map(|key| match &stated(key)[..] {
            [value] => Some((key, value.clone())),
            _ => None,
        });
        Ok(ModelCard {
            source: Some(name),
            base_models: match base_models.iter().all(|id| is_base_model(id)) {
                true => base_models,
                false => Vec::new(),
            },
            licence: licence.collect(),
            terms: terms_of(files)?,
            made: Vec::new(),
        })
    }

    /// Replaces the source's licence by the licence with this id on the hub. The id `other` keeps `license_name` and
    /// `license_link`, which name a licence that the hub does not list.
    pub fn set_license(&mut self, id: &str) {
        self.licence.retain(|(key, _)| id == OTHER_LICENCE && *key != LICENCE);
        self.licence.insert(0, (LICENCE, id.to_owned()));
    }

    /// Returns a README from which [`ModelCard::of_source`] creates this card again, without the source's files.
    pub fn kept_readme(&self) -> String {
        self.front_matter(&[])
    }

    /// Returns the card of a model of this configuration.
    pub fn text(&self, config: &ModelConfig) -> String {
        let name = self.base_models.first().map(|id| short(id)).or(self.source.as_deref());
        let architecture = architecture::name(config.architecture);
        let parameters = group_digits(config.num_parameters());
        let (title, about, loading, tags) = match &config.moh {
            Some(moh) => (
                match name {
                    Some(name) => format!("{name} with Mixture-of-Head attention"),
                    None => "Mixture-of-Head model".to_owned(),
                },
                format!(
                    "A {architecture} with [Mixture-of-Head attention](https://arxiv.org/abs/2410.11842): in each \
                     layer some heads serve all tokens, and {}. {} have the names and shapes of a {architecture}'s; \
                     {parameters} parameters.\n\n{}",
                    selection(moh.router),
                    match moh.router.has_matrices() {
                        true => "But for the router's matrices, the weights",
                        false => "The weights",
                    },
                    heads(config)
                ),
                with_transformers(" 5.5 or later", ", trust_remote_code=True")
                    + &with_code(architecture),
                &["tags:", "- mixture-of-head", "- moh", "- custom_code", "- arxiv:2410.11842"][..],
            ),
            None => (
                match name {
                    Some(name) => format!("{name} as a dense model"),
                    None => "Dense model".to_owned(),
                },
                format!(
                    "A {architecture} in which every head serves every token, made from a Mixture-of-Head model; \
                     {parameters} parameters.\n"
                ),
                with_transformers("", ""),
                &[][..],
            ),
        };
        let library = ["library_name: transformers", "pipeline_tag: text-generation"];
        format!(
            "{}\n# {title}\n\n{about}\n## How it was made\n\n{}\n\n## Load it\n{loading}\n## Licence\n\n{}\n",
            self.front_matter(&[&library[..], tags].concat()),
            [&[self.origin()][..], &self.made].concat().join("\n\n"),
            self.terms_of_use()
        )
    }

    /// Returns the front matter, with the lines `more` at its end.
    fn front_matter(&self, more: &[&str]) -> String {
        let mut lines = vec!["---".to_owned()];
        match &self.base_models[..] {
            [] => {}
            [id] => lines.push(format!("base_model: {id}")),
            several => {
                lines.push("base_model:".to_owned());
                lines.extend(several.iter().map(|id| format!("- {id}")));
            }
        }
        lines.extend(self.licence.iter().map(|(key, value)| format!("{key}: {value}")));
        lines.extend(more.iter().chain(&["---"]).map(|line| (*line).to_owned()));
        lines.join("\n") + "\n"
    }

    /// Describes the source of the model.
    fn origin(&self) -> String {
        let links: Vec<String> = (self.base_models.iter())
            .map(|id| format!("[{id}](https://huggingface.co/{id})"))
            .collect();
        let base = match &links[..] {
            [] => None,
            [link] => Some(format!("The base model is {link}.")),
            links => Some(format!("The base models are {}.", links.join(", "))),
        };
        match (base, &self.source) {
            (None, None) => "The first weights were random.".to_owned(),
            (None, Some(source)) => {
                format!("The base model is `{source}`, a model in a local directory.")
            }
            (Some(base), Some(source)) if self.base_models.iter().all(|id| short(id) != source) => {
                format!("{base} This model was made from `{source}`.")
            }
            (Some(base), _) => base,
        }
    }

    fn terms_of_use(&self) -> String {
        let names = self.terms.iter().filter_map(|path| path.file_name()?.to_str());
        let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
        let stated = self.licence.iter().find(|(key, _)| *key == LICENCE);
        let stated = stated.map(|(_, id)| format!(", which states `{id}`")).unwrap_or_default();
        match names.is_empty() {
            true if stated.is_empty() => "The files of the base model state none.".to_owned(),
            true => format!("That of the base model{stated}."),
            false => format!("That of the base model{stated}: {}.", names.join(", ")),
        }
    }
}

/// Describes the heads that tokens compute in addition to the shared heads, as the end of a sentence.
fn selection(router: RouterKind) -> &'static str {
    match router {
        RouterKind::QueryNorm => {
            "each token selects a few of the others by the norms of its queries"
        }
        RouterKind::Group => {
            "each token selects whole groups of the others, which read one key/value head, by the norms of its queries"
        }
        RouterKind::Static => "the others are never computed",
        RouterKind::Linear => "each token selects a few of the others by a learned router",
        RouterKind::OneStage | RouterKind::TwoStage => {
            "each token selects a few of the others by a learned router, which also weighs the heads"
        }
    }
}

/// Returns a table of the heads. Neighbouring layers with equal counts share a row.
fn heads(config: &ModelConfig) -> String {
    let mut text = "| layers | heads | shared | selected by each token | active |\n\
                    |---|---|---|---|---|\n"
        .to_owned();
    let heads = config.num_attention_heads;
    let mut first = 0;
    for layer in 0..config.num_hidden_layers {
        let counts = config.layer_heads(layer);
        if layer + 1 < config.num_hidden_layers && config.layer_heads(layer + 1) == counts {
            continue;
        }
        let layers = if first == layer { layer.to_string() } else { format!("{first}-{layer}") };
        let (routed, active) = (config.routed_heads(layer), counts.active());
        let selected = match routed {
            0 => "none: dense".to_owned(),
            routed => format!("{} of {routed}", counts.top_k),
        };
        let share = 100.0 * active as f64 / heads as f64;
        text.push_str(&format!(
            "| {layers} | {heads} | {} | {selected} | {active} ({share:.0}%) |\n",
            shared(counts.shared)
        ));
        first = layer + 1;
    }
    text
}

/// Returns a number of shared heads, and the heads themselves if they are not the first heads.
fn shared(heads: SharedHeads) -> String {
    match heads.leading() == heads.len() {
        true => heads.len().to_string(),
        false => {
            let ids: Vec<String> = heads.heads().map(|head| head.to_string()).collect();
            format!("{}: {}", heads.len(), ids.join(", "))
        }
    }
}

/// Describes loading with transformers: its versions, and the arguments after the directory.
fn with_transformers(versions: &str, arguments: &str) -> String {
    format!(
        "\nWith transformers{versions}, from this directory or its id on the hub:\n\n\
         ```python\n\
         from transformers import AutoModelForCausalLM, AutoTokenizer\n\n\
         model = AutoModelForCausalLM.from_pretrained(\".\"{arguments})\n\
         tokenizer = AutoTokenizer.from_pretrained(\".\"{arguments})\n\
         ```\n"
    )
}

/// Describes loading a model with code by other programs.
fn with_code(architecture: &str) -> String {
    format!(
        "\n`trust_remote_code` runs the Python files of this directory. To fine-tune with the balance loss, set\n\
         `model.config.output_router_logits = True`.\n\n\
         The code follows the rules of the transformers backends of vLLM and SGLang, with a tensor-parallel size \
         of 1:\n\n    \
         vllm serve . --trust-remote-code --model-impl transformers\n    \
         python -m sglang.launch_server --model-path . --trust-remote-code --model-impl transformers\n\n\
         With the programs that wrote this model:\n\n    \
         moh-generate --model . --prompt \"One day\"\n\n\
         llama.cpp and mistral.rs have no Mixture-of-Head attention and refuse this model. With \
         `moh-convert --from . --attention dense`\nits weights become a dense {architecture}, which they read and \
         which computes every head for every token: it is another model.\n"
    )
}

/// Returns the values of a key of a README's front matter: a bare or quoted value after the key, or a value on each
/// line `- value` below it. Returns no values if one of them is not plain.
fn values(readme: &str, key: &str) -> Vec<String> {
    let value = |text: &str| {
        let text = text.split(" #").next().unwrap_or_default().trim();
        text.trim_matches(['"', '\'']).to_owned()
    };
    let mut lines = readme.lines().map(str::trim_end);
    if lines.next() != Some("---") {
        return Vec::new();
    }
    let mut lines = lines.take_while(|line| *line != "---");
    let after = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).map(value);
    let found: Vec<String> = match after {
        Some(after) if after.is_empty() => {
            lines.map_while(|line| line.trim_start().strip_prefix("- ").map(value)).collect()
        }
        after => after.into_iter().collect(),
    };
    if found.iter().all(|value| is_plain(value)) { found } else { Vec::new() }
}

/// Returns the hub id of a model in a directory of the hub's cache.
fn cached_id(path: &Path) -> Option<String> {
    let mut parts = path.components().filter_map(|part| part.as_os_str().to_str());
    let id = parts.find_map(|part| part.strip_prefix("models--"))?.replacen("--", "/", 1);
    is_base_model(&id).then_some(id)
}

/// Returns the name of a model within its hub id.
fn short(id: &str) -> &str {
    id.rsplit('/').next().unwrap_or(id)
}

/// Returns whether a file of this name has a licence's terms: `LICENSE`, `LICENSE.txt`, `NOTICE`,
/// `USE_POLICY.md` and similar names.
pub fn is_terms_file(name: &str) -> bool {
    let extension = Path::new(name).extension().and_then(|extension| extension.to_str());
    TERMS.iter().any(|start| name.starts_with(start))
        && matches!(extension, None | Some("txt" | "md"))
}

fn terms_of(directory: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    let entries = unless_missing(directory, std::fs::read_dir(directory))?;
    for entry in entries.into_iter().flatten() {
        let path = entry.map_err(Error::io(directory))?.path();
        let is_terms = path.file_name().and_then(|name| name.to_str()).is_some_and(is_terms_file);
        let is_small = |file: std::fs::Metadata| file.len() <= MAX_FILE_BYTES;
        if is_terms && moh_files::is_file(&path)? && path.metadata().is_ok_and(is_small) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Returns whether `name` has the form of a hub id, `name` or `organisation/name`. It may also be a directory.
pub fn is_hub_id(name: &str) -> bool {
    let is_part = |part: &str| {
        !part.is_empty()
            && part.len() <= 96
            && !part.starts_with(['.', '-'])
            && !part.contains("..")
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    name.split('/').count() <= 2 && name.split('/').all(is_part)
}

/// Returns whether `id` may be the id of a base model in a card.
pub fn is_base_model(id: &str) -> bool {
    is_hub_id(id) && is_plain(id)
}

/// Returns whether `id` may be the id of a licence in a card, such as `apache-2.0` or `llama3`.
pub fn is_license_id(id: &str) -> bool {
    is_plain(id) && !id.contains(['/', ':'])
}

/// Returns whether a value needs no quotes in YAML and no escapes in Markdown.
fn is_plain(value: &str) -> bool {
    value.len() <= MAX_VALUE_CHARS
        && value.starts_with(|c: char| c.is_ascii_alphanumeric())
        && value.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:+".contains(c))
        && !value.ends_with(':')
}

/// Returns a name with `_` in place of the characters that [`is_plain`] rejects.
fn plain(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = name.chars().take(MAX_VALUE_CHARS).map(safe).collect();
    match name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        true => name,
        false => format!("model{name}"),
    }
}

#[cfg(test)]
mod tests;
