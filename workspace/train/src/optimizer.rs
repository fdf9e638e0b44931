//! AdamW over a model's flat buffers, with clipping by the global gradient norm. Ranks that see
//! different data each keep and update one shard of it (ZeRO-1, arXiv 1910.02054).

use moh_comm::Group;
use moh_kernels::adamw::AdamW;
use moh_kernels::{Backend, Element, Scalar};
use moh_model::layout::ModelLayout;
use moh_model::parameters::{FlatBuffers, Shard, overlap};
use moh_model::{Model, StepSums};

use crate::Error;

/// The optimiser's state, or a shard of it: moments, and the exact f32 weights where the model's are
/// rounded.
pub struct OptimizerState<B: Backend, M: Element> {
    pub(crate) master: Option<FlatBuffers<B, f32>>,
    pub(crate) first_moment: FlatBuffers<B, M>,
    pub(crate) second_moment: FlatBuffers<B, M>,
    shard: Shard,
}

impl<B: Backend, M: Element> OptimizerState<B, M> {
    /// Fresh moments of `shard`; the master copy, where `T` is not f32, is the model's weights until it
    /// is filled with exact ones.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new<T: Element>(model: &Model<B, T>, shard: Shard) -> Result<Self, Error> {
        let (backend, layout) = (model.backend(), model.layout());
        let master = if T::DTYPE == f32::DTYPE {
            None
        } else {
            let mut master = FlatBuffers::zeros_of(backend, layout, shard)?;
            for flat in 0..layout.flats.len() {
                let held = master.held(flat);
                let weights = model.weights().view(flat, held.clone());
                backend.convert(weights, master.view_mut(flat, held))?;
            }
            Some(master)
        };
        Ok(OptimizerState {
            master,
            first_moment: FlatBuffers::zeros_of(backend, layout, shard)?,
            second_moment: FlatBuffers::zeros_of(backend, layout, shard)?,
            shard,
        })
    }

    /// The part of every flat buffer that is updated here.
    pub fn shard(&self) -> Shard {
        self.shard
    }

    /// Adds the squares of the shard's gradients, of every tensor that counts, to `sums`.
    ///
    /// # Errors
    /// When the device fails.
    pub fn add_squared_norm<G: Element>(
        &self,
        backend: &B,
        layout: &ModelLayout,
        gradients: &FlatBuffers<B, G>,
        sums: &mut StepSums<B>,
    ) -> Result<(), Error> {
        for (flat, segment) in layout.segments().filter(|(_, segment)| segment.counted) {
            let part = overlap(&segment.range, &self.first_moment.held(flat));
            if !part.is_empty() {
                backend.squared_norm(gradients.view(flat, part), sums.squared_norm_mut())?;
            }
        }
        Ok(())
    }

    /// Updates the shard of the model's weights by one step, clipping by the norm in
    /// `sums`. `step.weight_decay` applies to matrices alone. Completing each of the
    /// model's buffers from the shards of `group` starts as soon as its own is updated.
    ///
    /// # Errors
    /// When the device or another rank fails.
    pub fn update<T: Element, G: Element>(
        &mut self,
        model: &mut Model<B, T>,
        gradients: &FlatBuffers<B, G>,
        sums: &StepSums<B>,
        step: &AdamW,
        group: &Group,
    ) -> Result<(), Error>
    where
        B: Clone,
    {
        let backend = model.backend().clone();
        let runs: Vec<_> = model.layout().flats.iter().map(|flat| flat.decay_runs()).collect();
        for (flat, runs) in runs.into_iter().enumerate() {
            let held = self.first_moment.held(flat);
            for (range, decays) in runs {
                let range = overlap(&range, &held);
                if range.is_empty() {
                    continue;
                }
                let weight_decay = if decays { step.weight_decay } else { 0.0 };
                backend.adamw(
                    &AdamW { weight_decay, ..*step },
                    sums.squared_norm(),
                    gradients.view(flat, range.clone()),
                    model.weights_mut().view_mut(flat, range.clone()),
                    self.master.as_mut().map(|master| master.view_mut(flat, range.clone())),
                    self.first_moment.view_mut(flat, range.clone()),
                    self.second_moment.view_mut(flat, range),
                )?;
            }
            model.weights_mut().start_all_gather(flat, group)?;
        }
        Ok(())
    }

    /// Forgets the moments, as each stage begins.
    ///
    /// # Errors
    /// When the device fails.
    pub fn reset(&mut self, backend: &B) -> Result<(), Error> {
        self.first_moment.zero(backend)?;
        self.second_moment.zero(backend)?;
        Ok(())
    }
}
