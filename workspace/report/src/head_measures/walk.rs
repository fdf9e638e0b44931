//! Computes the layers of a model one after another, on windows of tokens. The residual stream is kept on the host, so
//! that only a layer and the stream need memory, whatever the size of the model.

use std::collections::HashSet;
use std::ops::{ControlFlow, Range};

use moh_kernels::Backend;
use moh_model::tensors::tensor_shapes;
use moh_model::{BlockPass, EndsPass, ModelConfig, windows_of_pass};

use crate::head_measures::Error;

/// The source of a model's weights: writes a tensor by its name.
pub type Source<'a, E> = &'a mut dyn FnMut(&str, &mut [f32]) -> Result<(), E>;

/// The results of a layer's heads on some windows.
pub(super) struct LayerPass {
    /// The windows, from 0.
    pub windows: Range<usize>,
    /// `[N, H D]`, as attention reads them.
    pub queries: Vec<f32>,
    /// `[N, G D]`.
    pub keys: Vec<f32>,
    /// The outputs of all heads before the output projection, `[N, H D]`.
    pub outputs: Vec<f32>,
    /// Whether a token computes a head, `[N, H]`.
    pub active: Vec<u8>,
    /// The gates of a layer that routes, `[N, H]`, 0 for shared heads.
    pub gates: Option<Vec<f32>>,
    /// The factors of the outputs `[N, H]`, if the router weighs heads.
    pub weights: Option<Vec<f32>>,
}

/// Calls `on_pass` with the results of each layer and pass over `ids`, which are whole windows of `length` tokens. The
/// passes of a layer are in order. Calls `progress` with the number of finished layers and of all layers. Returns
/// `false` if it breaks.
pub(super) fn walk<B: Backend + Clone, E: From<Error> + From<moh_model::Error>>(
    backend: &B,
    config: &ModelConfig,
    ids: &[u32],
    length: usize,
    weights: Source<'_, E>,
    on_pass: &mut dyn FnMut(usize, LayerPass),
    progress: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
) -> Result<bool, E> {
    // The windows of a pass; their number divides the number of all windows.
    let batch = windows_of_pass(ids.len() / length, length);
    // The residual stream before the first layer, `[tokens, C]`.
    let mut stream = Vec::with_capacity(ids.len() * config.hidden_size);
    let mut ends = EndsPass::new(backend.clone(), config, batch, length, &mut *weights)?;
    for ids in ids.chunks_exact(batch * length) {
        stream.extend(ends.embed(ids)?);
    }
    // Frees its memory before the block is allocated.
    drop(ends);
    let names: HashSet<String> = tensor_shapes(config).into_iter().map(|(name, _)| name).collect();
    let mut block = BlockPass::new(backend.clone(), config, batch, length)?;
    let (layers, elements) = (config.num_hidden_layers, batch * length * config.hidden_size);
    for layer in 0..layers {
        if progress(layer, layers).is_break() {
            return Ok(false);
        }
        block.load::<E>(layer, |name, values| match names.contains(name) {
            true => weights(name, values),
            // Tensors of a learned router, in a layer without routed heads.
            false => {
                values.fill(0.0);
                Ok(())
            }
        })?;
        for (index, x) in stream.chunks_exact_mut(elements).enumerate() {
            let windows = index * batch..(index + 1) * batch;
            on_pass(layer, pass(&mut block, config, layer, windows, x)?);
        }
    }
    Ok(true)
}

/// Returns the results of a layer on the residual stream `x`, and replaces `x` by the stream after the layer.
fn pass<B: Backend>(
    block: &mut BlockPass<B>,
    config: &ModelConfig,
    layer: usize,
    windows: Range<usize>,
    x: &mut [f32],
) -> Result<LayerPass, Error> {
    let moh = config.moh.as_ref().map(|moh| moh.of_layer_alone(layer));
    block.project(x)?;
    let heads = config.num_attention_heads;
    let (mut gates, mut weights) = (None, None);
    let active = match &moh {
        Some(moh) => {
            let active = block.select(moh.clone())?;
            if moh.router.selects() && moh.layer(0).shared.len() < heads {
                (gates, weights) = (Some(block.gates()?), block.weights()?);
            }
            active
        }
        None => vec![1; x.len() / config.hidden_size * heads],
    };
    let outputs = block.attend()?;
    let (queries, keys) = block.queries_and_keys()?;
    x.copy_from_slice(&block.forward(x, moh)?.output);
    Ok(LayerPass { windows, queries, keys, outputs, active, gates, weights })
}
