//! The tokens that heads are measured on.

use moh_model::{ModelConfig, windows_of_pass};

use crate::{Error, Result};

/// Windows of equal length, one after another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CalibrationTokens {
    ids: Vec<u32>,
    length: usize,
    /// Windows of a pass, which divide all windows.
    pub(crate) batch: usize,
}

impl CalibrationTokens {
    /// Windows of `length` tokens for the model that `config` describes; ids after the last whole window
    /// are left out.
    ///
    /// # Errors
    /// Fails for a length that the model does not support, and for fewer tokens than the width of all query heads.
    pub fn new(mut ids: Vec<u32>, length: usize, config: &ModelConfig) -> Result<Self> {
        let context = config.max_position_embeddings;
        if !(2..=context).contains(&length) {
            return Err(Error::Invalid(format!(
                "windows of {length} tokens: must be 2 to {context}, the model's context length"
            )));
        }
        let windows = ids.len() / length;
        ids.truncate(windows * length);
        let (tokens, width) = (ids.len(), config.query_width());
        if tokens < width {
            return Err(Error::Invalid(format!(
                "{tokens} calibration tokens: a fit of {width} inputs, the width of all query heads, needs at least \
                 as many: give more text, or more --calibration-tokens"
            )));
        }
        Ok(CalibrationTokens { ids, length, batch: windows_of_pass(windows, length) })
    }

    /// The ids of all windows.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Tokens of a window.
    pub fn length(&self) -> usize {
        self.length
    }

    pub(crate) fn pass(&self) -> usize {
        self.batch * self.length
    }

    /// The passes over the first half of the windows, or over more where `width` needs more tokens.
    pub(crate) fn search_passes(&self, width: usize) -> usize {
        let all = self.ids.len() / self.pass();
        all.div_ceil(2).max(width.div_ceil(self.pass())).min(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> ModelConfig {
        let fields = serde_json::json!({
            "model_type": "llama", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64,
        });
        moh_hf::ConfigFile::from_value(fields, std::path::Path::new("config.json")).unwrap().config
    }

    #[test]
    fn passes_have_equally_many_whole_windows() {
        let tokens = CalibrationTokens::new(vec![1; 100], 16, &config()).unwrap();
        assert_eq!((tokens.ids().len(), tokens.batch, tokens.pass()), (96, 6, 96));
        let many = CalibrationTokens::new(vec![1; 64 * 130], 64, &config()).unwrap();
        assert_eq!((many.batch, many.search_passes(32)), (26, 3));
        assert_eq!(many.search_passes(64 * 130), 5);
    }

    #[test]
    fn too_few_tokens_and_other_lengths_are_refused() {
        let refused = |ids, length| {
            CalibrationTokens::new(vec![1; ids], length, &config()).unwrap_err().to_string()
        };
        assert!(refused(40, 30).starts_with("30 calibration tokens: a fit of 32 inputs"));
        assert!(refused(40, 1).starts_with("windows of 1 tokens: must be 2 to 64"));
        assert!(refused(400, 65).starts_with("windows of 65 tokens: must be 2 to 64"));
    }
}
