//! AdamW over a model's flat buffers, with clipping by the global gradient norm. It updates whole buffers, or a rank's
//! local shard (`data_parallel.rs`).

use std::ops::Range;

use half::bf16;
use moh_kernels::adamw::remainder::join;
use moh_kernels::adamw::{AdamW, AdamWUpdate};
use moh_kernels::{AnyView, Backend, ElementType, Memory, Purpose, for_element};
use moh_model::parameters::{OnBuffer, overlap};
use moh_model::tensors::TensorGroup;
use moh_model::{FlatBuffers, Model, ModelLayout, Segment, Shard, StepSums};
use serde::{Deserialize, Serialize};

use crate::Result;

/// AdamW with decoupled weight decay, and the limit of the gradient norm; each key of a recipe has a default.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Hyperparameters {
    /// Decay of the first moment; default: 0.9.
    pub beta1: f64,
    /// Decay of the second moment; default: 0.95.
    pub beta2: f64,
    /// Addend of the root of the second moment; default: 1e-8.
    pub eps: f64,
    /// Weight decay of matrices, multiplied by the learning rate; default: 0.1.
    pub weight_decay: f64,
    /// Maximum global gradient norm, above 0; default: 1.0. A very large value disables clipping.
    pub clip_norm: f64,
    /// Factors of the learning rate by group of tensors.
    pub groups: GroupFactors,
}

/// Factors of the learning rate by group of tensors; default: 1 for each group. A group with the factor 0 is frozen:
/// its weights and moments do not change, and its matrices get no gradients. The gradients of its norms do
/// not count in the gradient norm.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GroupFactors {
    /// Factor of queries, keys, values, the output projection, and norms of queries and keys.
    pub attention: f64,
    /// Factor of the matrices of routers.
    pub router: f64,
    /// Factor of MLPs, norms, embedding and head.
    pub rest: f64,
}

impl Default for GroupFactors {
    fn default() -> Self {
        GroupFactors { attention: 1.0, router: 1.0, rest: 1.0 }
    }
}

impl GroupFactors {
    /// Returns the factor of a tensor.
    pub fn of(&self, segment: &Segment) -> f64 {
        match TensorGroup::of(&segment.name) {
            TensorGroup::Attention => self.attention,
            TensorGroup::Router => self.router,
            TensorGroup::Rest => self.rest,
        }
    }

    /// Returns whether a tensor is frozen.
    pub fn freezes(&self, segment: &Segment) -> bool {
        self.of(segment) == 0.0
    }
}

impl Default for Hyperparameters {
    fn default() -> Self {
        Hyperparameters {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            clip_norm: 1.0,
            groups: GroupFactors::default(),
        }
    }
}

/// The kind of a tensor of the training state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorKind {
    /// The exact f32 weight.
    Weight,
    /// AdamW's first moment.
    FirstMoment,
    /// AdamW's second moment.
    SecondMoment,
}

impl TensorKind {
    /// All kinds.
    pub const ALL: [TensorKind; 3] =
        [TensorKind::Weight, TensorKind::FirstMoment, TensorKind::SecondMoment];
}

/// The optimiser's state or a shard of it: the moments and, for bf16 weights, the 16 bits that
/// rounding removed from the f32 weights.
pub struct OptimizerState<B: Memory> {
    /// The 16 bits by which bf16 weights differ from the f32 weights; `None` for f32 weights.
    pub remainder: Option<FlatBuffers<B>>,
    /// Running mean of the gradients.
    pub first_moment: FlatBuffers<B>,
    /// Running mean of the squared gradients.
    pub second_moment: FlatBuffers<B>,
    shard: Shard,
}

impl<B: Memory> OptimizerState<B> {
    /// Creates zero moments of `shard`, for weights of type `weights` without a rounding error.
    pub fn zeros(
        memory: &B,
        layout: &ModelLayout,
        shard: Shard,
        weights: ElementType,
        moments: ElementType,
    ) -> Result<Self> {
        let remainder = || FlatBuffers::remainders(memory, layout, shard);
        let remainder = || memory.for_purpose(Purpose::Remainders, remainder);
        let moment = || FlatBuffers::zeros_of(memory, moments, layout, shard);
        Ok(OptimizerState {
            remainder: (weights == ElementType::BF16).then(remainder).transpose()?,
            first_moment: memory.for_purpose(Purpose::Moments, moment)?,
            second_moment: memory.for_purpose(Purpose::Moments, moment)?,
            shard,
        })
    }
}

impl<B: Backend> OptimizerState<B> {
    /// Creates zero moments of `shard` for the given weights.
    pub fn new(model: &Model<B>, moments: ElementType, shard: Shard) -> Result<Self> {
        Self::zeros(model.backend(), model.layout(), shard, model.element(), moments)
    }

    /// Returns the local shard of every flat buffer, which this rank updates.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// Adds the squares of the shard's gradients to `sums`, except in frozen groups. Each tensor counts once over all
    /// ranks.
    pub fn add_squared_norm(
        &self,
        backend: &B,
        layout: &ModelLayout,
        gradients: &FlatBuffers<B>,
        groups: &GroupFactors,
        sums: &mut StepSums<B>,
    ) -> Result<()> {
        let counts = |segment: &Segment| segment.counted && !groups.freezes(segment);
        let counted = layout.segments().filter(|(_, segment)| counts(segment));
        let parts = counted.filter_map(|(flat, segment)| {
            let part = overlap(&segment.range, &self.first_moment.local_range(flat));
            (!part.is_empty()).then(|| gradients.view(flat, part))
        });
        squared_norms(backend, &parts.collect::<Vec<_>>(), sums.squared_norm_mut())
    }

    /// Returns the f32 weights of a range of a buffer, within the local shard.
    pub fn exact_weights(
        &self,
        model: &Model<B>,
        flat: usize,
        range: Range<usize>,
    ) -> Result<Vec<f32>> {
        let backend = model.backend();
        let mut weights = model.weights().read_range(backend, flat, range.clone())?;
        let Some(remainder) = &self.remainder else { return Ok(weights) };
        let mut left = vec![0; weights.len()];
        backend.download::<i16>(remainder.view(flat, range).typed(), &mut left)?;
        for (weight, left) in weights.iter_mut().zip(left) {
            *weight = join(bf16::from_f32(*weight), left);
        }
        Ok(weights)
    }

    /// Resets the moments; called at the start of each stage.
    pub fn reset(&mut self, backend: &B) -> Result<()> {
        self.first_moment.zero(backend)?;
        self.second_moment.zero(backend)?;
        Ok(())
    }
}

impl<B: Backend + Clone> OptimizerState<B> {
    /// Updates the shard of the model's weights by one step. `step.weight_decay` applies only to matrices. `groups` has
    /// factors of `step.learning_rate`. Calls `updated` with the weights as soon as the shard of a buffer is updated.
    pub fn update(
        &mut self,
        model: &mut Model<B>,
        gradients: &FlatBuffers<B>,
        step: &AdamW,
        groups: &GroupFactors,
        updated: OnBuffer<'_, B>,
    ) -> Result<()> {
        let backend = model.backend().clone();
        let of = |segment: &Segment| (segment.decays, groups.of(segment));
        let runs: Vec<_> = model.layout().flats.iter().map(|flat| flat.runs(of)).collect();
        for (flat, runs) in runs.into_iter().enumerate() {
            let local = self.first_moment.local_range(flat);
            for (range, (decays, factor)) in runs {
                let range = overlap(&range, &local);
                if range.is_empty() || factor == 0.0 {
                    continue;
                }
                let weight_decay = if decays { step.weight_decay } else { 0.0 };
                let learning_rate = factor * step.learning_rate;
                let gradients = gradients.view(flat, range.clone());
                let weights = model.weights_mut().view_mut(flat, range.clone());
                let remainder = self.remainder.as_mut();
                let remainder = remainder.map(|left| left.view_mut(flat, range.clone()).typed());
                let first_moment = self.first_moment.view_mut(flat, range.clone());
                let second_moment = self.second_moment.view_mut(flat, range);
                let (weight, gradient) = (weights.element(), gradients.element());
                for_element!(T: weight, G: gradient, M: first_moment.element() => {
                    backend.adamw::<T, G, M>(AdamWUpdate {
                        step: &AdamW { weight_decay, learning_rate, ..*step },
                        gradients: gradients.typed(),
                        weights: weights.typed(),
                        remainder,
                        first_moment: first_moment.typed(),
                        second_moment: second_moment.typed(),
                    })
                })?;
            }
            updated(model.weights_mut(), flat)?;
        }
        Ok(())
    }

    /// Fills the shard of the model's weights and of the state with the values of `read`. For each kind, `read` writes
    /// a range of the elements of a tensor's local slice.
    pub fn fill<E: From<moh_model::Error>>(
        &mut self,
        model: &mut Model<B>,
        read: impl Fn(TensorKind, &Segment, Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (backend, layout) = (model.backend().clone(), model.layout().clone());
        let shard = self.shard;
        let remainder = &mut self.remainder;
        model.weights_mut().fill_shard(
            &backend,
            &layout,
            shard,
            |(flat, segment), part, exact| -> Result<(), E> {
                read(TensorKind::Weight, segment, part.clone(), exact)?;
                let Some(remainder) = &mut *remainder else { return Ok(()) };
                let start = segment.range.start;
                let left = remainder.view_mut(flat, start + part.start..start + part.end);
                Ok(left.fill_from_f32(&backend, exact).map_err(moh_model::Error::from)?)
            },
        )?;
        for (kind, moment) in [
            (TensorKind::FirstMoment, &mut self.first_moment),
            (TensorKind::SecondMoment, &mut self.second_moment),
        ] {
            let read = |(_, segment): (usize, &Segment), part, values: &mut [f32]| {
                read(kind, segment, part, values)
            };
            moment.fill_shard(&backend, &layout, shard, read)?;
        }
        Ok(())
    }

    /// Replaces the local slice of the tensor of this buffer and segment. Sets the model's weights, and their rounding
    /// errors within the shard. All data ranks pass the same values.
    pub fn set_weights(
        &mut self,
        model: &mut Model<B>,
        (flat, segment): (usize, &Segment),
        exact: &[f32],
    ) -> Result<()> {
        let backend = model.backend().clone();
        let weights = model.weights_mut().view_mut(flat, segment.range.clone());
        weights.fill_from_f32(&backend, exact)?;
        let Some(remainder) = &mut self.remainder else { return Ok(()) };
        let part = overlap(&segment.range, &remainder.local_range(flat));
        if part.is_empty() {
            return Ok(());
        }
        let start = segment.range.start;
        let own = &exact[part.start - start..part.end - start];
        Ok(remainder.view_mut(flat, part).fill_from_f32(&backend, own)?)
    }
}

/// Adds the squares of elements of any type to `out`, `[1]`.
pub(crate) fn squared_norms<B: Backend>(
    backend: &B,
    parts: &[AnyView<'_, B>],
    mut out: B::ViewMut<'_, f64>,
) -> Result<()> {
    for element in ElementType::ALL {
        let typed = parts.iter().filter(|part| part.element() == element);
        for_element!(T: element => {
            let typed: Vec<_> = typed.map(|part| part.typed::<T>()).collect();
            if !typed.is_empty() {
                backend.squared_norms::<T>(&typed, B::reborrow_mut(&mut out))?;
            }
        });
    }
    Ok(())
}
