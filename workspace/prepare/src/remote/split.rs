//! The name of a split of a dataset on the hub.

use std::str::FromStr;

use moh_hub::RemoteFile;

/// A split of a dataset on the hub, found by the layout of its data files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DatasetSplit {
    /// The dataset, `OWNER/NAME`.
    pub id: String,
    /// A branch, tag or commit; `main` by default.
    pub revision: Option<String>,
    /// Its configuration; by default the one that the dataset declares as such, or its only one.
    pub config: Option<String>,
    /// The split, such as `train`. Without one there is an error, which names those that there are.
    pub split: Option<String>,
}

impl FromStr for DatasetSplit {
    type Err = String;

    /// `OWNER/NAME` or `OWNER/NAME@REVISION`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (id, revision) = match text.split_once('@') {
            Some((id, revision)) => (id, Some(revision)),
            None => (text, None),
        };
        let has_parts = id.split_once('/').is_some_and(|(owner, name)| {
            !owner.is_empty() && !name.is_empty() && !name.contains('/')
        });
        if !has_parts || id.contains(':') || revision == Some("") {
            return Err("expected OWNER/NAME or OWNER/NAME@REVISION, as in allenai/c4".to_owned());
        }
        let revision = revision.map(str::to_owned);
        Ok(Self { id: id.to_owned(), revision, ..Self::default() })
    }
}

/// Files of each split, in the order in which messages name them.
pub(crate) type Splits = Vec<(String, Vec<RemoteFile>)>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revision_may_follow_the_id() {
        let split: DatasetSplit = "org/name@refs/convert/parquet".parse().unwrap();
        assert_eq!(
            (split.id.as_str(), split.revision.as_deref()),
            ("org/name", Some("refs/convert/parquet"))
        );
        assert_eq!("org/name".parse::<DatasetSplit>().unwrap().revision, None);
        for text in ["name", "", "/name", "a/b/c", "hf://datasets/a/b", "a/b@", "-1"] {
            assert!(text.parse::<DatasetSplit>().unwrap_err().contains("OWNER/NAME"), "{text}");
        }
    }
}
