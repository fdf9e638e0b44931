//! The shape of a model, dense or Mixture-of-Head: the typed form of Hugging Face's `config.json`,
//! which crate `moh-hf` reads and writes.

use moh_kernels::router::SharedHeads;

use crate::architecture::block_tensors;
use crate::router::HeadGroups;
use crate::{Architecture, Error, HeadCounts, Result, RouterKind, SharedHeadSets};

/// Shape and constants of a model, as in `config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The architecture of the blocks.
    pub architecture: Architecture,
    /// Rows of the embedding and of the output head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key/value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head: even, and independent of `hidden_size`.
    pub head_dim: usize,
    /// The context length that the model was trained for, in tokens.
    pub max_position_embeddings: usize,
    /// Addend of the mean square in RMSNorm.
    pub rms_norm_eps: f64,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// Whether the output head shares the embedding's weights.
    pub tie_word_embeddings: bool,
    /// Standard deviation of freshly initialised matrices.
    pub initializer_range: f64,
    /// The token that begins a text, if the model has one.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text; empty if the model has no such token.
    pub eos_token_ids: Vec<u32>,
    /// Mixture-of-Head attention; `None` for a dense Llama.
    pub moh: Option<MohConfig>,
}

/// Rotary position embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    /// Base of the geometric sequence of wavelengths.
    pub theta: f64,
    /// The scaling of frequencies, which otherwise are powers of `theta`; `None` for `rope_type = "default"`.
    pub scaling: Option<RopeScaling>,
}

impl RopeConfig {
    /// Returns the factor of attention scores in addition to 1 / sqrt(head_dim). Other implementations multiply both
    /// queries and keys by YaRN's factor; here queries and keys keep their norms.
    pub fn score_factor(&self) -> f32 {
        match self.scaling {
            Some(RopeScaling::Yarn(yarn)) => yarn.attention_factor.powi(2) as f32,
            _ => 1.0,
        }
    }
}

/// A scaling of the frequencies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// Divides all frequencies (`rope_type = "linear"`).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// The scaling of Llama 3.1 and later.
    Llama3(Llama3Scaling),
    /// The scaling of Qwen3's long contexts.
    Yarn(YarnScaling),
}

/// YaRN (Peng et al., arXiv 2309.00071; `rope_type = "yarn"`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct YarnScaling {
    /// Divisor of the low frequencies.
    pub factor: f64,
    /// Context length before scaling, in tokens.
    pub original_max_position_embeddings: usize,
    /// Frequencies that turn more often than this within the original length are unchanged.
    pub beta_fast: f64,
    /// Frequencies that turn less often than this are divided by `factor`.
    pub beta_slow: f64,
    /// Factor of rotated queries and of rotated keys.
    pub attention_factor: f64,
    /// Whether the range of pairs between `beta_fast` and `beta_slow` is widened to whole pairs.
    pub truncate: bool,
}

/// The frequency scaling of Llama 3.1 and later (`rope_type = "llama3"`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Llama3Scaling {
    /// Divisor of the low frequencies.
    pub factor: f64,
    /// Wavelengths above `original / low_freq_factor` are divided by `factor`.
    pub low_freq_factor: f64,
    /// Wavelengths below `original / high_freq_factor` are unchanged.
    pub high_freq_factor: f64,
    /// Context length before scaling, in tokens.
    pub original_max_position_embeddings: usize,
}

/// Mixture-of-Head attention (arXiv 2410.11842): the shared heads of a layer are active for every token, and each token
/// selects `routed_top_k` of the other heads. A layer is dense if it shares all heads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MohConfig {
    /// `moh_router`.
    pub router: RouterKind,
    /// `moh_shared_heads`, or `moh_shared_head_ids`.
    pub shared_heads: SharedHeadSets,
    /// `moh_routed_top_k`: routed heads active per token.
    pub routed_top_k: HeadCounts,
}

/// The heads of one layer that a token computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerHeads {
    /// Heads that are active for every token; all heads in a dense layer.
    pub shared: SharedHeads,
    /// Routed heads active per token.
    pub top_k: usize,
}

impl LayerHeads {
    /// Returns the number of active heads per token: shared and selected heads.
    pub fn active(self) -> usize {
        self.shared.len().saturating_add(self.top_k)
    }

    /// Checks a layer's counts against its query heads; messages append `place` to the names.
    fn validate(self, router: RouterKind, groups: HeadGroups, place: &str) -> Result<()> {
        let heads = groups.heads;
        let LayerHeads { shared: set, top_k } = self;
        let refuse = |reason: String| Err(Error::Invalid(reason));
        let shared = set.len();
        if let Some(last) = set.heads().next_back().filter(|&last| last >= heads && shared <= heads)
        {
            return refuse(format!(
                "shared_head_ids{place} has head {last}: the heads are 0 to {}",
                heads - 1
            ));
        }
        if shared > heads {
            return refuse(format!("shared_heads{place} = {shared}: the model has {heads} heads"));
        }
        let routed = heads - shared;
        router.check(self, groups, place)?;
        if top_k > routed {
            return refuse(format!(
                "routed_top_k{place} = {top_k}: must be at most the {routed} routed heads"
            ));
        }
        if shared == 0 && top_k == 0 {
            return refuse(format!(
                "shared_heads{place} = 0 and routed_top_k{place} = 0: no head would be active"
            ));
        }
        Ok(())
    }
}

impl MohConfig {
    /// Checks the counts against the query heads, the key/value heads that they read, and the layers.
    ///
    /// # Errors
    /// Fails:
    /// - if a list's length is not the number of layers,
    /// - if a layer shares a head that it lacks, has more shared or active heads than heads, or has no active head,
    /// - if the router cannot route a layer's counts.
    ///
    /// Messages name the layer, from 0, if layers differ.
    pub fn validate(&self, heads: usize, kv_heads: usize, layers: usize) -> Result<()> {
        let groups = HeadGroups { heads, kv_heads };
        let shared_key = match self.shared_heads {
            SharedHeadSets::First(_) => "shared_heads",
            SharedHeadSets::Sets(_) => "shared_head_ids",
        };
        let shared = self.shared_heads.counts();
        for (key, counts) in [(shared_key, &shared), ("routed_top_k", &self.routed_top_k)] {
            if let HeadCounts::Each(list) = counts
                && list.len() != layers
            {
                let reason = format!(
                    "{key} has {} entries, and the model {layers} layers: give one for each layer, \
                     or one number for all",
                    list.len()
                );
                return Err(Error::Invalid(reason));
            }
        }
        let is_uniform = shared.uniform().is_some() && self.shared_heads.ids().is_none();
        if is_uniform && self.routed_top_k.uniform().is_some() {
            return self.layer(0).validate(self.router, groups, "");
        }
        (0..layers).try_for_each(|layer| {
            self.layer(layer).validate(self.router, groups, &format!(" of layer {layer}"))
        })
    }

    /// Returns the counts of layer `layer`, from 0.
    pub fn layer(&self, layer: usize) -> LayerHeads {
        LayerHeads {
            shared: self.shared_heads.of_layer(layer),
            top_k: self.routed_top_k.of_layer(layer),
        }
    }

    /// Returns the routing of a model of a single layer with these heads.
    pub fn of_one_layer(&self, heads: LayerHeads) -> MohConfig {
        MohConfig {
            shared_heads: SharedHeadSets::Sets(vec![heads.shared]),
            routed_top_k: heads.top_k.into(),
            ..self.clone()
        }
    }

    /// Returns the routing of a model of a single layer with the heads of layer `layer`, from 0.
    pub fn of_layer_alone(&self, layer: usize) -> MohConfig {
        self.of_one_layer(self.layer(layer))
    }
}

impl ModelConfig {
    /// Returns the number of query heads that read the same key/value head.
    pub fn group_size(&self) -> usize {
        self.num_attention_heads / self.num_key_value_heads
    }

    /// Returns the width of all query heads together.
    pub fn query_width(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Returns the width of all key (or value) heads together.
    pub fn key_value_width(&self) -> usize {
        self.num_key_value_heads * self.head_dim
    }

    /// Returns the active query heads of layer `layer`, from 0. A dense layer shares all heads.
    pub fn layer_heads(&self, layer: usize) -> LayerHeads {
        let dense = LayerHeads { shared: SharedHeads::first(self.num_attention_heads), top_k: 0 };
        self.moh.as_ref().map_or(dense, |moh| moh.layer(layer))
    }

    /// Checks head counts against this model, as [`MohConfig::validate`] does.
    pub fn check_moh(&self, moh: &MohConfig) -> Result<()> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        moh.validate(heads, kv_heads, self.num_hidden_layers)
    }

    /// Returns the names of the tensors that another attention needs and this model lacks: a router's matrices.
    /// Training adds tensors, but does not remove tensors.
    ///
    /// # Errors
    /// Fails if the other attention would not use a tensor, and names the first such tensor.
    pub fn added_tensors(&self, moh: Option<&MohConfig>) -> Result<Vec<String>> {
        let other = ModelConfig { moh: moh.cloned(), ..self.clone() };
        let mut added = Vec::new();
        for layer in 0..self.num_hidden_layers {
            let [here, there] = [self, &other].map(|config| block_tensors(config, layer));
            if let Some(left) = here.iter().find(|tensor| !there.contains(tensor)) {
                let reason = format!(
                    "{} is in the model, and not used with this attention: convert the model with \
                     moh-convert to another router, or to --attention dense, before it is trained",
                    left.name
                );
                return Err(Error::Invalid(reason));
            }
            let lacks = there.into_iter().filter(|tensor| !here.contains(tensor));
            added.extend(lacks.map(|tensor| tensor.name));
        }
        Ok(added)
    }

    /// Returns the number of routed query heads of layer `layer`, from 0; 0 in a dense layer.
    pub fn routed_heads(&self, layer: usize) -> usize {
        self.num_attention_heads.saturating_sub(self.layer_heads(layer).shared.len())
    }

    /// Returns the number of active query heads of each layer; all heads in a dense model.
    pub fn active_heads(&self) -> HeadCounts {
        match &self.moh {
            None => HeadCounts::All(self.num_attention_heads),
            Some(_) => {
                let layers = 0..self.num_hidden_layers;
                layers.map(|layer| self.layer_heads(layer).active()).collect()
            }
        }
    }
}

#[cfg(test)]
impl ModelConfig {
    pub(crate) fn llama3_8b() -> Self {
        ModelConfig {
            architecture: Architecture::Llama,
            vocab_size: 128_256,
            hidden_size: 4096,
            intermediate_size: 14_336,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 8,
            head_dim: 128,
            max_position_embeddings: 8192,
            rms_norm_eps: 1e-5,
            rope: RopeConfig { theta: 500_000.0, scaling: None },
            tie_word_embeddings: false,
            initializer_range: 0.02,
            bos_token_id: Some(128_000),
            eos_token_ids: vec![128_001],
            moh: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moh(shared: &[usize], top_k: &[usize]) -> MohConfig {
        let counts = |list: &[usize]| list.iter().copied().collect::<HeadCounts>();
        let router = RouterKind::QueryNorm;
        MohConfig { router, shared_heads: counts(shared).into(), routed_top_k: counts(top_k) }
    }

    #[test]
    fn every_layer_is_checked() {
        assert!(moh(&[8, 1, 4], &[0, 5, 4]).validate(8, 8, 3).is_ok());
        for (shared, top_k, expected) in [
            (&[8, 9, 4][..], &[0, 0, 4][..], "shared_heads of layer 1 = 9: the model has 8 heads"),
            (&[8, 1, 7], &[0, 5, 1], "shared_heads of layer 2 = 7 of 8 leaves one routed head"),
            (&[8, 1, 4], &[1, 5, 4], "routed_top_k of layer 0 = 1: must be at most the 0 routed"),
            (&[8, 1, 4], &[0, 5, usize::MAX], "routed_top_k of layer 2 = 18446744073709551615"),
            (&[9, 9, 9], &[0, 0, 0], "shared_heads = 9: the model has 8 heads"),
            (&[8, 0, 4], &[0, 0, 4], "shared_heads of layer 1 = 0 and routed_top_k of layer 1 = 0"),
            (&[0; 3], &[0; 3], "shared_heads = 0 and routed_top_k = 0: no head would be active"),
            (&[4, 4], &[2, 2, 2], "shared_heads has 2 entries, and the model 3 layers"),
            (&[4, 4, 4], &[2; 4], "routed_top_k has 4 entries, and the model 3 layers"),
            (&[], &[2; 3], "shared_heads has 0 entries"),
        ] {
            let message = moh(shared, top_k).validate(8, 8, 3).unwrap_err().to_string();
            assert!(message.starts_with(expected), "{message}");
        }
    }

    #[test]
    fn sets_of_shared_heads_are_checked() {
        let moh = |ids: &[&[usize]]| {
            let ids: Vec<Vec<usize>> = ids.iter().map(|ids| ids.to_vec()).collect();
            let shared_heads = SharedHeadSets::from_ids(&ids).unwrap();
            MohConfig { shared_heads, ..moh(&[2, 2], &[3, 3]) }
        };
        assert!(moh(&[&[7, 1], &[0, 3]]).validate(8, 8, 2).is_ok());
        for (ids, expected) in [
            (&[&[7, 1][..], &[0, 8]][..], "shared_head_ids of layer 1 has head 8: the heads are 0"),
            (&[&[7, 1]], "shared_head_ids has 1 entries, and the model 2 layers"),
            (&[&[7, 1], &[1, 2, 3, 4, 5, 6, 7]], "shared_heads of layer 1 = 7 of 8 leaves one"),
        ] {
            let message = moh(ids).validate(8, 8, 2).unwrap_err().to_string();
            assert!(message.starts_with(expected), "{message}");
        }
    }
}
