//! Norms of gradients and weights by block, over all ranks.

use moh_comm::{Group, Reduce};
use moh_kernels::{Backend, Memory};
use moh_model::layout::{ModelLayout, Segment};
use moh_model::parameters::{FlatBuffers, Shard, overlap};
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::optimizer::squared_norms;

/// The norms of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockNorms {
    /// Norms of the gradients before clipping. Their squares add up to the square of the global norm.
    pub gradient: Norms,
    /// Norms of the weights before the step's update.
    pub weight: Norms,
}

/// L2 norms of the parts of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Norms {
    /// The embedding, which is also a tied head.
    #[serde(deserialize_with = "finite_or_nan")]
    pub embedding: f64,
    /// Each block.
    #[serde(deserialize_with = "list")]
    pub blocks: Vec<f64>,
    /// The final norm.
    #[serde(deserialize_with = "finite_or_nan")]
    pub final_norm: f64,
    /// The head; `None` if it is tied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head: Option<f64>,
}

/// Returns a number; null, which JSON has for numbers that are not finite, becomes NaN. For serde's `deserialize_with`.
pub fn finite_or_nan<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Returns a list of numbers; null becomes NaN.
fn list<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<f64>, D::Error> {
    let numbers: Vec<Option<f64>> = Vec::deserialize(from)?;
    Ok(numbers.into_iter().map(|number| number.unwrap_or(f64::NAN)).collect())
}

/// The squared norms of every flat buffer on the device, allocated once for all steps.
pub(crate) struct SquaredBlockNorms<M: Memory> {
    /// `[2, flat buffers]`: the squares of the gradients, then of the weights.
    squares: M::Buffer<f64>,
}

impl<M: Memory> SquaredBlockNorms<M> {
    pub(crate) fn new(memory: &M, layout: &ModelLayout) -> Result<Self> {
        Ok(SquaredBlockNorms { squares: memory.allocate(2 * layout.flats.len())? })
    }
}

impl<B: Backend> SquaredBlockNorms<B> {
    /// Computes the norms from each rank's shard of the gradients, which are summed over the data ranks, and from its
    /// shard of the weights. All ranks of `group` call this function.
    pub(crate) fn measure(
        &mut self,
        backend: &B,
        layout: &ModelLayout,
        weights: &FlatBuffers<B>,
        gradients: &FlatBuffers<B>,
        shard: Shard,
        group: &Group,
    ) -> Result<BlockNorms> {
        let (flats, squares) = (layout.flats.len(), &mut self.squares);
        backend.zero(B::whole_mut(squares))?;
        for flat in 0..flats {
            add(backend, layout, gradients, shard, flat, B::view_mut(squares, flat..flat + 1))?;
            let at = flats + flat;
            add(backend, layout, weights, shard, flat, B::view_mut(squares, at..at + 1))?;
        }
        group.all_reduce::<B, f64>(B::whole_mut(squares), Reduce::Sum)?;
        let mut norms = vec![0f64; 2 * flats];
        backend.download(B::whole(squares), &mut norms)?;
        norms.iter_mut().for_each(|norm| *norm = norm.sqrt());
        let (gradient, weight) = norms.split_at(flats);
        Ok(BlockNorms {
            gradient: Norms::new(layout, gradient),
            weight: Norms::new(layout, weight),
        })
    }
}

impl Norms {
    fn new(layout: &ModelLayout, flats: &[f64]) -> Self {
        let last = layout.final_norm_index();
        Norms {
            embedding: flats[ModelLayout::EMBEDDING],
            blocks: flats[layout.block_index(0)..last].to_vec(),
            final_norm: flats[last],
            head: flats.get(last + 1).copied(),
        }
    }
}

/// Adds the squares of the shard of one flat buffer; each tensor counts once over all ranks.
fn add<B: Backend>(
    backend: &B,
    layout: &ModelLayout,
    values: &FlatBuffers<B>,
    shard: Shard,
    flat: usize,
    out: B::ViewMut<'_, f64>,
) -> Result<()> {
    let buffer = &layout.flats[flat];
    let local = shard.range(buffer.len);
    let counts = |segment: &&Segment| segment.counted && values.has_gradients(flat, &segment.range);
    let counted = buffer.segments.iter().filter(counts);
    let parts = counted.filter_map(|segment| {
        let part = overlap(&segment.range, &local);
        (!part.is_empty()).then(|| values.view(flat, part))
    });
    let parts: Vec<_> = parts.collect();
    if !parts.is_empty() {
        squared_norms(backend, &parts, out)?;
    }
    Ok(())
}
