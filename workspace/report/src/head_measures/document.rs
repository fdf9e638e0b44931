//! The document that `moh-eval heads --json` writes: a report of texts, a sentence, or both. Reading checks that its
//! parts fit one another.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{LayerReport, SentenceLayer, TextReport};
use crate::head_measures::Error;

const MAX_BYTES: u64 = 256 << 20;

/// Measures of a model's heads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HeadDocument {
    /// The model's name.
    pub model: String,
    /// Tokens per window of the texts.
    pub sequence_length: usize,
    /// The texts, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub texts: Vec<TextReport>,
    /// The layers on these texts, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerReport>,
    /// The sentence, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sentence: Option<Sentence>,
}

/// A sentence and the heads of its tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sentence {
    /// Its tokens, in order.
    pub tokens: Vec<SentenceToken>,
    /// The layers, in order.
    pub layers: Vec<SentenceLayer>,
}

/// A token of a sentence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentenceToken {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub text: String,
}

impl HeadDocument {
    /// Reads the file `path`.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is not such a document, or has parts that do not fit one another.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let unusable = |fault: String| {
            let reason = format!("{fault}: give what `moh-eval heads --json` has written");
            moh_files::unusable(path, reason)
        };
        let bytes = moh_files::read_bounded(path, MAX_BYTES, "a document of heads")?;
        let document: Self =
            serde_json::from_slice(&bytes).map_err(|error| unusable(error.to_string()))?;
        document.check().map_err(unusable)?;
        Ok(document)
    }

    fn check(&self) -> Result<(), String> {
        if self.layers.is_empty() && self.sentence.is_none() {
            return Err("it has neither `layers` nor a `sentence`".into());
        }
        for (index, layer) in self.layers.iter().enumerate() {
            self.check_layer(index, layer).map_err(|fault| format!("layers[{index}]: {fault}"))?;
        }
        let Some(Sentence { tokens, layers }) = &self.sentence else { return Ok(()) };
        for (index, layer) in layers.iter().enumerate() {
            check_sentence(tokens.len(), layer)
                .map_err(|fault| format!("sentence.layers[{index}]: {fault}"))?;
        }
        match tokens.is_empty() || layers.is_empty() {
            true => Err("sentence: it has no tokens or no layers".into()),
            false => Ok(()),
        }
    }

    fn check_layer(&self, index: usize, layer: &LayerReport) -> Result<(), String> {
        let (texts, heads) = (self.texts.len(), layer.heads.len());
        expect("layer", layer.layer, index)?;
        if heads == 0 || texts == 0 {
            return Err("it has no heads or no texts".into());
        }
        if let Some(entropies) = &layer.gate_entropy {
            expect("values of gate_entropy", entropies.len(), texts)?;
        }
        for (index, head) in layer.heads.iter().enumerate() {
            expect("head", head.head, index)?;
            expect("loads of a head", head.load.len(), texts)?;
        }
        for table in [&layer.pattern_similarities, &layer.output_similarities] {
            expect("rows of similarities", table.len(), heads)?;
            table.iter().try_for_each(|row| expect("similarities of a row", row.len(), heads))?;
        }
        Ok(())
    }
}

fn check_sentence(tokens: usize, layer: &SentenceLayer) -> Result<(), String> {
    let heads = layer.maps.len();
    expect("lists of active heads", layer.active.len(), tokens)?;
    let named = layer.shared_heads.iter().chain(layer.active.iter().flatten());
    if let Some(head) = named.copied().find(|&head| head >= heads) {
        return Err(format!("head {head} of {heads}"));
    }
    for map in &layer.maps {
        expect("rows of a map", map.len(), tokens)?;
        let mut rows = map.iter().enumerate();
        rows.try_for_each(|(token, row)| expect("weights of a row", row.len(), token + 1))?;
    }
    for table in [&layer.gates, &layer.weights].into_iter().flatten() {
        expect("rows of gates or weights", table.len(), tokens)?;
        table.iter().try_for_each(|row| expect("gates or weights of a token", row.len(), heads))?;
    }
    Ok(())
}

fn expect(what: &str, found: usize, expected: usize) -> Result<(), String> {
    match found == expected {
        true => Ok(()),
        false => Err(format!("{what}: {found}, expected {expected}")),
    }
}
