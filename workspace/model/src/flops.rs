//! Sizes derived from a configuration: tensors, parameters and floating-point operations.
//!
//! The convention for FLOPs:
//! - A multiply-add counts as two.
//! - Norms, RoPE, softmax, activations, the router and the optimiser are not counted.
//! - Linear layers, including the output head but not the embedding's look-up, take 2 x their parameters per token
//!   forward, and twice as many backward.
//! - The attention core has two matmuls of 2 x length x head_dim per head. The causal half counts: (T + 1) / 2 keys on
//!   average. Its backward pass takes 2.5 x its forward pass (five matmuls, one of them the recomputed scores).
//! - Queries, keys and values are computed for every token and head (the router reads the queries): Mixture-of-Head
//!   saves operations in the core only, not in the output projection.

use crate::ModelConfig;
use crate::architecture::{block_tensors, embedding_tensors, output_tensors};
use crate::tensors::{Tensor, has_vocabulary_rows, tensors};

/// Maximum number of parameters; products of sizes then fit 64 bits.
const MAX_PARAMETERS: u128 = 1 << 50;

/// Sizes that are plausible individually but too large together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitExceeded {
    /// The size that is too large, and its value.
    pub what: String,
    /// The largest supported value.
    pub limit: u64,
}

/// Floating-point operations per token in a forward pass, at one sequence length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Flops {
    /// Linear layers and the output head.
    pub linear: f64,
    /// The attention core (scores and weighted values) of the active heads.
    pub attention: f64,
}

impl Flops {
    /// Returns the operations of a forward and backward pass: 3 x the linear layers, 3.5 x the attention core.
    pub fn training(&self) -> f64 {
        3.0 * self.linear + 3.5 * self.attention
    }

    /// Returns the operations of a forward pass.
    pub fn forward(&self) -> f64 {
        self.linear + self.attention
    }
}

impl ModelConfig {
    /// Returns the number of elements of all tensors; a tied head counts once.
    pub fn num_parameters(&self) -> u64 {
        // Cannot overflow: `check_limits` rejects configurations beyond 2^50.
        self.count_parameters() as u64
    }

    pub(crate) fn block_parameters(&self) -> u128 {
        let blocks = (0..self.num_hidden_layers).flat_map(|layer| block_tensors(self, layer));
        blocks.map(|tensor| tensor.elements()).sum()
    }

    fn count_parameters(&self) -> u128 {
        let ends = [embedding_tensors(self), output_tensors(self)];
        let ends: u128 = ends.iter().flatten().map(Tensor::elements).sum();
        self.block_parameters() + ends
    }

    /// Checks that the sizes fit 64-bit arithmetic.
    pub fn check_limits(&self) -> Result<(), LimitExceeded> {
        for (what, heads) in [
            ("query heads", self.num_attention_heads),
            ("key/value heads", self.num_key_value_heads),
        ] {
            let width = heads as u128 * self.head_dim as u128;
            if width > u128::from(u32::MAX) {
                let what = format!("{what} {width} wide");
                return Err(LimitExceeded { what, limit: u64::from(u32::MAX) });
            }
        }
        match self.count_parameters() {
            count if count > MAX_PARAMETERS => Err(LimitExceeded {
                what: format!("{count} parameters"),
                limit: MAX_PARAMETERS as u64,
            }),
            _ => Ok(()),
        }
    }

    /// Returns the forward FLOPs per token in sequences of `length` tokens, by this module's convention.
    pub fn flops_per_token(&self, length: usize) -> Flops {
        let matrices = tensors(self).into_iter().filter(|tensor| tensor.decays);
        let matrices = matrices.filter(|tensor| !has_vocabulary_rows(&tensor.name));
        let matrices: f64 = matrices.map(|tensor| tensor.elements() as f64).sum();
        let head = self.vocab_size as f64 * self.hidden_size as f64;
        let active =
            (0..self.num_hidden_layers).map(|layer| self.layer_heads(layer).active() as f64);
        let keys = (length as f64 + 1.0) / 2.0;
        Flops {
            linear: 2.0 * (matrices + head),
            attention: 2.0 * 2.0 * keys * self.head_dim as f64 * active.sum::<f64>(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::{OUTPUT_HEAD, tensor_shapes};
    use crate::{HeadCounts, MohConfig, RouterKind};

    #[test]
    fn llama3_8b_has_its_published_number_of_parameters() {
        // sum(p.numel() for p in LlamaForCausalLM(config).parameters())
        assert_eq!(ModelConfig::llama3_8b().num_parameters(), 8_030_261_248);
        let shapes = tensor_shapes(&ModelConfig::llama3_8b());
        let elements: usize = shapes.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
        assert_eq!(elements as u64, ModelConfig::llama3_8b().num_parameters());
        assert_eq!(shapes.len(), 3 + 9 * 32);
    }

    #[test]
    fn a_tied_head_counts_once_and_is_not_in_the_files() {
        let untied = ModelConfig::llama3_8b();
        let tied = ModelConfig { tie_word_embeddings: true, ..untied.clone() };
        assert_eq!(untied.num_parameters() - tied.num_parameters(), 128_256 * 4096);
        assert!(!tensor_shapes(&tied).iter().any(|(name, _)| name == OUTPUT_HEAD));
        assert_eq!(tied.flops_per_token(8), untied.flops_per_token(8));
    }

    #[test]
    fn flops_count_the_causal_half_of_the_active_heads() {
        let dense = ModelConfig::llama3_8b();
        let moh = |shared_heads: HeadCounts, routed_top_k| ModelConfig {
            moh: Some(MohConfig {
                router: RouterKind::QueryNorm,
                shared_heads: shared_heads.into(),
                routed_top_k,
            }),
            ..dense.clone()
        };
        // Half of the layers dense, half with half of the heads: three quarters on average.
        let half =
            |counts: [usize; 2]| -> HeadCounts { (0..32).map(|layer| counts[layer % 2]).collect() };
        let mixed = moh(half([32, 10]), half([0, 6]));
        let moh = moh(16.into(), 8.into());
        let (dense_flops, moh_flops) = (dense.flops_per_token(8191), moh.flops_per_token(8191));
        assert_eq!(dense_flops.linear, moh_flops.linear);
        assert_eq!(dense_flops.attention, 32.0 * 4.0 * 4096.0 * 128.0 * 32.0);
        assert_eq!(moh_flops.attention, 0.75 * dense_flops.attention);
        assert_eq!(mixed.flops_per_token(8191), moh_flops);
        let norms = 65 * 4096;
        let matrices = dense.num_parameters() - 128_256 * 4096 - norms;
        assert_eq!(dense_flops.linear, 2.0 * matrices as f64);
        assert_eq!(dense_flops.training(), 3.0 * dense_flops.linear + 3.5 * dense_flops.attention);
    }

    #[test]
    fn sizes_that_overflow_together_are_refused() {
        let (sound, large) = (ModelConfig::llama3_8b(), 1 << 24);
        assert!(sound.check_limits().is_ok());
        let matrices =
            ModelConfig { intermediate_size: large, hidden_size: large, ..sound.clone() };
        assert!(matrices.check_limits().is_err());
        let heads = ModelConfig { head_dim: large, num_attention_heads: large, ..sound };
        assert!(heads.check_limits().is_err());
    }
}
