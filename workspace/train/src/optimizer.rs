//! AdamW over a model's flat buffers, with clipping by the global gradient norm.

use moh_kernels::adamw::AdamW;
use moh_kernels::{Backend, Element, Scalar};
use moh_model::Model;
use moh_model::layout::ModelLayout;
use moh_model::parameters::FlatBuffers;

use crate::Error;

/// The optimiser's state: moments, and the exact f32 weights where the model's are rounded.
pub struct OptimizerState<B: Backend, M: Element> {
    pub(crate) master: Option<FlatBuffers<B, f32>>,
    pub(crate) first_moment: FlatBuffers<B, M>,
    pub(crate) second_moment: FlatBuffers<B, M>,
    squared_norm: B::Buffer<f64>,
}

impl<B: Backend, M: Element> OptimizerState<B, M> {
    /// Fresh moments; the master copy, where `T` is not f32, is the model's weights until it is
    /// filled with exact ones.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new<T: Element>(model: &Model<B, T>) -> Result<Self, Error> {
        let (backend, layout) = (model.backend(), model.layout());
        let master = if T::DTYPE == f32::DTYPE {
            None
        } else {
            let mut master = FlatBuffers::zeros(backend, layout)?;
            let mut segments = layout.segments();
            master.fill(backend, layout, |_, values| {
                // Both walk the layout in the same order.
                if let Some((flat, segment)) = segments.next() {
                    values.copy_from_slice(&model.weights().read(backend, flat, segment)?);
                }
                Ok::<(), Error>(())
            })?;
            Some(master)
        };
        Ok(OptimizerState {
            master,
            first_moment: FlatBuffers::zeros(backend, layout)?,
            second_moment: FlatBuffers::zeros(backend, layout)?,
            squared_norm: backend.allocate(1).map_err(moh_model::Error::from)?,
        })
    }

    /// The global norm of the gradients, over every tensor that counts.
    ///
    /// # Errors
    /// When the device fails.
    pub fn gradient_norm<G: Element>(
        &mut self,
        backend: &B,
        layout: &ModelLayout,
        gradients: &FlatBuffers<B, G>,
    ) -> Result<f64, Error> {
        let kernel = moh_model::Error::from;
        backend.zero(B::view_mut(&mut self.squared_norm, 0..1)).map_err(kernel)?;
        for (flat, segment) in layout.segments().filter(|(_, segment)| segment.counted) {
            let part = gradients.view(flat, segment.range.clone());
            let out = B::view_mut(&mut self.squared_norm, 0..1);
            backend.squared_norm(part, out).map_err(kernel)?;
        }
        let mut squared = [0f64];
        backend.download(B::view(&self.squared_norm, 0..1), &mut squared).map_err(kernel)?;
        Ok(squared[0].sqrt())
    }

    /// Updates the model by one step, clipping by the norm that [`Self::gradient_norm`] found.
    /// `step.weight_decay` applies to matrices alone.
    ///
    /// # Errors
    /// When the device fails.
    pub fn update<T: Element, G: Element>(
        &mut self,
        model: &mut Model<B, T>,
        gradients: &FlatBuffers<B, G>,
        step: &AdamW,
    ) -> Result<(), Error>
    where
        B: Clone,
    {
        let backend = model.backend().clone();
        let runs: Vec<_> = model.layout().flats.iter().map(|flat| flat.decay_runs()).collect();
        for (flat, runs) in runs.into_iter().enumerate() {
            for (range, decays) in runs {
                let weight_decay = if decays { step.weight_decay } else { 0.0 };
                backend
                    .adamw(
                        &AdamW { weight_decay, ..*step },
                        B::view(&self.squared_norm, 0..1),
                        gradients.view(flat, range.clone()),
                        model.weights_mut().view_mut(flat, range.clone()),
                        self.master.as_mut().map(|master| master.view_mut(flat, range.clone())),
                        self.first_moment.view_mut(flat, range.clone()),
                        self.second_moment.view_mut(flat, range),
                    )
                    .map_err(moh_model::Error::from)?;
            }
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
