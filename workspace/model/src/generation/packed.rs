//! Packed copies of the linear layers' weights, where a device has them: a layer of few tokens is faster with
//! one.

use std::collections::HashMap;

use moh_kernels::{Backend, Element, View};

use crate::Error;
use crate::model::Model;
use crate::parameters::ParameterRange;

/// The packed weights of a model; none on a device that does not pack them.
pub(crate) struct PackedWeights<B: Backend> {
    /// By the flat buffer, the first element and the end of a weight.
    weights: HashMap<(usize, usize, usize), B::Buffer<u32>>,
}

impl<B: Backend> PackedWeights<B> {
    /// Packs all linear layers' weights.
    pub fn new<T: Element>(model: &Model<B, T>) -> Result<Self, Error> {
        let (backend, mut weights) = (&model.backend, HashMap::new());
        for (range, inputs) in model.layers.linear_weights() {
            let outputs = range.range.len() / inputs.max(1);
            let len = backend.packed_len::<T>(inputs, outputs);
            if len > 0 {
                let mut packed = backend.allocate(len)?;
                let weight = model.weights.get(&range);
                backend.pack_weight::<T>(inputs, weight, B::whole_mut(&mut packed))?;
                weights.insert(key(&range), packed);
            }
        }
        Ok(PackedWeights { weights })
    }

    /// That of a weight.
    pub fn get(&self, range: &ParameterRange) -> Option<View<'_, B, u32>> {
        self.weights.get(&key(range)).map(|packed| B::whole(packed))
    }
}

/// Bytes of the packed weights of a model.
pub(crate) fn packed_bytes<B: Backend, T: Element>(model: &Model<B, T>) -> u64 {
    let bytes = |(range, inputs): (ParameterRange, usize)| {
        let outputs = range.range.len() / inputs.max(1);
        (model.backend.packed_len::<T>(inputs, outputs) * size_of::<u32>()) as u64
    };
    model.layers.linear_weights().into_iter().map(bytes).sum()
}

fn key(range: &ParameterRange) -> (usize, usize, usize) {
    (range.buffer, range.range.start, range.range.end)
}
