//! The model card of a Mixture-of-Head model, or of a dense one that is another model than its base: its `README.md`, whose
//! front matter Hugging Face's hub reads.
//!
//! The last line of a card names the base model, and has the hash of the code beside it and the
//! hash of everything before. So a card that nobody has changed is known as one: the next model
//! takes over what it says, and it may be replaced.

use moh_kernels::router::SharedHeads;
use moh_model::{Architecture, ModelConfig, RouterKind};

use crate::config_file::model_type;
use crate::origin::is_plain_name;
use crate::{Base, Origin, transformers_code};

/// Name of the card in a model directory.
pub const CARD_FILE: &str = "README.md";

const MARK: &str = "<!-- moh-model-card ";
const MARK_END: &str = " -->\n";
const MADE: &str = "\n## How it was made\n\n";
const NEXT: &str = "\n## Load it\n";
const LICENCE: &str = "\n## Licence\n\n";
/// In place of the code's hash: no code belongs to the card.
const NO_CODE: &str = "-";

/// The card of a model of this configuration.
pub fn text(origin: &Origin, config: &ModelConfig) -> String {
    let mut card = front_matter(origin, config.moh.is_some());
    card.push_str(&format!("\n# {}\n\n", title(origin, config)));
    card.push_str(&match &config.moh {
        Some(moh) => heads(config, moh.router),
        None => dense(config),
    });
    card.push_str(MADE);
    card.push_str(&made(origin));
    card.push_str(NEXT);
    card.push_str(&loading(config));
    card.push_str(&licence(origin));
    signed(card, &origin.bases, &transformers_code::hash(model_type(config)))
}

/// The card that a run keeps of the model it starts from: what [`Origin::read`] takes from
/// a card, without a configuration.
pub fn of_origin(origin: &Origin) -> String {
    let front_matter = front_matter(origin, true);
    let card = format!("{front_matter}{MADE}{}{NEXT}{}", made(origin), licence(origin));
    signed(card, &origin.bases, NO_CODE)
}

/// An unchanged card.
#[derive(Debug, PartialEq)]
pub(crate) struct Card {
    /// The base models.
    pub bases: Vec<Base>,
    /// The paragraphs of how the model was made.
    pub made: Vec<String>,
    /// The hash of the code beside it; see [`transformers_code::hash`].
    pub code: String,
    licence: String,
}

impl Card {
    /// Reads a card; `None` if the text is none, or was changed.
    pub fn parse(text: &str) -> Option<Self> {
        let (card, mark) = text.rsplit_once(MARK)?;
        let (signed, hash) = mark.strip_suffix(MARK_END)?.rsplit_once(' ')?;
        if hash != self::hash(card, signed) {
            return None;
        }
        let (bases, code) = signed.rsplit_once(' ')?;
        let base = |base: &str| match base.split_once('=')? {
            (kind @ ("hub" | "local"), name) if is_plain_name(name) => {
                Some(Base { name: name.to_owned(), is_hub_id: kind == "hub" })
            }
            _ => None,
        };
        let bases = match bases {
            "none=" => Vec::new(),
            bases => bases.split(',').map(base).collect::<Option<_>>()?,
        };
        let made = card.split_once(MADE)?.1.split_once(NEXT)?.0;
        // The first paragraph names the base model.
        let made =
            made.split("\n\n").skip(1).map(|paragraph| paragraph.trim_end().to_owned()).collect();
        let licence = card.rsplit_once(LICENCE)?.1.to_owned();
        Some(Card { bases, made, code: code.to_owned(), licence })
    }

    /// Whether the card names this file of the licence's terms.
    pub fn has_terms(&self, name: &str) -> bool {
        self.licence.contains(&format!("`{name}`"))
    }
}

/// Whether a text is a card, changed or not.
pub(crate) fn was_card(text: &str) -> bool {
    text.contains(MARK)
}

fn signed(card: String, bases: &[Base], code: &str) -> String {
    let kind = |base: &Base| if base.is_hub_id { "hub" } else { "local" };
    let bases: Vec<_> = bases.iter().map(|base| format!("{}={}", kind(base), base.name)).collect();
    let bases = if bases.is_empty() { "none=".to_owned() } else { bases.join(",") };
    let signed = format!("{bases} {code}");
    let hash = hash(&card, &signed);
    format!("{card}{MARK}{signed} {hash}{MARK_END}")
}

/// The hash of a card and of its last line's content.
fn hash(card: &str, signed: &str) -> String {
    blake3::hash(format!("{card}{MARK}{signed}").as_bytes()).to_hex().to_string()
}

fn front_matter(origin: &Origin, is_moh: bool) -> String {
    let mut lines = vec!["---".to_owned()];
    let on_hub: Vec<&Base> = origin.bases.iter().filter(|base| base.is_hub_id).collect();
    match on_hub.as_slice() {
        [] => {}
        [Base { name, .. }] => lines.push(format!("base_model: {name}")),
        several => {
            lines.push("base_model:".to_owned());
            lines.extend(several.iter().map(|base| format!("- {}", base.name)));
        }
    }
    lines.extend(origin.licence.iter().map(|(key, value)| format!("{key}: {value}")));
    let tags: &[&str] = match is_moh {
        true => &["tags:", "- mixture-of-head", "- moh", "- custom_code", "- arxiv:2410.11842"],
        false => &[],
    };
    let library = ["library_name: transformers", "pipeline_tag: text-generation"];
    let rest = library.iter().chain(tags).chain(&["---"]);
    lines.extend(rest.copied().map(str::to_owned));
    lines.join("\n") + "\n"
}

fn title(origin: &Origin, config: &ModelConfig) -> String {
    let base = origin.bases.first().map(|base| base.name.rsplit('/').next().unwrap_or(&base.name));
    match (base, &config.moh) {
        (Some(name), Some(_)) => format!("{name} with Mixture-of-Head attention"),
        (None, Some(_)) => "Mixture-of-Head model".to_owned(),
        (Some(name), None) => format!("{name} as a dense model"),
        (None, None) => "Dense model".to_owned(),
    }
}

fn architecture(config: &ModelConfig) -> &'static str {
    match config.architecture {
        Architecture::Llama => "Llama",
        Architecture::Qwen3 => "Qwen3",
    }
}

/// What a dense model is.
fn dense(config: &ModelConfig) -> String {
    format!(
        "A {} in which every head serves every token, made from a Mixture-of-Head model; {} parameters.\n",
        architecture(config),
        group_digits(config.num_parameters())
    )
}

/// What tokens compute beside the shared heads, the end of a sentence.
fn selection(router: RouterKind) -> &'static str {
    match router {
        RouterKind::QueryNorm => {
            "each token selects a few of the others by the norms of its queries"
        }
        RouterKind::Group => {
            "each token selects whole groups of the others, which read one key/value head, by the norms of its queries"
        }
        RouterKind::WithinGroup => {
            "each token selects a few of the others by the norms of its queries, as many of each group that reads one \
             key/value head"
        }
        RouterKind::Static => "the others are never computed",
        RouterKind::Linear => "each token selects a few of the others by a learned router",
        RouterKind::OneStage | RouterKind::TwoStage => {
            "each token selects a few of the others by a learned router, which also weighs the heads"
        }
    }
}

/// What the model is, and a table of its heads: a row for neighbouring layers with the same counts.
fn heads(config: &ModelConfig, router: RouterKind) -> String {
    let architecture = architecture(config);
    let matrices = match router.has_matrices() {
        true => "But for the router's matrices, the weights",
        false => "The weights",
    };
    let mut text = format!(
        "A {architecture} with [Mixture-of-Head attention](https://arxiv.org/abs/2410.11842): in each layer some \
         heads serve all tokens, and {}. {matrices} have the names and shapes of a {architecture}'s; {} parameters.\n\n\
         | layers | heads | shared | selected by each token | active |\n|---|---|---|---|---|\n",
        selection(router),
        group_digits(config.num_parameters())
    );
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

/// A number of shared heads, with the heads themselves if they are not the first ones.
fn shared(heads: SharedHeads) -> String {
    match heads.leading() == heads.len() {
        true => heads.len().to_string(),
        false => {
            let ids: Vec<String> = heads.heads().map(|head| head.to_string()).collect();
            format!("{}: {}", heads.len(), ids.join(", "))
        }
    }
}

fn made(origin: &Origin) -> String {
    let link = |Base { name, .. }: &Base| format!("[{name}](https://huggingface.co/{name})");
    let base = match origin.bases.as_slice() {
        [] => "The first weights were random.".to_owned(),
        [base] if base.is_hub_id => format!("The base model is {}.", link(base)),
        [Base { name, .. }] => {
            format!("The base model is `{name}`, a model in a local directory.")
        }
        several => {
            let names: Vec<String> = several.iter().map(link).collect();
            format!("The base models are {}.", names.join(", "))
        }
    };
    let paragraphs: Vec<&str> =
        std::iter::once(base.as_str()).chain(origin.made.iter().map(String::as_str)).collect();
    paragraphs.join("\n\n") + "\n"
}

/// How transformers loads the model: the versions that do, and the arguments after the directory.
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

fn loading(config: &ModelConfig) -> String {
    if config.moh.is_none() {
        return with_transformers("", "");
    }
    let dense = architecture(config);
    with_transformers(" 5.5 or later", ", trust_remote_code=True")
        + &format!(
            "\n`trust_remote_code` runs the Python files of this directory. To fine-tune with the balance loss, set\n\
         `model.config.output_router_logits = True`.\n\n\
         The code follows the rules of the transformers backends of vLLM and SGLang, with a tensor-parallel size \
         of 1:\n\n    \
         vllm serve . --trust-remote-code --model-impl transformers\n    \
         python -m sglang.launch_server --model-path . --trust-remote-code --model-impl transformers\n\n\
         With the programs that wrote this model:\n\n    \
         moh-generate --model . --prompt \"One day\"\n\n\
         llama.cpp and mistral.rs have no Mixture-of-Head attention and refuse this model. With \
         `moh-convert --from . --attention dense`\nits weights become a dense {dense}, which they read and which \
         computes every head for every token: it is another model.\n"
        )
}

fn licence(origin: &Origin) -> String {
    let names: Vec<_> = origin
        .terms
        .iter()
        .filter_map(|path| Some(format!("`{}`", path.file_name()?.to_str()?)))
        .collect();
    let stated = origin.licence.iter().find(|(key, _)| *key == "license").map(|(_, value)| value);
    let text = match (stated, names.as_slice()) {
        (Some(licence), []) => format!("That of the base model, which states `{licence}`."),
        (Some(licence), names) => {
            format!("That of the base model, which states `{licence}`: {}.", names.join(", "))
        }
        (None, []) => "The files of the base model state none.".to_owned(),
        (None, names) => format!("That of the base model: {}.", names.join(", ")),
    };
    format!("{LICENCE}{text}\n\n")
}

/// A number with commas between thousands.
pub fn group_digits(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ConfigFile;
    use std::path::{Path, PathBuf};

    fn config() -> ModelConfig {
        let fields = serde_json::json!({
            "model_type": "moh_qwen3", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 2,
            "moh_router": "query-norm", "moh_shared_heads": [4, 2, 2, 1],
            "moh_routed_top_k": [0, 1, 1, 3],
        });
        ConfigFile::from_value(fields, Path::new("config.json")).unwrap().config
    }

    fn origin() -> Origin {
        Origin {
            bases: vec![Base { name: "org/Model-8B".into(), is_hub_id: true }],
            licence: vec![("license", "other".into()), ("license_name", "llama3".into())],
            terms: vec![PathBuf::from("m/LICENSE"), PathBuf::from("m/USE_POLICY.md")],
            made: vec!["`moh-train` did:".into(), "| a |\n|---|\n| b |".into()],
        }
    }

    #[test]
    fn a_card_begins_with_what_the_hub_reads() {
        let card = text(&origin(), &config());
        let expected = "---\nbase_model: org/Model-8B\nlicense: other\nlicense_name: llama3\n\
                        library_name: transformers\npipeline_tag: text-generation\ntags:\n\
                        - mixture-of-head\n- moh\n- custom_code\n- arxiv:2410.11842\n---\n\n\
                        # Model-8B with Mixture-of-Head attention\n";
        assert!(card.starts_with(expected), "{card}");
        assert_eq!(card, text(&origin(), &config()));
        // A local directory is no id on the hub.
        let bases = vec![Base { name: "mine".into(), is_hub_id: false }];
        let card = text(&Origin { bases, ..Origin::default() }, &config());
        assert!(card.starts_with("---\nlibrary_name:") && card.contains("`mine`"), "{card}");
        let card = text(&Origin::default(), &config());
        assert!(
            card.contains("# Mixture-of-Head model\n") && card.contains("were random"),
            "{card}"
        );
    }

    #[test]
    fn a_card_has_the_heads_of_each_layer_and_the_terms() {
        let card = text(&origin(), &config());
        assert!(card.contains("by the norms of its queries. The weights have"), "{card}");
        for line in [
            "| 0 | 4 | 4 | none: dense | 4 (100%) |",
            "| 1-2 | 4 | 2 | 1 of 2 | 3 (75%) |",
            "| 3 | 4 | 1 | 3 of 3 | 4 (100%) |",
            "That of the base model, which states `other`: `LICENSE`, `USE_POLICY.md`.",
        ] {
            assert!(card.contains(&format!("\n{line}\n")), "{line}\n{card}");
        }
        assert!(card.is_ascii());
    }

    #[test]
    fn a_card_says_how_tokens_get_their_heads() {
        let of = |router: RouterKind| {
            let mut config = config();
            config.moh.as_mut().unwrap().router = router;
            text(&origin(), &config)
        };
        for (router, expected) in [
            (RouterKind::Group, "selects whole groups of the others"),
            (
                RouterKind::WithinGroup,
                "as many of each group that reads one key/value head. The weights",
            ),
            (RouterKind::Static, "the others are never computed. The weights have"),
            (RouterKind::Linear, "by a learned router. But for the router's matrices, the weights"),
            (
                RouterKind::TwoStage,
                "a learned router, which also weighs the heads. But for the router",
            ),
        ] {
            let card = of(router);
            assert!(card.contains(expected), "{card}");
            assert!(router.has_matrices() || !card.contains("matrices"), "{card}");
        }
    }

    #[test]
    fn a_dense_model_has_a_card_without_code() {
        let card = text(&origin(), &ModelConfig { moh: None, ..config() });
        assert!(
            card.contains("# Model-8B as a dense model\n\nA Qwen3 in which every head"),
            "{card}"
        );
        assert!(!card.contains("custom_code") && !card.contains("trust_remote_code"), "{card}");
        assert_eq!(Card::parse(&card).unwrap().made, origin().made);
    }

    #[test]
    fn the_next_model_takes_over_what_a_card_says() {
        let base = |name: &str, is_hub_id| Base { name: name.to_owned(), is_hub_id };
        let merged = vec![base("a/b", true), base("c/d", true)];
        for bases in [Vec::new(), vec![base("a/b", true)], vec![base("a_b", false)], merged] {
            let origin = Origin { bases, ..origin() };
            for card in [text(&origin, &config()), of_origin(&origin)] {
                let read = Card::parse(&card).unwrap();
                assert_eq!((&read.bases, &read.made), (&origin.bases, &origin.made), "{card}");
                assert!(read.has_terms("LICENSE") && !read.has_terms("NOTICE"));
            }
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(CARD_FILE), text(&origin(), &config())).unwrap();
        let read = Origin::read(Some("x/y"), dir.path()).unwrap();
        assert_eq!(read, Origin { terms: Vec::new(), ..origin() });
    }

    #[test]
    fn a_card_that_was_changed_is_none() {
        let is_unchanged = |text: &str| Card::parse(text).is_some();
        let card = text(&origin(), &config());
        assert!(is_unchanged(&card));
        for end in 0..card.len() {
            assert!(!is_unchanged(&card[..end]), "{end}");
        }
        for changed in [format!("{card} "), card.replacen('a', "b", 1), format!("x{card}")] {
            assert!(!is_unchanged(&changed));
        }
        for other in
            ["", MARK, MARK_END, "<!-- moh-model-card  -->\n", "<!-- moh-model-card a b -->\n"]
        {
            assert!(!is_unchanged(other), "{other}");
        }
        // With a hash that fits, but nothing else, or with a name that fits no card.
        assert!(!is_unchanged(&signed(String::new(), &[], NO_CODE)));
        for name in ["a/b\nlicense:\tmit", "a b", "", "-->"] {
            let bases = vec![Base { name: name.to_owned(), is_hub_id: true }];
            assert!(!is_unchanged(&text(&Origin { bases, ..origin() }, &config())), "{name}");
        }
        assert!(!is_unchanged(&card.replacen("hub=org/Model-8B", "hub=org/Model-9B", 1)));
    }

    #[test]
    fn thousands_are_grouped() {
        assert_eq!(
            [0, 999, 1_000, 1_234_567].map(group_digits),
            ["0", "999", "1,000", "1,234,567"]
        );
    }
}
