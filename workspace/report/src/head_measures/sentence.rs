//! The heads that each token of a sentence computes, and the attention maps of all heads.

use std::ops::ControlFlow;

use moh_kernels::Backend;
use moh_model::ModelConfig;
use serde::{Deserialize, Serialize};

use super::patterns::Window;
use super::walk::{LayerPass, Source, walk};
use crate::head_measures::Error;

/// A layer on a sentence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SentenceLayer {
    /// The layer, from 0.
    pub layer: usize,
    /// Its shared heads.
    pub shared_heads: Vec<usize>,
    /// The heads that each token computes, including shared heads.
    pub active: Vec<Vec<usize>>,
    /// The gates of each token, 0 for shared heads; `None` in a layer that routes no heads.
    pub gates: Option<Vec<Vec<f32>>>,
    /// The factors of each token for the heads' outputs, 0 for heads that it does not compute. `None` if the router
    /// does not weigh heads.
    pub weights: Option<Vec<Vec<f32>>>,
    /// The attention of each head, in order: of each token over the tokens up to it, even if the token does not compute
    /// the head.
    pub maps: Vec<Vec<Vec<f32>>>,
}

/// Returns the heads of every layer on the tokens `ids`, of the model that `config` describes, on a single device.
/// `weights` writes each tensor by its name.
///
/// # Errors
/// Fails if `weights` fails, without tokens, with more tokens than the model's context, or if the device fails.
pub fn sentence<B: Backend + Clone, E: From<Error> + From<moh_model::Error>>(
    backend: &B,
    config: &ModelConfig,
    ids: &[u32],
    weights: Source<'_, E>,
) -> Result<Vec<SentenceLayer>, E> {
    let context = config.max_position_embeddings;
    if ids.is_empty() || ids.len() > context {
        let reason = format!("a sentence of {} tokens: must have 1 to {context}", ids.len());
        return Err(Error::Invalid(reason).into());
    }
    let mut layers = Vec::new();
    let mut on_pass = |layer: usize, pass: LayerPass| layers.push(of_layer(config, layer, &pass));
    let mut go_on = |_, _| ControlFlow::Continue(());
    walk(backend, config, ids, ids.len(), weights, &mut on_pass, &mut go_on)?;
    Ok(layers)
}

fn of_layer(config: &ModelConfig, layer: usize, pass: &LayerPass) -> SentenceLayer {
    let ModelConfig { num_attention_heads: heads, num_key_value_heads: kv_heads, head_dim, .. } =
        *config;
    let LayerPass { queries, keys, active, .. } = pass;
    let window = Window { queries, keys, active, heads, kv_heads, head_dim };
    let tokens = active.len() / heads;
    let computed = |token| (0..heads).filter(|&head| window.is_active(token, head)).collect();
    let row = |token, head| window.row(token, head).iter().map(|&weight| weight as f32).collect();
    let by_token = |table: &Option<Vec<f32>>| {
        table.as_ref().map(|table| table.chunks_exact(heads).map(<[f32]>::to_vec).collect())
    };
    SentenceLayer {
        layer,
        shared_heads: config.layer_heads(layer).shared.heads().collect(),
        active: (0..tokens).map(computed).collect(),
        gates: by_token(&pass.gates),
        weights: by_token(&pass.weights),
        maps: (0..heads).map(|head| (0..tokens).map(|token| row(token, head)).collect()).collect(),
    }
}
