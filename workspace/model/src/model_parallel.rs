//! One rank's part of a model, and the ranks that it communicates with.
//!
//! Pipeline stages have consecutive blocks each. The first stage also has the embedding, the last stage the final norm
//! and the head. If the head is tied, both of these stages have it, and all-reduce its gradients.
//!
//! Ranks may shard every tensor (tensor parallelism, arXiv 1909.08053). Each rank has some key/value heads with their
//! query heads, some columns of the MLP and some rows of the vocabulary. It also has the residual stream of some of the
//! tokens (sequence parallelism, arXiv 2205.05198).

use std::ops::Range;

use moh_comm::{Group, World};
use moh_kernels::cross_entropy::HeadShape;
use moh_kernels::ranks::{Heads, VocabularyRows, share};
use moh_kernels::rope::QkvShape;

use crate::slice::Slice;
use crate::tensors::{Division, Tensor};
use crate::{Error, ModelConfig, Result};

/// A rank's shard of every tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorShare {
    /// The tensor-parallel rank.
    pub rank: usize,
    /// The number of tensor-parallel ranks.
    pub ranks: usize,
}

impl TensorShare {
    /// The whole tensors.
    pub const WHOLE: TensorShare = TensorShare { rank: 0, ranks: 1 };

    /// Checks that the tensors of a model can be sharded across these ranks.
    ///
    /// # Errors
    /// Fails if the number of ranks does not divide the key/value heads, or exceeds the rows to shard.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        let least = config.intermediate_size.min(config.vocab_size);
        if config.num_key_value_heads.is_multiple_of(self.ranks) && self.ranks <= least {
            return Ok(());
        }
        Err(Error::Invalid(format!(
            "{} ranks cannot share the tensors of a model of {} key/value heads: use a number that divides \
             them, at most the MLP's width and the vocabulary",
            self.ranks, config.num_key_value_heads
        )))
    }

    /// Returns the query heads of a block, and this rank's share of them.
    pub fn heads(&self, config: &ModelConfig) -> Heads {
        Heads {
            count: config.num_attention_heads,
            group_size: config.group_size(),
            rank: self.rank,
            ranks: self.ranks,
        }
    }

    /// Returns the local key/value heads.
    pub fn key_value_heads(&self, config: &ModelConfig) -> usize {
        config.num_key_value_heads / self.ranks
    }

    /// Returns the width of the local query heads.
    pub fn query_width(&self, config: &ModelConfig) -> usize {
        config.query_width() / self.ranks
    }

    /// Returns the width of the local key (or value) heads.
    pub fn key_value_width(&self, config: &ModelConfig) -> usize {
        config.key_value_width() / self.ranks
    }

    /// Returns the range of the MLP's local columns.
    pub fn mlp_columns(&self, config: &ModelConfig) -> Range<usize> {
        share(config.intermediate_size, self.rank, self.ranks)
    }

    /// Returns the number of the MLP's local columns.
    pub fn mlp_width(&self, config: &ModelConfig) -> usize {
        self.mlp_columns(config).len()
    }

    /// Returns the local rows of the vocabulary.
    pub fn vocabulary(&self, config: &ModelConfig) -> VocabularyRows {
        VocabularyRows::of_rank(config.vocab_size, self.rank, self.ranks)
    }

    /// Returns the shape of a micro-batch's packed queries, keys and values of the local heads.
    pub(crate) fn qkv_shape(&self, config: &ModelConfig, batch: usize, length: usize) -> QkvShape {
        QkvShape {
            batch,
            length,
            heads: self.heads(config).local(),
            kv_heads: self.key_value_heads(config),
            head_dim: config.head_dim,
        }
    }

    /// Returns the shape of the output head with its local rows.
    pub(crate) fn head_shape(&self, config: &ModelConfig, tokens: usize) -> HeadShape {
        HeadShape::of_rows(tokens, config.hidden_size, self.vocabulary(config), self.ranks)
    }

    pub(crate) fn slice(&self, config: &ModelConfig, tensor: &Tensor) -> Slice {
        let shape = tensor.shape.clone();
        match tensor.division {
            Division::Replicated => Slice::whole(shape),
            Division::Heads(dimension) => {
                let width = shape[dimension] / config.num_key_value_heads;
                let groups = (self.rank..config.num_key_value_heads).step_by(self.ranks);
                let ranges = groups.map(|group| group * width..(group + 1) * width);
                Slice::along(shape, dimension, ranges.collect())
            }
            Division::Mlp(dimension) => {
                Slice::along(shape, dimension, vec![self.mlp_columns(config)])
            }
            Division::Vocabulary => {
                let VocabularyRows { first, count, .. } = self.vocabulary(config);
                Slice::along(shape, 0, std::iter::once(first..first + count).collect())
            }
        }
    }

    /// Returns the share of a micro-batch's tokens with a local residual stream.
    pub(crate) fn tokens(&self, tokens: usize) -> TokenShare {
        TokenShare { share: *self, tokens, per_rank: tokens.div_ceil(self.ranks) }
    }

    /// Returns the number of shared heads of each rank in the first layer where these numbers differ, because the
    /// shared heads do not divide equally. Returns `None` if there is no such layer.
    pub fn uneven_shared_heads(&self, config: &ModelConfig) -> Option<Vec<usize>> {
        let of_layer = |layer| {
            let shared = config.layer_heads(layer).shared;
            let local = |rank| {
                let heads = TensorShare { rank, ..*self }.heads(config);
                (0..heads.local()).filter(|&at| shared.contains(heads.index(at))).count()
            };
            let counts: Vec<usize> = (0..self.ranks).map(local).collect();
            counts.iter().any(|&count| count != counts[0]).then_some(counts)
        };
        (0..config.num_hidden_layers).find_map(of_layer)
    }
}

/// A rank's share of a micro-batch's tokens: a consecutive range. All shares have equal lengths, except at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenShare {
    share: TensorShare,
    tokens: usize,
    /// Maximum tokens of a share.
    pub per_rank: usize,
}

impl TokenShare {
    /// Returns the number of tokens of this rank.
    pub fn local(&self) -> usize {
        self.per_rank.min(self.tokens.saturating_sub(self.start()))
    }

    /// Returns the first token of this share, a multiple of `per_rank`; past the end for an empty share.
    pub fn start(&self) -> usize {
        self.share.rank * self.per_rank
    }

    /// Returns the number of tokens of all shares, including padding at the end.
    pub fn padded(&self) -> usize {
        self.share.ranks * self.per_rank
    }
}

/// A rank's part of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelPart {
    /// The part's blocks: one consecutive range, or one range for each virtual stage, in ascending order.
    pub chunks: Vec<Range<usize>>,
    /// Whether this is the first stage; its first chunk has the embedding.
    pub first: bool,
    /// Whether this is the last stage; its last chunk has the final norm and the head.
    pub last: bool,
    /// The rank's shard of the part's tensors.
    pub tensor: TensorShare,
}

impl ModelPart {
    /// Returns the part's blocks, in ascending order.
    pub fn layers(&self) -> impl Iterator<Item = usize> {
        self.chunks.iter().cloned().flatten()
    }

    /// Returns the part that is the whole model.
    pub fn whole(config: &ModelConfig) -> Self {
        let chunks = std::iter::once(0..config.num_hidden_layers).collect();
        ModelPart { chunks, first: true, last: true, tensor: TensorShare::WHOLE }
    }

    /// Returns the parts of `stages` stages of `virtual_stages` chunks each, with whole tensors. Chunk c of stage s is
    /// chunk c x `stages` + s of the model.
    ///
    /// # Errors
    /// Fails if there are no stages, or fewer blocks than chunks.
    pub fn divide(config: &ModelConfig, stages: usize, virtual_stages: usize) -> Result<Vec<Self>> {
        let chunks = Self::chunks(config, stages.saturating_mul(virtual_stages))?;
        let part = |stage: usize| ModelPart {
            chunks: chunks.iter().skip(stage).step_by(stages).cloned().collect(),
            first: stage == 0,
            last: stage + 1 == stages,
            tensor: TensorShare::WHOLE,
        };
        Ok((0..stages).map(part).collect())
    }

    /// Divides the blocks into `stages` chunks so that the largest load is minimal. The head counts as the number of
    /// blocks with as many weights.
    fn chunks(config: &ModelConfig, stages: usize) -> Result<Vec<Range<usize>>> {
        let layers = config.num_hidden_layers;
        if !(1..=layers).contains(&stages) {
            return Err(Error::undivided(layers, stages));
        }
        let head = config.vocab_size as f64 * config.hidden_size as f64;
        let block = config.block_parameters() as f64 / config.num_hidden_layers.max(1) as f64;
        let mut counts = vec![1usize; stages];
        for _ in stages..layers {
            let load = |stage: usize| {
                let head = if stage + 1 == stages { head } else { 0.0 };
                counts[stage] as f64 + head / block
            };
            // The first of equal chunks: later stages wait longer for their first input.
            let least = (0..stages).min_by(|&a, &b| load(a).total_cmp(&load(b))).unwrap_or(0);
            counts[least] += 1;
        }
        let mut start = 0;
        let chunk = |count| {
            let layers = start..start + count;
            start = layers.end;
            layers
        };
        Ok(counts.into_iter().map(chunk).collect())
    }

    /// Returns the number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.chunks.iter().map(Range::len).sum()
    }

    pub(crate) fn holds(&self, layer: usize) -> bool {
        self.chunks.iter().any(|layers| layers.contains(&layer))
    }
}

/// A rank's part of a model, and its process groups.
#[derive(Debug, Clone)]
pub struct ModelParallel {
    part: ModelPart,
    pub(crate) pipeline: Group,
    tensor: Group,
    /// The group of the first and the last stage if the model has a tied head; `None` on other stages.
    tied_head: Option<Group>,
    /// The pipeline group for gradients. With virtual stages, gradients and outputs may travel between the same two
    /// ranks, and an engine may match messages only by their order.
    pub(crate) backward: Group,
}

impl ModelParallel {
    /// Returns the part of a rank with the whole model.
    pub fn whole(config: &ModelConfig) -> Self {
        let alone = World::single().group().clone();
        let (part, pipeline, tensor) = (ModelPart::whole(config), alone.clone(), alone.clone());
        ModelParallel { part, pipeline, tensor, tied_head: None, backward: alone }
    }

    /// Builds this rank's stage of `pipeline`, of `virtual_stages` chunks, sharded across `tensor`.
    /// All ranks of both groups call this function.
    ///
    /// # Errors
    /// Fails if there are fewer blocks than chunks, or if another rank has failed. Also fails if the number of ranks of
    /// `tensor` does not divide the heads or exceeds the rows to shard.
    pub fn new(
        config: &ModelConfig,
        pipeline: Group,
        virtual_stages: usize,
        tensor: Group,
    ) -> Result<Self> {
        let share = TensorShare { rank: tensor.rank(), ranks: tensor.size() };
        share.check(config)?;
        let (rank, stages) = (pipeline.rank(), pipeline.size());
        let part = ModelPart::divide(config, stages, virtual_stages)?.swap_remove(rank);
        let part = ModelPart { tensor: share, ..part };
        let shares = stages > 1 && config.tie_word_embeddings;
        let is_end = part.first || part.last;
        let split_ends = || pipeline.split("tied head", is_end.then_some(0), rank);
        let tied_head = shares.then(split_ends).transpose()?.flatten();
        let backward = match virtual_stages {
            1 => None,
            _ => pipeline.split("pipeline backward", Some(0), rank)?,
        };
        let backward = backward.unwrap_or_else(|| pipeline.clone());
        Ok(ModelParallel { part, pipeline, tensor, tied_head, backward })
    }

    /// Returns this rank's part of another model with as many blocks, for passes without gradients. Each rank has the
    /// same blocks of both models.
    pub fn of_frozen(&self, config: &ModelConfig) -> Result<Self> {
        self.part.tensor.check(config)?;
        Ok(ModelParallel { tied_head: None, ..self.clone() })
    }

    /// Returns this rank's part of the model.
    pub fn part(&self) -> &ModelPart {
        &self.part
    }

    /// Returns the number of pipeline stages.
    pub fn stages(&self) -> usize {
        self.pipeline.size()
    }

    /// Returns this rank's stage.
    pub fn stage(&self) -> usize {
        self.pipeline.rank()
    }

    pub(crate) fn begins_with(&self, chunk: usize) -> bool {
        self.part.first && chunk == 0
    }

    pub(crate) fn ends_with(&self, chunk: usize) -> bool {
        self.part.last && chunk + 1 == self.part.chunks.len()
    }

    /// Returns the stage that receives a chunk's output.
    pub(crate) fn next(&self) -> usize {
        (self.pipeline.rank() + 1) % self.pipeline.size()
    }

    /// Returns the stage that sends a chunk's input.
    pub(crate) fn previous(&self) -> usize {
        (self.pipeline.rank() + self.pipeline.size() - 1) % self.pipeline.size()
    }

    /// Reserves memory for `messages` messages of `bytes` bytes that other stages have not received yet.
    pub fn reserve_sends(&self, messages: usize, bytes: usize) -> Result<()> {
        Ok(self.pipeline.reserve_sends(messages, bytes)?)
    }

    /// Returns whether this rank contributes the sums of losses: only the last stage's tensor rank 0 does.
    pub fn counts_losses(&self) -> bool {
        self.part.last && self.part.tensor.rank == 0
    }

    /// Returns the ranks that shard the tensors of this part.
    pub fn tensor(&self) -> &Group {
        &self.tensor
    }

    /// Returns the group of the first and the last stage if the model has a tied head. The head's gradient is the sum
    /// of both stages' gradients.
    pub fn tied_head(&self) -> Option<&Group> {
        self.tied_head.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MohConfig, RouterKind};

    fn config(layers: usize, vocabulary: usize) -> ModelConfig {
        let dense = ModelConfig::llama3_8b();
        ModelConfig {
            vocab_size: vocabulary,
            hidden_size: 32,
            intermediate_size: 64,
            num_hidden_layers: layers,
            num_attention_heads: 4,
            num_key_value_heads: 4,
            head_dim: 8,
            ..dense
        }
    }

    #[test]
    fn a_frozen_model_has_the_blocks_of_the_model_beside_it() {
        let moh = MohConfig {
            router: RouterKind::TwoStage,
            shared_heads: 1.into(),
            routed_top_k: 2.into(),
        };
        let learned = |vocabulary| ModelConfig { moh: Some(moh.clone()), ..config(9, vocabulary) };
        let part = |config: &ModelConfig| ModelPart::divide(config, 3, 1).unwrap().swap_remove(2);
        // At some vocabulary sizes, a router's matrices change the number of blocks of the last stage.
        let vocabulary = (1..4000).find(|&v| part(&config(9, v)) != part(&learned(v))).unwrap();
        let model = learned(vocabulary);
        let of_model = ModelParallel { part: part(&model), ..ModelParallel::whole(&model) };
        let frozen = of_model.of_frozen(&config(9, vocabulary)).unwrap();
        assert_eq!(frozen.part, of_model.part);
    }

    #[test]
    fn the_busiest_stage_has_the_least_to_do() {
        let counts = |layers, vocabulary, stages| -> Vec<usize> {
            let parts = ModelPart::divide(&config(layers, vocabulary), stages, 1).unwrap();
            assert!(parts[0].first && parts[stages - 1].last);
            let chunks: Vec<_> = parts.iter().map(|part| part.chunks[0].clone()).collect();
            assert_eq!(chunks[stages - 1].end, layers);
            assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
            chunks.iter().map(ExactSizeIterator::len).collect()
        };
        // A head that counts as no block, as two blocks, and as many.
        assert_eq!(counts(8, 1, 4), [2, 2, 2, 2]);
        assert_eq!(counts(10, 640, 4), [3, 3, 3, 1]);
        assert_eq!(counts(9, 64_000, 3), [4, 4, 1]);
        assert_eq!(counts(5, 1, 5), [1; 5]);
    }

    #[test]
    fn ranks_share_tokens_columns_and_rows_with_any_remainder() {
        let config = config(2, 517);
        for ranks in 1..5 {
            let shares: Vec<_> = (0..ranks).map(|rank| TensorShare { rank, ranks }).collect();
            for tokens in [1, 5, 8] {
                let local: Vec<_> = shares.iter().map(|share| share.tokens(tokens)).collect();
                assert_eq!(local.iter().map(TokenShare::local).sum::<usize>(), tokens);
                assert!(local.iter().all(|share| share.local() <= share.per_rank));
                assert!(local[0].padded() >= tokens);
            }
            let columns: Vec<_> = shares.iter().map(|share| share.mlp_columns(&config)).collect();
            assert!(columns.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!((columns[0].start, columns[ranks - 1].end), (0, 64));
            let rows = shares.iter().map(|share| share.vocabulary(&config).count);
            assert_eq!(rows.sum::<usize>(), 517);
        }
    }

    #[test]
    fn shares_say_where_shared_heads_do_not_divide() {
        let mut config = config(2, 10);
        let share = TensorShare { rank: 0, ranks: 2 };
        assert_eq!(share.uneven_shared_heads(&config), None);
        for (shared_heads, expected) in [(2, None), (3, Some(vec![2, 1])), (1, Some(vec![1, 0]))] {
            let router = RouterKind::QueryNorm;
            let (shared_heads, routed_top_k) = (shared_heads.into(), 1.into());
            config.moh = Some(MohConfig { router, shared_heads, routed_top_k });
            assert_eq!(share.uneven_shared_heads(&config), expected);
        }
    }

    #[test]
    fn virtual_stages_take_turns() {
        let parts = ModelPart::divide(&config(8, 1), 2, 2).unwrap();
        assert_eq!(parts[0].chunks, [0..2, 4..6]);
        assert_eq!(parts[1].chunks, [2..4, 6..8]);
        assert!(parts[0].first && !parts[0].last && parts[1].last);
        assert!(parts[1].holds(7) && !parts[1].holds(4));
        assert!(ModelPart::divide(&config(5, 1), 2, 3).is_err());
    }

    #[test]
    fn more_stages_than_blocks_are_refused() {
        for stages in [0, 6] {
            let error = ModelPart::divide(&config(5, 10), stages, 1).unwrap_err().to_string();
            let expected = format!("5 layers cannot be divided into {stages}");
            assert!(error.contains(&expected), "{error}");
        }
    }
}
