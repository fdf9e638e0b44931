//! Architectures: the layers of a block. All architectures have the same embedding, final norm and head.

use crate::layers::{
    Attention, Block, Embedding, Head, Linear, Mlp, QkNorm, RmsNorm, Rotation, RouterLayer,
    RouterSpec,
};
use crate::layout::{FlatLayout, ModelLayout};
use crate::model_parallel::ModelPart;
use crate::tensors::{FINAL_NORM, Tensor, TensorList, in_layer};
use crate::{ModelConfig, router};

/// The architecture of a model's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 1 to 3 (arXiv 2302.13971, 2407.21783).
    Llama,
    /// Qwen3 (arXiv 2505.09388): a Llama with norms of queries and keys.
    Qwen3,
}

impl Architecture {
    /// Every architecture.
    pub const ALL: [Architecture; 2] = [Architecture::Llama, Architecture::Qwen3];

    /// Returns whether queries and keys are normed, each head separately, before RoPE.
    pub fn norms_queries_and_keys(self) -> bool {
        match self {
            Architecture::Llama => false,
            Architecture::Qwen3 => true,
        }
    }

    /// Lists the tensors of a block, in the architecture's order, and returns its layers
    /// without a router.
    fn block(self, list: &mut TensorList<'_>, config: &ModelConfig) -> Block {
        let (width, eps) = (config.hidden_size, config.rms_norm_eps);
        let attention_norm = RmsNorm::new(list, "input_layernorm.weight", width, eps);
        let mut attention = Attention::new(list, config);
        if self.norms_queries_and_keys() {
            let norm = QkNorm::new(list, config.head_dim, eps);
            attention.rotation = Rotation::NormedRope(norm);
        }
        let mlp_norm = RmsNorm::new(list, "post_attention_layernorm.weight", width, eps);
        Block { attention_norm, attention, mlp_norm, mlp: Mlp::new(list, config) }
    }
}

/// The layers of a model, in the order of the forward pass.
pub(crate) struct Layers {
    pub embedding: Embedding,
    pub blocks: Vec<Block>,
    pub final_norm: RmsNorm,
    pub head: Head,
}

impl Layers {
    pub fn linear_layers(&self) -> impl Iterator<Item = Linear> {
        self.blocks.iter().flat_map(Block::linear_layers).chain([self.head.linear.clone()])
    }

    /// Returns the layers of a model with these routers, and the flat buffers of the parameters of `part`: embedding,
    /// blocks, final norm, untied head. The length of every buffer is a multiple of `ranks`. Buffers outside the part
    /// are empty.
    pub fn new(
        config: &ModelConfig,
        routers: &[Option<RouterSpec>],
        ranks: usize,
        part: &ModelPart,
    ) -> (Self, Vec<FlatLayout>) {
        let mut buffers = Buffers { config, ranks, part, flats: Vec::new() };
        let tied = config.tie_word_embeddings;
        let embedded = part.first || part.last && tied;
        let embedding = buffers.add(embedded, "", |list| Embedding::new(list, config));
        let blocks = routers.iter().enumerate().map(|(layer, router)| {
            let block = |list: &mut TensorList<'_>| block(list, config, router.as_ref());
            buffers.add(part.holds(layer), &in_layer(layer, ""), block)
        });
        let blocks = blocks.collect();
        let final_norm = buffers.add(part.last, "", |list| final_norm(list, config));
        let head = match tied {
            true => Head::at(embedding.table.clone(), config),
            false => buffers.add(part.last, "", |list| Head::new(list, config)),
        };
        let mut flats = buffers.flats;
        // The first stage counts a tied head, as the embedding.
        let of_embedding = &mut flats[ModelLayout::EMBEDDING].segments;
        of_embedding.iter_mut().for_each(|segment| segment.counted = part.first);
        (Layers { embedding, blocks, final_norm, head }, flats)
    }
}

/// The flat buffers of a part of a model under construction.
struct Buffers<'a> {
    config: &'a ModelConfig,
    ranks: usize,
    part: &'a ModelPart,
    flats: Vec<FlatLayout>,
}

impl Buffers<'_> {
    /// Adds a buffer with the tensors that `layers` lists, or an empty buffer if they are not `here`; returns the
    /// layers.
    fn add<L>(
        &mut self,
        here: bool,
        prefix: &str,
        layers: impl FnOnce(&mut TensorList<'_>) -> L,
    ) -> L {
        let (config, share) = (self.config, self.part.tensor);
        let mut list = TensorList::in_buffer(self.flats.len(), config, share, prefix);
        let layers = layers(&mut list);
        let tensors = if here { list.tensors } else { Vec::new() };
        self.flats.push(FlatLayout::new(config, tensors, self.ranks, share));
        layers
    }
}

/// Lists the tensors of a block, the router's last, and returns the block's layers.
fn block(list: &mut TensorList<'_>, config: &ModelConfig, router: Option<&RouterSpec>) -> Block {
    let mut block = config.architecture.block(list, config);
    block.attention.router = router.map(|spec| RouterLayer::new(list, config, *spec));
    block
}

fn final_norm(list: &mut TensorList<'_>, config: &ModelConfig) -> RmsNorm {
    RmsNorm::new(list, FINAL_NORM, config.hidden_size, config.rms_norm_eps)
}

pub(crate) fn embedding_tensors(config: &ModelConfig) -> Vec<Tensor> {
    TensorList::tensors_of("", |list| Embedding::new(list, config))
}

/// Returns the tensors of block `layer`, in the architecture's order.
pub(crate) fn block_tensors(config: &ModelConfig, layer: usize) -> Vec<Tensor> {
    let router = router::of_layer(config, layer);
    let block = |list: &mut TensorList<'_>| block(list, config, router.as_ref());
    TensorList::tensors_of(&in_layer(layer, ""), block)
}

/// Returns the tensors of the final norm and of the output head; a tied model has no output head.
pub(crate) fn output_tensors(config: &ModelConfig) -> Vec<Tensor> {
    let mut tensors = TensorList::tensors_of("", |list| final_norm(list, config));
    if !config.tie_word_embeddings {
        tensors.extend(TensorList::tensors_of("", |list| Head::new(list, config)));
    }
    tensors
}
