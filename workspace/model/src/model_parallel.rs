//! The part of a model that one rank holds, and the ranks that it works with.
//!
//! Stages of a pipeline have consecutive blocks each, the first stage the embedding, the last one the
//! final norm and the head; a tied head lies on both ends, whose gradients of it are added up. Ranks that
//! share every tensor (tensor parallelism, arXiv 1909.08053) each have some key/value heads with their
//! query heads, some of the MLP's columns and some rows of the vocabulary, and hold the residual
//! stream for some of the tokens (sequence parallelism, arXiv 2205.05198).

use std::ops::Range;

use moh_comm::{Group, World};
use moh_kernels::cross_entropy::HeadShape;
use moh_kernels::ranks::{Heads, VocabularyRows, share};
use moh_kernels::rope::QkvShape;

use crate::slice::Slice;
use crate::tensors::{Division, Tensor};
use crate::{Error, ModelConfig};

/// Which share of every tensor a rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorShare {
    /// Its number.
    pub rank: usize,
    /// How many ranks share the tensors.
    pub ranks: usize,
}

impl TensorShare {
    /// All of them.
    pub const WHOLE: TensorShare = TensorShare { rank: 0, ranks: 1 };

    /// Refuses ranks that cannot share the tensors of such a model.
    ///
    /// # Errors
    /// [`Error::Tensor`] when the ranks do not divide the key/value heads, or are more than the rows to
    /// share.
    pub fn check(&self, config: &ModelConfig) -> Result<(), Error> {
        let least = config.intermediate_size.min(config.vocab_size);
        if config.num_key_value_heads.is_multiple_of(self.ranks) && self.ranks <= least {
            return Ok(());
        }
        Err(Error::Tensor { ranks: self.ranks, heads: config.num_key_value_heads })
    }

    /// The query heads of a block, and which of them are held.
    pub fn heads(&self, config: &ModelConfig) -> Heads {
        Heads {
            count: config.num_attention_heads,
            group_size: config.group_size(),
            rank: self.rank,
            ranks: self.ranks,
        }
    }

    /// Key/value heads that are held.
    pub fn key_value_heads(&self, config: &ModelConfig) -> usize {
        config.num_key_value_heads / self.ranks
    }

    /// Width of the query heads that are held.
    pub fn query_width(&self, config: &ModelConfig) -> usize {
        config.query_width() / self.ranks
    }

    /// Width of the key (or value) heads that are held.
    pub fn key_value_width(&self, config: &ModelConfig) -> usize {
        config.key_value_width() / self.ranks
    }

    /// Columns of the MLP that are held.
    pub fn mlp_columns(&self, config: &ModelConfig) -> Range<usize> {
        share(config.intermediate_size, self.rank, self.ranks)
    }

    /// Width of the MLP's columns that are held.
    pub fn mlp_width(&self, config: &ModelConfig) -> usize {
        self.mlp_columns(config).len()
    }

    /// Rows of the vocabulary that are held.
    pub fn vocabulary(&self, config: &ModelConfig) -> VocabularyRows {
        VocabularyRows::of_rank(config.vocab_size, self.rank, self.ranks)
    }

    /// Shape of a micro-batch's packed queries, keys and values of the heads that are held.
    pub(crate) fn qkv_shape(&self, config: &ModelConfig, batch: usize, length: usize) -> QkvShape {
        QkvShape {
            batch,
            length,
            heads: self.heads(config).local(),
            kv_heads: self.key_value_heads(config),
            head_dim: config.head_dim,
        }
    }

    /// Shape of the output head whose rows are held.
    pub(crate) fn head_shape(&self, config: &ModelConfig, tokens: usize) -> HeadShape {
        HeadShape::of_rows(tokens, config.hidden_size, self.vocabulary(config), self.ranks)
    }

    /// The part of a tensor that is local.
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

    /// The tokens of a micro-batch whose part of the residual stream is held.
    pub(crate) fn tokens(&self, tokens: usize) -> TokenShare {
        TokenShare { share: *self, tokens, part: tokens.div_ceil(self.ranks) }
    }

    /// Shared heads of each rank in the first layer where they differ: key/value heads did not divide
    /// them equally.
    pub fn uneven_shared_heads(&self, config: &ModelConfig) -> Option<Vec<usize>> {
        let of_layer = |layer| {
            let shared = config.layer_heads(layer).shared;
            let local = |rank| TensorShare { rank, ..*self }.heads(config).local_below(shared);
            let counts: Vec<usize> = (0..self.ranks).map(local).collect();
            counts.iter().any(|&count| count != counts[0]).then_some(counts)
        };
        (0..config.num_hidden_layers).find_map(of_layer)
    }
}

/// A rank's share of a micro-batch's tokens: consecutive ones, equal parts but for the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TokenShare {
    share: TensorShare,
    tokens: usize,
    /// Tokens of a part.
    pub part: usize,
}

impl TokenShare {
    /// Tokens of this rank.
    pub fn local(&self) -> usize {
        self.part.min(self.tokens.saturating_sub(self.start()))
    }

    /// The first of them, counted in parts: past the end where there are none.
    pub fn start(&self) -> usize {
        self.share.rank * self.part
    }

    /// Tokens of all parts, of which the last ones may not exist.
    pub fn padded(&self) -> usize {
        self.share.ranks * self.part
    }
}

/// What a rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Its blocks: one run of consecutive ones, or with virtual stages several, in ascending order.
    pub chunks: Vec<Range<usize>>,
    /// Whether it is the first stage, whose first chunk has the embedding.
    pub first: bool,
    /// Whether it is the last stage, whose last chunk has the final norm and the head.
    pub last: bool,
    /// Its share of their tensors.
    pub tensor: TensorShare,
}

impl Part {
    /// Its blocks, in ascending order.
    pub fn layers(&self) -> impl Iterator<Item = usize> {
        self.chunks.iter().cloned().flatten()
    }

    /// A whole model.
    pub fn whole(config: &ModelConfig) -> Self {
        let chunks = std::iter::once(0..config.num_hidden_layers).collect();
        Part { chunks, first: true, last: true, tensor: TensorShare::WHOLE }
    }

    /// The parts of `stages` stages of `virtual_stages` chunks each, with whole tensors: chunk c of stage s
    /// is number c x `stages` + s of all chunks.
    ///
    /// # Errors
    /// [`Error::Pipeline`] when there are fewer blocks than chunks, or no stage.
    pub fn divide(
        config: &ModelConfig,
        stages: usize,
        virtual_stages: usize,
    ) -> Result<Vec<Self>, Error> {
        let chunks = Self::chunks(config, stages.saturating_mul(virtual_stages))?;
        let part = |stage: usize| Part {
            chunks: chunks.iter().skip(stage).step_by(stages).cloned().collect(),
            first: stage == 0,
            last: stage + 1 == stages,
            tensor: TensorShare::WHOLE,
        };
        Ok((0..stages).map(part).collect())
    }

    /// The blocks of so many chunks, dealt out so that the busiest one has the least to do, the head
    /// counting as the blocks that have as many weights.
    fn chunks(config: &ModelConfig, stages: usize) -> Result<Vec<Range<usize>>, Error> {
        let layers = config.num_hidden_layers;
        if !(1..=layers).contains(&stages) {
            return Err(Error::Pipeline { stages, layers });
        }
        let head = config.vocab_size as f64 * config.hidden_size as f64;
        let mut counts = vec![1usize; stages];
        for _ in stages..layers {
            let load = |stage: usize| {
                let head = if stage + 1 == stages { head } else { 0.0 };
                counts[stage] as f64 + head / config.block_parameters() as f64
            };
            // The first of equal ones: later stages wait longer for their first work.
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

    /// How many blocks it has.
    pub fn num_blocks(&self) -> usize {
        self.chunks.iter().map(Range::len).sum()
    }

    /// Whether it has this block.
    pub(crate) fn holds(&self, layer: usize) -> bool {
        self.chunks.iter().any(|layers| layers.contains(&layer))
    }
}

/// A rank's part of a model, and the ranks that it works with.
#[derive(Debug, Clone)]
pub struct ModelParallel {
    part: Part,
    /// The stages through which this rank's tokens pass.
    pipeline: Group,
    /// The ranks that share its tensors.
    tensor: Group,
    /// The first and the last stage, on those two, where both hold a tied head.
    tied_head: Option<Group>,
    /// The stages again, for gradients: with virtual stages they go the same way as other stages'
    /// outputs, and engines may tell messages between two ranks apart by their order alone.
    backward: Group,
}

impl ModelParallel {
    /// A rank that holds all of the model.
    pub fn whole(config: &ModelConfig) -> Self {
        let alone = World::single().group().clone();
        let (pipeline, tensor) = (alone.clone(), alone);
        let backward = pipeline.clone();
        ModelParallel { part: Part::whole(config), pipeline, tensor, tied_head: None, backward }
    }

    /// The stage of this rank of `pipeline`, of `virtual_stages` chunks, whose tensors the ranks of `tensor` share; all their ranks
    /// call this.
    ///
    /// # Errors
    /// [`Error::Pipeline`] when there are fewer blocks than chunks, [`Error::Tensor`] when the ranks of
    /// `tensor` do not divide the heads or are more than the rows to share; when another rank has
    /// failed.
    pub fn new(
        config: &ModelConfig,
        (pipeline, virtual_stages): (Group, usize),
        tensor: Group,
    ) -> Result<Self, Error> {
        let share = TensorShare { rank: tensor.rank(), ranks: tensor.size() };
        share.check(config)?;
        let (rank, stages) = (pipeline.rank(), pipeline.size());
        let part = Part::divide(config, stages, virtual_stages)?.swap_remove(rank);
        let part = Part { tensor: share, ..part };
        let shares = stages > 1 && config.tie_word_embeddings;
        let is_end = part.first || part.last;
        let tied_head = match shares {
            true => pipeline.split("tied head", is_end.then_some(0), rank)?,
            false => None,
        };
        let backward = match virtual_stages {
            1 => None,
            _ => pipeline.split("pipeline backward", Some(0), rank)?,
        };
        let backward = backward.unwrap_or_else(|| pipeline.clone());
        Ok(ModelParallel { part, pipeline, tensor, tied_head, backward })
    }

    /// What this rank holds.
    pub fn part(&self) -> &Part {
        &self.part
    }

    /// Stages of the pipeline.
    pub fn stages(&self) -> usize {
        self.pipeline.size()
    }

    /// This rank's stage.
    pub fn stage(&self) -> usize {
        self.pipeline.rank()
    }

    /// Whether the model begins with this chunk.
    pub(crate) fn begins_with(&self, chunk: usize) -> bool {
        self.part.first && chunk == 0
    }

    /// Whether the model ends with this chunk.
    pub(crate) fn ends_with(&self, chunk: usize) -> bool {
        self.part.last && chunk + 1 == self.part.chunks.len()
    }

    /// The stage that a chunk's output goes to.
    pub(crate) fn next(&self) -> usize {
        (self.pipeline.rank() + 1) % self.pipeline.size()
    }

    /// The stage that a chunk's input comes from.
    pub(crate) fn previous(&self) -> usize {
        (self.pipeline.rank() + self.pipeline.size() - 1) % self.pipeline.size()
    }

    /// Takes memory for so many messages of `bytes` bytes to other stages that are not received yet.
    ///
    /// # Errors
    /// When there is no room.
    pub fn reserve_sends(&self, messages: usize, bytes: usize) -> Result<(), Error> {
        Ok(self.pipeline.reserve_sends(messages, bytes)?)
    }

    /// Whether this rank's sums of losses count: those of one of the ranks that know them.
    pub fn counts_losses(&self) -> bool {
        self.part.last && self.part.tensor.rank == 0
    }

    pub(crate) fn pipeline(&self) -> &Group {
        &self.pipeline
    }

    pub(crate) fn backward(&self) -> &Group {
        &self.backward
    }

    pub(crate) fn tensor(&self) -> &Group {
        &self.tensor
    }

    /// The first and the last stage, on those two, where both hold a tied head: its gradient is the sum
    /// of theirs.
    pub fn tied_head(&self) -> Option<&Group> {
        self.tied_head.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Architecture, RopeConfig};

    fn config(layers: usize, vocabulary: usize) -> ModelConfig {
        ModelConfig {
            architecture: Architecture::Llama,
            vocab_size: vocabulary,
            hidden_size: 32,
            intermediate_size: 64,
            num_hidden_layers: layers,
            num_attention_heads: 4,
            num_key_value_heads: 4,
            head_dim: 8,
            max_position_embeddings: 64,
            rms_norm_eps: 1e-6,
            rope: RopeConfig { theta: 10_000.0, scaling: None },
            tie_word_embeddings: false,
            initializer_range: 0.02,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
            moh: None,
        }
    }

    #[test]
    fn the_busiest_stage_has_the_least_to_do() {
        let counts = |layers, vocabulary, stages| -> Vec<usize> {
            let parts = Part::divide(&config(layers, vocabulary), stages, 1).unwrap();
            assert!(parts[0].first && parts[stages - 1].last);
            let chunks: Vec<_> = parts.iter().map(|part| part.chunks[0].clone()).collect();
            assert_eq!(chunks[stages - 1].end, layers);
            assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
            chunks.iter().map(ExactSizeIterator::len).collect()
        };
        // A head that counts as nothing, as two blocks and as many.
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
                assert!(local.iter().all(|share| share.local() <= share.part));
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
            let router = crate::RouterKind::QueryNorm;
            let (shared_heads, routed_top_k) = (shared_heads.into(), 1.into());
            config.moh = Some(crate::MohConfig { router, shared_heads, routed_top_k });
            assert_eq!(share.uneven_shared_heads(&config), expected);
        }
    }

    #[test]
    fn virtual_stages_take_turns() {
        let parts = Part::divide(&config(8, 1), 2, 2).unwrap();
        assert_eq!(parts[0].chunks, [0..2, 4..6]);
        assert_eq!(parts[1].chunks, [2..4, 6..8]);
        assert!(parts[0].first && !parts[0].last && parts[1].last);
        assert!(parts[1].holds(7) && !parts[1].holds(4));
        assert!(Part::divide(&config(5, 1), 2, 3).is_err());
    }

    #[test]
    fn more_stages_than_blocks_are_refused() {
        for stages in [0, 6] {
            let error = Part::divide(&config(5, 10), stages, 1).unwrap_err().to_string();
            assert!(error.contains(&format!("5 layers has no pipeline of {stages}")), "{error}");
        }
    }
}
