//! The record of the token that ends each document of a token file, in `PREFIX.json`.

use serde::{Deserialize, Serialize};

/// The token that ends each document of a token file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Option<String>", into = "Option<String>")]
pub enum DocumentEnd {
    /// Not recorded, as in files of other programs.
    #[default]
    Unknown,
    /// No token ends the documents.
    Nothing,
    /// This token.
    Token(String),
}

impl DocumentEnd {
    pub(crate) fn is_unknown(&self) -> bool {
        *self == DocumentEnd::Unknown
    }
}

impl From<Option<String>> for DocumentEnd {
    fn from(token: Option<String>) -> Self {
        token.map_or(DocumentEnd::Nothing, DocumentEnd::Token)
    }
}

impl From<DocumentEnd> for Option<String> {
    fn from(end: DocumentEnd) -> Self {
        match end {
            DocumentEnd::Token(token) => Some(token),
            DocumentEnd::Nothing | DocumentEnd::Unknown => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_a_string_or_null() {
        for (end, text) in
            [(DocumentEnd::Token("</s>".to_owned()), "\"</s>\""), (DocumentEnd::Nothing, "null")]
        {
            assert_eq!(serde_json::to_string(&end).unwrap(), text);
            assert_eq!(serde_json::from_str::<DocumentEnd>(text).unwrap(), end);
        }
    }
}
