//! The tensors of a model: name, shape, sharding, and whether weight decay applies. Layers list them (`layers/`, in the
//! order of `architecture.rs`). Layout, parameters, operations, checks of weight files and plans follow from the lists.
//! Names and shapes are Hugging Face's.

use crate::model_parallel::TensorShare;
use crate::parameters::ParameterRange;
use crate::{ModelConfig, architecture};

/// Name of the embedding, which has a row for each token of the vocabulary.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the output head; absent from the files of a tied model.
pub const OUTPUT_HEAD: &str = "lm_head.weight";

/// Name of the norm before the output head.
pub const FINAL_NORM: &str = "model.norm.weight";
/// Name of a layer's output projection, within the layer.
pub const OUTPUT_PROJECTION: &str = "self_attn.o_proj.weight";
/// Name of the matrix of a layer's learned router with a row for each head, within the layer.
pub const ROUTER: &str = "self_attn.router.weight";
/// Name of the matrix of a router "two-stage" that weighs shared heads against selected heads, within the layer.
pub const ROUTER_STAGES: &str = "self_attn.router.stages.weight";

/// Returns the name of a tensor of layer `layer`, from 0, by its name within the layer.
pub fn in_layer(layer: usize, name: &str) -> String {
    format!("model.layers.{layer}.{name}")
}

/// Returns the layer of a tensor, and its name within the layer; `None` if the tensor is not in a layer.
pub fn layer_and_name(tensor: &str) -> Option<(usize, &str)> {
    let (layer, name) = tensor.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, name))
}

/// Returns the layer of an output projection; `None` for other tensors.
pub fn layer_of_output_projection(tensor: &str) -> Option<usize> {
    let (layer, name) = layer_and_name(tensor)?;
    (name == OUTPUT_PROJECTION).then_some(layer)
}

/// Returns whether the tensor with that name has a row for each token of the vocabulary.
pub fn has_vocabulary_rows(name: &str) -> bool {
    name == EMBEDDING || name == OUTPUT_HEAD
}

/// A group of tensors that may have its own learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorGroup {
    /// Queries, keys, values, the output projection, and norms of queries and keys.
    Attention,
    /// The matrices of routers.
    Router,
    /// MLPs, norms, embedding and head.
    Rest,
}

impl TensorGroup {
    /// Returns the group of the tensor with that name. A block's tensors that the architecture lacks belong to its
    /// router.
    pub fn of(name: &str) -> Self {
        let Some((_, name)) = layer_and_name(name) else { return TensorGroup::Rest };
        match name.split_once('.').unwrap_or((name, "")) {
            ("self_attn", rest) if !rest.starts_with("router.") => TensorGroup::Attention,
            ("mlp" | "input_layernorm" | "post_attention_layernorm", _) => TensorGroup::Rest,
            _ => TensorGroup::Router,
        }
    }
}

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

/// One tensor of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// The tensor's name in checkpoints.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its sharding.
    pub division: Division,
    /// Whether weight decay applies.
    pub decays: bool,
}

impl Tensor {
    pub(crate) fn elements(&self) -> u128 {
        self.shape.iter().map(|&extent| extent as u128).product()
    }
}

/// The list to which layers add the tensors of one flat buffer.
pub(crate) struct TensorList<'a> {
    prefix: &'a str,
    pub tensors: Vec<Tensor>,
    /// The buffer and this rank's share of it; `None` if only names and shapes are needed.
    place: Option<Place<'a>>,
}

/// The flat buffer of a list, and this rank's share of its tensors.
struct Place<'a> {
    buffer: usize,
    end: usize,
    config: &'a ModelConfig,
    share: TensorShare,
}

impl<'a> TensorList<'a> {
    /// Creates an empty list of the tensors of the flat buffer with index `buffer`, for the local `share`. Names begin
    /// with `prefix`.
    pub fn in_buffer(
        buffer: usize,
        config: &'a ModelConfig,
        share: TensorShare,
        prefix: &'a str,
    ) -> Self {
        let place = Some(Place { buffer, end: 0, config, share });
        TensorList { prefix, tensors: Vec::new(), place }
    }

    /// Returns the tensors that `layers` lists, without their ranges.
    pub fn tensors_of<L>(
        prefix: &str,
        layers: impl FnOnce(&mut TensorList<'_>) -> L,
    ) -> Vec<Tensor> {
        let mut list = TensorList { prefix, tensors: Vec::new(), place: None };
        layers(&mut list);
        list.tensors
    }

    /// Adds a matrix, with weight decay.
    pub fn matrix(&mut self, name: &str, shape: [usize; 2], division: Division) -> ParameterRange {
        self.add(Tensor { name: self.name(name), shape: shape.to_vec(), division, decays: true })
    }

    /// Adds the weight of a norm, replicated and without weight decay.
    pub fn norm(&mut self, name: &str, width: usize) -> ParameterRange {
        let (name, division) = (self.name(name), Division::Replicated);
        self.add(Tensor { name, shape: vec![width], division, decays: false })
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn add(&mut self, tensor: Tensor) -> ParameterRange {
        let range = self.place.as_mut().map_or_else(ParameterRange::default, |place| {
            let start = place.end;
            place.end += place.share.slice(place.config, &tensor).len();
            ParameterRange { buffer: place.buffer, range: start..place.end }
        });
        self.tensors.push(tensor);
        range
    }
}

/// Returns a model's tensors in the order of the forward pass, which is also the order of files. A tied model has no
/// output head.
pub fn tensors(config: &ModelConfig) -> Vec<Tensor> {
    let mut tensors = architecture::embedding_tensors(config);
    for layer in 0..config.num_hidden_layers {
        tensors.extend(architecture::block_tensors(config, layer));
    }
    tensors.extend(architecture::output_tensors(config));
    tensors
}

/// Returns the names and shapes of [`tensors`].
pub fn tensor_shapes(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    tensors(config).into_iter().map(|Tensor { name, shape, .. }| (name, shape)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_told_by_names() {
        use TensorGroup::{Attention, Rest, Router};
        for (name, group) in [
            ("model.layers.11.self_attn.q_proj.weight", Attention),
            ("model.layers.0.self_attn.o_proj.weight", Attention),
            ("model.layers.0.self_attn.k_norm.weight", Attention),
            ("model.layers.0.mlp.down_proj.weight", Rest),
            ("model.layers.0.input_layernorm.weight", Rest),
            ("model.layers.0.post_attention_layernorm.weight", Rest),
            ("model.layers.3.self_attn.router.weight", Router),
            ("model.layers.3.self_attn.router.stages.weight", Router),
            ("model.layers.3.my_router.weight", Router),
            (FINAL_NORM, Rest),
            (EMBEDDING, Rest),
            (OUTPUT_HEAD, Rest),
        ] {
            assert_eq!(TensorGroup::of(name), group, "{name}");
        }
    }
}
