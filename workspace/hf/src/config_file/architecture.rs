//! Hugging Face's names of the architectures, dense and with Mixture-of-Head attention, and the
//! configuration fields of a single architecture.

use moh_model::{Architecture, ModelConfig};
use serde_json::{Value, json};

use super::MOH_KEYS;
use super::fields::{Fields, kind};
use crate::Error;

/// An architecture, dense or with Mixture-of-Head attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kind {
    pub architecture: Architecture,
    pub is_moh: bool,
}

impl Kind {
    pub fn new(config: &ModelConfig) -> Self {
        Kind { architecture: config.architecture, is_moh: config.moh.is_some() }
    }

    fn all() -> impl Iterator<Item = Kind> {
        let kinds = |is_moh| {
            Architecture::ALL.into_iter().map(move |architecture| Kind { architecture, is_moh })
        };
        kinds(false).chain(kinds(true))
    }

    /// Returns the value of `model_type`.
    pub fn model_type(self) -> String {
        let moh = if self.is_moh { "moh_" } else { "" };
        format!("{moh}{}", name(self.architecture).to_lowercase())
    }

    /// Returns the prefix of its classes' names.
    fn prefix(self) -> String {
        let moh = if self.is_moh { "Moh" } else { "" };
        format!("{moh}{}", name(self.architecture))
    }

    /// Returns the entry of `architectures`.
    pub fn class(self) -> String {
        format!("{}ForCausalLM", self.prefix())
    }

    /// Returns the value of `auto_map`: the classes with which transformers loads a Mixture-of-Head model, in the
    /// files that [`transformers_code`](crate::transformers_code) writes. Dense models use transformers'
    /// own classes.
    pub fn auto_map(self) -> Option<Value> {
        let (name, file) = (self.prefix(), self.model_type());
        self.is_moh.then(|| {
            json!({
                "AutoConfig": format!("configuration_{file}.{name}Config"),
                "AutoModel": format!("modeling_{file}.{name}Model"),
                "AutoModelForCausalLM": format!("modeling_{file}.{name}ForCausalLM"),
            })
        })
    }

    /// Returns the kind named by `model_type` and `architectures`.
    pub fn read(fields: &Fields<'_>) -> Result<Self, Error> {
        let known = || {
            let names = quoted(Kind::model_type);
            format!("only Llama and Qwen3 models ({names}) are supported")
        };
        let by_type = match fields.text("model_type")? {
            None => None,
            Some(name) => match Kind::all().find(|kind| kind.model_type() == name) {
                None => {
                    let reason = format!(" = \"{}\": {}", name.escape_debug(), known());
                    return fields.error("model_type", reason);
                }
                kind => kind,
            },
        };
        let found = match (by_type, Self::read_class(fields)?) {
            (None, None) => {
                return fields.error("model_type", format!(" is missing: {}", known()));
            }
            (Some(a), Some(b)) if a != b => {
                return fields.error("architectures", " contradicts model_type".to_string());
            }
            (Some(found), _) | (None, Some(found)) => found,
        };
        if !found.is_moh
            && let Some(key) = MOH_KEYS.into_iter().find(|key| fields.get(key).is_some())
        {
            let name = Kind { is_moh: true, ..found }.model_type();
            let reason = format!(": a model with Mixture-of-Head fields has model_type \"{name}\"");
            return fields.error(key, reason);
        }
        Ok(found)
    }

    /// Returns the kind named by the first of `architectures`.
    fn read_class(fields: &Fields<'_>) -> Result<Option<Self>, Error> {
        let first = match fields.get("architectures") {
            None => return Ok(None),
            Some(Value::Array(list)) => list.first(),
            Some(value) => return fields.wrong_type("architectures", value, "a list"),
        };
        let Some(first) = first else { return Ok(None) };
        match Kind::all().find(|kind| *first == kind.class()) {
            None => {
                let names = quoted(Kind::class);
                let reason = format!(" = [{}]: expected one of {names}", kind(first));
                fields.error("architectures", reason)
            }
            found => Ok(found),
        }
    }
}

/// Returns the architecture's name as its classes have it.
pub(crate) fn name(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::Llama => "Llama",
        Architecture::Qwen3 => "Qwen3",
    }
}

/// Returns the names of all kinds, for messages.
fn quoted(name: fn(Kind) -> String) -> String {
    Kind::all().map(|kind| format!("\"{}\"", name(kind))).collect::<Vec<_>>().join(", ")
}

/// Returns the fields that transformers writes only for dense models of this architecture.
pub(super) fn own_fields(config: &ModelConfig) -> Vec<(&'static str, Value)> {
    match config.architecture {
        Architecture::Llama => vec![("mlp_bias", json!(false)), ("pretraining_tp", json!(1))],
        Architecture::Qwen3 => vec![
            ("max_window_layers", json!(config.num_hidden_layers)),
            ("sliding_window", Value::Null),
            ("use_sliding_window", json!(false)),
        ],
    }
}
