//! `data.validation`: one table, or a list of named tables.

use std::path::{Path, PathBuf};

use serde::ser::{Error as _, SerializeStruct as _, Serializer};
use serde::{Deserialize, Deserializer, Serialize};

/// The name of a set without a name of its own.
const DEFAULT_NAME: &str = "validation";

/// `[data.validation]`, or one of `[[data.validation]]`: held-out text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValidationSet {
    /// Its name in metrics; default: `validation`.
    #[serde(default = "default_name")]
    pub name: String,
    /// The path without `.bin` and `.idx`.
    pub path: PathBuf,
    /// Micro-batches per evaluation.
    pub batches: usize,
    /// Steps, over all stages, between evaluations. 0, the default, evaluates at the ends of stages
    /// only.
    #[serde(default)]
    pub every_steps: u64,
}

fn default_name() -> String {
    DEFAULT_NAME.to_owned()
}

/// Returns the key of set `set` of `sets` in a recipe.
pub fn key(sets: &[ValidationSet], set: &ValidationSet) -> String {
    match sets {
        [only] if only.name == DEFAULT_NAME => "data.validation".to_owned(),
        _ => format!("data.validation.{}", set.name),
    }
}

/// A table, or a list of them (`node.rs`).
#[derive(Deserialize)]
struct TableOrList(Vec<ValidationSet>);

pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Vec<ValidationSet>, D::Error> {
    TableOrList::deserialize(from).map(|TableOrList(sets)| sets)
}

/// Serializes the sets. A single set without a name of its own is a table, as it is usually written.
pub(super) fn serialize<S: Serializer>(sets: &[ValidationSet], to: S) -> Result<S::Ok, S::Error> {
    match sets {
        [ValidationSet { name, path, batches, every_steps }] if name == DEFAULT_NAME => {
            let path: &Path = path;
            let path = path.to_str().ok_or_else(|| S::Error::custom("a path is not UTF-8"))?;
            let mut table = to.serialize_struct("ValidationSet", 3)?;
            table.serialize_field("path", path)?;
            table.serialize_field("batches", batches)?;
            table.serialize_field("every_steps", every_steps)?;
            table.end()
        }
        sets => sets.serialize(to),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{SMALL_RECIPE, edited, parse, refuses_text, with};

    fn two_sets() -> String {
        let list = "[[data.validation]]\nname = \"text\"\npath = \"data/b\"\nbatches = 4\n\
                    [[data.validation]]\nname = \"code\"\npath = \"data/c\"\nbatches = 2\nevery_steps = 7\n";
        edited("[data.validation]\npath = \"data/b\"\nbatches = 4\n", list)
    }

    #[test]
    fn a_single_validation_table_is_a_set_named_validation() {
        let recipe = with(&["data.validation.every_steps=5"]);
        let set = ValidationSet {
            name: "validation".into(),
            path: "data/b".into(),
            batches: 4,
            every_steps: 5,
        };
        assert_eq!(recipe.data.validation, [set]);
        let text = recipe.to_toml().unwrap();
        assert!(
            text.contains("[data.validation]\n") && !text.contains("name = \"validation\""),
            "{text}"
        );
        assert_eq!(parse(&text, &[]).unwrap(), recipe);
        assert!(parse(SMALL_RECIPE, &["data.validation=[]"]).unwrap().data.validation.is_empty());
    }

    #[test]
    fn validation_sets_are_overridden_by_name_and_read_back() {
        let recipe = parse(&two_sets(), &["data.validation.code.batches=9"]).unwrap();
        let sets: Vec<_> = (recipe.data.validation.iter())
            .map(|set| (set.name.as_str(), set.batches, set.every_steps))
            .collect();
        assert_eq!(sets, [("text", 4, 0), ("code", 9, 7)]);
        assert_eq!(parse(&recipe.to_toml().unwrap(), &[]).unwrap(), recipe);
        // A set may have the name that a single set has by default.
        let renamed = parse(&two_sets(), &["data.validation.code.name=validation"]).unwrap();
        assert_eq!(parse(&renamed.to_toml().unwrap(), &[]).unwrap(), renamed);
    }

    #[test]
    fn faults_of_validation_sets_name_the_set() {
        for (overrides, expected) in [
            (
                &["data.validation.code.batches=0"][..],
                "data.validation.code.batches = 0: must be at least 1",
            ),
            (
                &["data.validation.code.name=text"],
                "data.validation.text.name = \"text\": is the name of an earlier set",
            ),
            (&["data.validation.code.name=a.b"], "= \"a.b\": must be 1 to 64 letters"),
            (&["data.validation.cod.batches=1"], "there is no \"cod\", did you mean code"),
            (
                &["data.validation.code.batch=1"],
                "data.validation.code.batch: unknown key, did you mean data.validation.code.batches",
            ),
            (&["data.validation=3"], "data.validation: must be a table or a list of tables, not 3"),
            (&["data.validation=[3]"], "data.validation.0: must be a table, not 3"),
        ] {
            refuses_text(&two_sets(), overrides, expected);
        }
        let expected = "data.validation.batch: unknown key, did you mean data.validation.batches";
        refuses_text(&edited("batches = 4\n", "batch = 4\n"), &[], expected);
        refuses_text(&edited("batches = 4\n", ""), &[], "data.validation.batches: missing");
    }
}
