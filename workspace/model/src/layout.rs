//! The location of each tensor in the flat buffers of a model: one buffer for the embedding, one for each block, one
//! for the final norm and one for an untied head.
//!
//! The layers list the tensors ([`crate::tensors`]), in this order.

use std::ops::Range;

use crate::architecture::Layers;
use crate::model_parallel::{ModelPart, TensorShare};
use crate::slice::Slice;
use crate::tensors::{Division, Tensor};
use crate::{ModelConfig, router};

/// One tensor of a flat buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The tensor's name in checkpoints.
    pub name: String,
    /// The local slice of the tensor.
    pub slice: Slice,
    /// The range of the slice's elements in the buffer.
    pub range: Range<usize>,
    /// Whether weight decay applies: to matrices, not to norms.
    pub decays: bool,
    /// Whether the tensor counts in the global gradient norm: a replicated tensor counts once.
    pub counted: bool,
    /// Whether all tensor-parallel ranks have this tensor, so that they all-reduce its gradients.
    pub replicated: bool,
}

impl Segment {
    /// Returns the shape of the whole tensor.
    pub fn shape(&self) -> &[usize] {
        self.slice.shape()
    }

    /// Returns the number of elements of the whole tensor.
    pub fn whole_len(&self) -> usize {
        self.shape().iter().product()
    }
}

/// The tensors of one flat buffer, in order and without gaps between them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlatLayout {
    /// The tensors.
    pub segments: Vec<Segment>,
    /// Number of elements of the buffer, including padding.
    pub len: usize,
}

impl FlatLayout {
    /// Lays out the local slices of tensors one after another, and pads the end to a multiple of `multiple`.
    pub(crate) fn new(
        config: &ModelConfig,
        tensors: impl IntoIterator<Item = Tensor>,
        multiple: usize,
        share: TensorShare,
    ) -> Self {
        let mut end = 0;
        let segments = tensors
            .into_iter()
            .map(|tensor| {
                let slice = share.slice(config, &tensor);
                let Tensor { name, division, decays, .. } = tensor;
                let start = end;
                end += slice.len();
                let replicated = share.ranks > 1 && division == Division::Replicated;
                let counted = !replicated || share.rank == 0;
                Segment { name, slice, range: start..end, decays, counted, replicated }
            })
            .collect();
        FlatLayout { segments, len: end.next_multiple_of(multiple) }
    }

    /// Returns the range of the tensors' elements, without the padding.
    pub fn used(&self) -> Range<usize> {
        0..self.segments.last().map_or(0, |segment| segment.range.end)
    }

    /// Returns the longest runs of adjacent tensors with the same value of `of`.
    pub fn runs<K: PartialEq>(&self, of: impl Fn(&Segment) -> K) -> Vec<(Range<usize>, K)> {
        let mut runs: Vec<(Range<usize>, K)> = Vec::new();
        for segment in &self.segments {
            let key = of(segment);
            match runs.last_mut() {
                Some((range, of_run)) if *of_run == key => range.end = segment.range.end,
                _ => runs.push((segment.range.clone(), key)),
            }
        }
        runs
    }
}

/// The flat buffers of a model, or of a part of a model, in order: embedding, blocks, final norm, untied head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelLayout {
    /// The buffers.
    pub flats: Vec<FlatLayout>,
    /// Number of blocks.
    pub num_blocks: usize,
}

impl ModelLayout {
    /// Returns the layout of a model on one rank.
    pub fn new(config: &ModelConfig) -> Self {
        Self::of_part(config, 1, &ModelPart::whole(config))
    }

    /// Returns the layout of a part of a model with optimiser state sharded over up to `ranks` ranks. The length of
    /// every buffer is a multiple of `ranks`. Buffers outside the part are empty.
    pub fn of_part(config: &ModelConfig, ranks: usize, part: &ModelPart) -> Self {
        let (_, flats) = Layers::new(config, &router::of_config(config), ranks, part);
        ModelLayout { flats, num_blocks: config.num_hidden_layers }
    }

    /// Index of the embedding's buffer.
    pub const EMBEDDING: usize = 0;

    /// Returns the index of a block's buffer.
    pub fn block_index(&self, layer: usize) -> usize {
        1 + layer
    }

    /// Returns the index of the final norm's buffer.
    pub fn final_norm_index(&self) -> usize {
        1 + self.num_blocks
    }

    /// Returns the index of the buffer with the output head; a tied head is in the embedding's buffer.
    pub fn head_index(&self) -> usize {
        let untied = self.num_blocks + 2;
        if untied < self.flats.len() { untied } else { Self::EMBEDDING }
    }

    /// Returns the buffers in the order in which a backward pass completes their gradients. A tied head is part of the
    /// embedding's buffer.
    pub fn backward_order(&self) -> impl Iterator<Item = usize> {
        let head = Some(self.head_index()).filter(|&head| head != Self::EMBEDDING);
        let blocks = (0..self.num_blocks).rev().map(|layer| self.block_index(layer));
        let all = head
            .into_iter()
            .chain([self.final_norm_index()])
            .chain(blocks)
            .chain([Self::EMBEDDING]);
        all.filter(|&flat| self.flats[flat].len > 0)
    }

    /// Returns every tensor with the index of its buffer.
    pub fn segments(&self) -> impl Iterator<Item = (usize, &Segment)> {
        self.flats
            .iter()
            .enumerate()
            .flat_map(|(flat, layout)| layout.segments.iter().map(move |segment| (flat, segment)))
    }

    /// Returns the number of elements of all buffers.
    pub fn len(&self) -> usize {
        self.flats.iter().map(|flat| flat.len).sum()
    }

    /// Returns whether the layout is empty, which is false for every model.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
