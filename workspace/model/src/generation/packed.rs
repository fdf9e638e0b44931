//! Packed copies of the linear layers' weights, on devices that pack weights: a layer is faster with a packed weight if
//! it has few tokens.

use std::collections::HashMap;

use moh_kernels::{Backend, View, for_element};

use crate::layers::Linear;
use crate::parameters::ParameterRange;
use crate::{Model, Result};

/// The packed weights of a model; empty on a device that does not pack weights.
pub(crate) struct PackedWeights<B: Backend> {
    weights: HashMap<ParameterRange, B::Buffer<u32>>,
}

impl<B: Backend> PackedWeights<B> {
    /// Packs the weights of all linear layers.
    pub fn new(model: &Model<B>) -> Result<Self> {
        let (backend, mut weights) = (&model.backend, HashMap::new());
        for Linear { weight, outputs, inputs } in model.layers.linear_layers() {
            let len = packed_len(model, inputs, outputs);
            if len > 0 {
                let mut packed = backend.allocate(len)?;
                let source = model.weights.get(&weight);
                let into = B::whole_mut(&mut packed);
                for_element!(T: source.element() => {
                    backend.pack_weight::<T>(inputs, source.typed(), into)
                })?;
                weights.insert(weight, packed);
            }
        }
        Ok(PackedWeights { weights })
    }

    /// Returns the packed copy of a weight.
    pub fn get(&self, range: &ParameterRange) -> Option<View<'_, B, u32>> {
        self.weights.get(range).map(|packed| B::whole(packed))
    }
}

pub(crate) fn packed_bytes<B: Backend>(model: &Model<B>) -> u64 {
    let bytes = |Linear { inputs, outputs, .. }: Linear| {
        (packed_len(model, inputs, outputs) * size_of::<u32>()) as u64
    };
    model.layers.linear_layers().map(bytes).sum()
}

fn packed_len<B: Backend>(model: &Model<B>, inputs: usize, outputs: usize) -> usize {
    for_element!(T: model.element() => model.backend.packed_len::<T>(inputs, outputs))
}
