//! The tensors of a model in one table: name, shape, sharding, and whether weight decay applies.
//! Layout, parameters, operations, checks of weight files and plans follow from it. The rows of a
//! block are its architecture's (`llama/tensors.rs`, `qwen3/tensors.rs`); names and shapes are
//! Hugging Face's.

use crate::{Architecture, ModelConfig, llama, qwen3};

/// Name of the embedding, whose rows are the vocabulary.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the output head; absent from the files of a tied model.
pub const OUTPUT_HEAD: &str = "lm_head.weight";

/// Whether the tensor of that name has a row for each token of the vocabulary.
pub fn has_vocabulary_rows(name: &str) -> bool {
    name == EMBEDDING || name == OUTPUT_HEAD
}
/// Name of the norm before the output head.
pub const FINAL_NORM: &str = "model.norm.weight";

/// How tensor-parallel ranks shard a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
    /// Replicated: each rank has the whole tensor.
    Replicated,
    /// By key/value heads with their query heads, along this dimension.
    Heads(usize),
    /// By columns of the MLP, along this dimension.
    Mlp(usize),
    /// By rows of the vocabulary.
    Vocabulary,
}

/// The operands of a block's matmuls and norms. The tensors of one operand are adjacent, so that
/// one matmul computes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operand {
    InputNorm,
    Qkv,
    Output,
    QkNorm,
    PostNorm,
    GateUp,
    Down,
}

/// One tensor of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name in checkpoints.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its sharding.
    pub division: Division,
    /// Whether weight decay applies.
    pub decays: bool,
}

impl Tensor {
    fn matrix(name: impl Into<String>, shape: [usize; 2], division: Division) -> Self {
        Tensor { name: name.into(), shape: shape.to_vec(), division, decays: true }
    }

    fn norm(name: impl Into<String>, width: usize) -> Self {
        let division = Division::Replicated;
        Tensor { name: name.into(), shape: vec![width], division, decays: false }
    }

    /// Elements of the tensor.
    pub(crate) fn elements(&self) -> u128 {
        self.shape.iter().map(|&extent| extent as u128).product()
    }
}

/// The tensors of a block under construction.
pub(crate) struct Table {
    /// The prefix of the names.
    prefix: String,
    rows: Vec<(Operand, Tensor)>,
}

impl Table {
    /// Adds a matrix, with weight decay.
    pub(crate) fn matrix(
        &mut self,
        operand: Operand,
        name: &str,
        shape: [usize; 2],
        division: Division,
    ) {
        let name = format!("{}.{name}.weight", self.prefix);
        self.rows.push((operand, Tensor::matrix(name, shape, division)));
    }

    /// Adds the weight of a norm, which is replicated and has no weight decay.
    pub(crate) fn norm(&mut self, operand: Operand, name: &str, width: usize) {
        let name = format!("{}.{name}.weight", self.prefix);
        self.rows.push((operand, Tensor::norm(name, width)));
    }
}

/// The embedding.
pub(crate) fn embedding(config: &ModelConfig) -> Tensor {
    let shape = [config.vocab_size, config.hidden_size];
    Tensor::matrix(EMBEDDING, shape, Division::Vocabulary)
}

/// The tensors of block `layer`, in the architecture's order.
pub(crate) fn block(config: &ModelConfig, layer: usize) -> Vec<(Operand, Tensor)> {
    let mut table = Table { prefix: format!("model.layers.{layer}"), rows: Vec::new() };
    match config.architecture {
        Architecture::Llama => llama::tensors::block(config, &mut table),
        Architecture::Qwen3 => qwen3::tensors::block(config, &mut table),
    }
    table.rows
}

/// The norm before the output head.
pub(crate) fn final_norm(config: &ModelConfig) -> Tensor {
    Tensor::norm(FINAL_NORM, config.hidden_size)
}

/// The output head; `None` for a tied model.
pub(crate) fn output_head(config: &ModelConfig) -> Option<Tensor> {
    let shape = [config.vocab_size, config.hidden_size];
    (!config.tie_word_embeddings).then(|| Tensor::matrix(OUTPUT_HEAD, shape, Division::Vocabulary))
}

/// A model's tensors in the order of the forward pass, in which they are also written. A tied model
/// has no output head.
pub fn tensors(config: &ModelConfig) -> Vec<Tensor> {
    let mut tensors = vec![embedding(config)];
    for layer in 0..config.num_hidden_layers {
        tensors.extend(block(config, layer).into_iter().map(|(_, tensor)| tensor));
    }
    tensors.push(final_norm(config));
    tensors.extend(output_head(config));
    tensors
}

/// Names and shapes of [`tensors`].
pub fn tensor_shapes(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    tensors(config).into_iter().map(|Tensor { name, shape, .. }| (name, shape)).collect()
}
