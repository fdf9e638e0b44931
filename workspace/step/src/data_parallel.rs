//! Data parallelism with a sharded optimiser (ZeRO-1, arXiv 1910.02054). Data ranks have the same part of a model, with
//! whole weights and gradients. They compute different micro-batches, and each rank updates its local shard of every
//! flat buffer.
//!
//! A step has two collectives per buffer, both overlapped with computation:
//! - The gradients are reduce-scattered as soon as the step's last backward pass has completed them.
//! - The updated weights are all-gathered while the optimiser updates the next buffer, until the next forward pass
//!   first uses them.
//!
//! All ranks start the collectives in the same order: the order of the backward pass, then the order of the buffers.
//!
//! Tensor-parallel ranks have copies of norms, and NCCL may add the same gradients in a different order in each group
//! of data ranks. So the first tensor-parallel rank broadcasts its copies when the weights are complete.

use std::ops::Range;

use moh_comm::{Group, Pending, Reduce};
use moh_kernels::{AnyBuffer, AnyView, AnyViewMut, Backend, for_element};
use moh_model::parameters::ParameterRange;
use moh_model::{FlatBuffers, Model, ModelLayout, Result, Shard};

use crate::step_buffers::Rounded;

/// Gradients of a reduce-scatter in flight.
enum InFlight<B: Backend> {
    /// The buffer itself.
    Exact(Pending<AnyBuffer<B>>),
    /// The buffer, and a copy rounded to bf16. At the end, the copy's local shard replaces the buffer's.
    Rounded(AnyBuffer<B>, Pending<AnyBuffer<B>>),
}

/// A rank's collectives with the other data ranks, and the buffers in flight.
pub(crate) struct DataParallel<B: Backend> {
    backend: B,
    group: Group,
    /// The group of the first and the last pipeline stage if both have a tied head; `None` on other
    /// stages.
    tied_head: Option<Group>,
    /// The ranks with copies of replicated tensors.
    tensor: Group,
    replicated: Vec<Vec<Range<usize>>>,
    gradients: Vec<Option<InFlight<B>>>,
    weights: Vec<Option<Pending<AnyBuffer<B>>>>,
    /// If gradients are rounded, a buffer for the copy of each buffer of gradients.
    copies: Vec<Option<AnyBuffer<B>>>,
}

impl<B: Backend + Clone> DataParallel<B> {
    /// Prepares the collectives between the ranks of `group`. If `rounded` has buffers, gradients
    /// are rounded to bf16, which halves the traffic.
    pub fn new(model: &Model<B>, group: &Group, rounded: Rounded<B>) -> Self {
        let (backend, flats) = (model.backend().clone(), &model.layout().flats);
        let replicated = flats.iter().map(|flat| {
            let segments = flat.segments.iter().filter(|segment| segment.replicated);
            segments.map(|segment| segment.range.clone()).collect()
        });
        DataParallel {
            group: group.clone(),
            tied_head: model.parallel().tied_head().cloned(),
            tensor: model.parallel().tensor().clone(),
            replicated: replicated.collect(),
            gradients: flats.iter().map(|_| None).collect(),
            weights: flats.iter().map(|_| None).collect(),
            copies: rounded.copies,
            backend,
        }
    }

    /// Starts the reduce-scatter of a buffer with complete gradients on this rank. Skips the gradient of a head tied
    /// across two stages, which [`Self::finish_gradients`] completes.
    pub fn start_gradients(&mut self, gradients: &mut FlatBuffers<B>, flat: usize) -> Result<()> {
        match self.tied_head {
            Some(_) if flat == ModelLayout::EMBEDDING => Ok(()),
            _ => self.start_reduce_scatter(gradients, flat),
        }
    }

    /// Calls [`Self::start_gradients`] with zeros for every buffer, in the order of a backward pass. For a rank without
    /// a micro-batch in a step.
    pub fn start_zero_gradients(
        &mut self,
        gradients: &mut FlatBuffers<B>,
        layout: &ModelLayout,
    ) -> Result<()> {
        for flat in layout.backward_order() {
            let used = ParameterRange { buffer: flat, range: layout.flats[flat].used() };
            gradients.clear_stale(&self.backend, &used)?;
            gradients.mark_written(flat);
            self.start_gradients(gradients, flat)?;
        }
        Ok(())
    }

    /// Reduces the gradient of a head tied across two stages, and waits for all gradients. Then the local shard of each
    /// buffer has the sums over the ranks; the rest is undefined.
    ///
    /// # Errors
    /// Fails if the device or another rank failed; the buffers in flight are then lost.
    pub fn finish_gradients(&mut self, gradients: &mut FlatBuffers<B>) -> Result<()> {
        if let Some(stages) = &self.tied_head {
            let buffer = gradients.flat_mut(ModelLayout::EMBEDDING);
            for_element!(G: buffer.element() => {
                stages.all_reduce::<B, G>(buffer.whole_mut().typed(), Reduce::Sum)
            })?;
            self.start_reduce_scatter(gradients, ModelLayout::EMBEDDING)?;
        }
        (0..self.gradients.len()).try_for_each(|flat| self.wait_for_gradients(gradients, flat))
    }

    fn start_reduce_scatter(&mut self, gradients: &mut FlatBuffers<B>, flat: usize) -> Result<()> {
        if self.group.size() == 1 {
            return Ok(());
        }
        let exact = gradients.take(flat);
        self.gradients[flat] = Some(match self.copies[flat].take() {
            Some(mut copy) => {
                convert(&self.backend, exact.whole(), copy.whole_mut())?;
                InFlight::Rounded(exact, self.group.start_reduce_scatter(copy, Reduce::Sum)?)
            }
            None => InFlight::Exact(self.group.start_reduce_scatter(exact, Reduce::Sum)?),
        });
        Ok(())
    }

    fn wait_for_gradients(&mut self, gradients: &mut FlatBuffers<B>, flat: usize) -> Result<()> {
        let buffer = match self.gradients[flat].take() {
            None => return Ok(()),
            Some(InFlight::Exact(pending)) => pending.wait()?,
            Some(InFlight::Rounded(mut exact, pending)) => {
                let copy = pending.wait()?;
                let shard = Shard::from_group(&self.group).range(exact.len());
                convert(&self.backend, copy.view(shard.clone()), exact.view_mut(shard))?;
                self.copies[flat] = Some(copy);
                exact
            }
        };
        gradients.put(flat, buffer);
        Ok(())
    }

    /// Starts the all-gather of a buffer of weights with an updated local shard.
    pub fn start_weights(&mut self, weights: &mut FlatBuffers<B>, flat: usize) -> Result<()> {
        if self.group.size() > 1 && !weights.flat(flat).is_empty() {
            self.weights[flat] = Some(self.group.start_all_gather(weights.take(flat))?);
        }
        Ok(())
    }

    /// Waits until a buffer of weights is complete; on a GPU the device waits, not the caller.
    ///
    /// # Errors
    /// Fails if the all-gather failed; the buffer is then lost.
    pub fn wait_for_weights(&mut self, weights: &mut FlatBuffers<B>, flat: usize) -> Result<()> {
        if let Some(pending) = self.weights[flat].take() {
            let mut buffer = pending.wait()?;
            for range in &self.replicated[flat] {
                let view = buffer.view_mut(range.clone());
                for_element!(T: view.element() => self.tensor.broadcast::<B, T>(view.typed(), 0))?;
            }
            weights.put(flat, buffer);
        }
        Ok(())
    }

    /// Calls [`Self::wait_for_weights`] for every buffer.
    pub fn wait_for_all_weights(&mut self, weights: &mut FlatBuffers<B>) -> Result<()> {
        (0..self.weights.len()).try_for_each(|flat| self.wait_for_weights(weights, flat))
    }
}

/// Converts gradients between their type and the type of messages.
fn convert<B: Backend>(backend: &B, from: AnyView<'_, B>, to: AnyViewMut<'_, B>) -> Result<()> {
    Ok(for_element!(X: from.element(), Y: to.element() => {
        backend.convert::<X, Y>(from.typed(), to.typed())
    })?)
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use half::bf16;
    use moh_comm::RankLayout;
    use moh_kernels::{Cpu, ElementType};
    use moh_model::{ModelConfig, ModelParallel};

    use super::*;
    use moh_testkit::ranks;
    use moh_testkit::tiny_model;

    fn config() -> ModelConfig {
        tiny_model(2, 21, true)
    }

    struct Rank {
        number: usize,
        model: Model<Cpu>,
        gradients: FlatBuffers<Cpu>,
        exchange: DataParallel<Cpu>,
    }

    /// Runs `work` on `data` data ranks of `stages` pipeline stages of `tensor` ranks each, as threads.
    fn on_ranks(
        [tensor, data, stages]: [usize; 3],
        reduce: ElementType,
        work: impl Fn(&mut Rank) + Sync,
    ) {
        ranks::on_ranks(tensor * data * stages, |world| {
            let all = world.group().clone();
            let groups = RankLayout::new(all.size(), tensor, stages).unwrap().groups(&all).unwrap();
            let parallel =
                ModelParallel::new(&config(), groups.pipeline, 1, groups.tensor).unwrap();
            let model =
                Model::zeros_of_part(Cpu, ElementType::F32, config(), 8, parallel, data).unwrap();
            let (f32, layout) = (ElementType::F32, model.layout());
            let gradients = FlatBuffers::zeros(&Cpu, f32, layout).unwrap();
            let rounded = Rounded::new(&Cpu, layout, data, f32, reduce).unwrap();
            let exchange = DataParallel::new(&model, &groups.data, rounded);
            work(&mut Rank { number: all.rank(), model, gradients, exchange });
        });
    }

    /// Returns the gradient of an element on a rank, which bf16 cannot represent exactly.
    fn gradient(rank: usize, at: usize) -> f32 {
        (rank + 1) as f32 + at as f32 / 1024.0
    }

    impl Rank {
        fn fill_gradients(&mut self) {
            for flat in 0..self.model.layout().flats.len() {
                let buffer = self.gradients.flat_mut(flat);
                let values: Vec<f32> =
                    (0..buffer.len()).map(|at| gradient(self.number, at)).collect();
                buffer.whole_mut().fill_from_f32(&Cpu, &values).unwrap();
            }
        }

        fn start_gradients(&mut self) {
            for flat in self.model.layout().backward_order() {
                self.exchange.start_gradients(&mut self.gradients, flat).unwrap();
            }
        }

        /// Compares the gradients of the local shard of every buffer, by buffer and position.
        fn assert_gradients(&self, expected: impl Fn(usize, usize) -> f32) {
            for flat in self.model.layout().backward_order() {
                let buffer: &[f32] = self.gradients.flat(flat).whole().typed();
                for at in Shard::from_group(&self.exchange.group).range(buffer.len()) {
                    assert_eq!(buffer[at], expected(flat, at), "{at} of buffer {flat}");
                }
            }
        }

        /// Fills this rank's shard of the weights with its number, and starts to gather all weights.
        fn start_weights(&mut self) {
            for flat in 0..self.model.layout().flats.len() {
                let weights = self.model.weights_mut();
                let buffer = weights.flat_mut(flat);
                let shard = Shard::from_group(&self.exchange.group).range(buffer.len());
                buffer.view_mut(shard).typed::<f32>().fill(self.number as f32);
                self.exchange.start_weights(weights, flat).unwrap();
            }
        }
    }

    #[test]
    fn gradients_are_summed_for_the_local_shard_exactly_or_rounded_once() {
        for reduce in [ElementType::F32, ElementType::BF16] {
            on_ranks([1, 3, 1], reduce, move |rank| {
                for _step in 0..2 {
                    rank.fill_gradients();
                    rank.start_gradients();
                    let unused = || rank.gradients.flat(1).len();
                    assert!(catch_unwind(AssertUnwindSafe(unused)).is_err());
                    rank.exchange.finish_gradients(&mut rank.gradients).unwrap();
                    rank.assert_gradients(|_, at| {
                        let of = |rank| gradient(rank, at);
                        let round = |value: f32| bf16::from_f32(value).to_f32();
                        match reduce {
                            ElementType::F32 => of(0) + of(1) + of(2),
                            ElementType::BF16 => round(round(of(0)) + round(of(1)) + round(of(2))),
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn a_rank_without_micro_batches_adds_zeros() {
        on_ranks([1, 2, 1], ElementType::F32, |rank| {
            rank.fill_gradients();
            if rank.number == 1 {
                rank.gradients.mark_stale();
                let Rank { model, gradients, exchange, .. } = rank;
                exchange.start_zero_gradients(gradients, model.layout()).unwrap();
            } else {
                rank.start_gradients();
            }
            rank.exchange.finish_gradients(&mut rank.gradients).unwrap();
            let layout = rank.model.layout();
            rank.assert_gradients(|flat, at| match layout.flats[flat].used().contains(&at) {
                true => gradient(0, at),
                // Padding does not change.
                false => gradient(0, at) + gradient(1, at),
            });
        });
    }

    #[test]
    fn a_tied_head_is_summed_over_both_stages_after_the_last_pass() {
        // Ranks 0 and 1 are the first stage, ranks 2 and 3 the last.
        on_ranks([1, 2, 2], ElementType::F32, |rank| {
            rank.fill_gradients();
            rank.start_gradients();
            // Not taken until both stages are done.
            assert!(!rank.gradients.flat(ModelLayout::EMBEDDING).is_empty());
            rank.exchange.finish_gradients(&mut rank.gradients).unwrap();
            let stage = rank.number / 2;
            rank.assert_gradients(|flat, at| {
                let of = |rank| gradient(rank, at);
                match flat {
                    ModelLayout::EMBEDDING => of(0) + of(1) + of(2) + of(3),
                    _ => of(2 * stage) + of(2 * stage + 1),
                }
            });
        });
    }

    #[test]
    fn copies_of_norms_become_those_of_the_first_tensor_parallel_rank() {
        // Ranks 2 d and 2 d + 1 are the tensor-parallel ranks of data rank d.
        on_ranks([2, 3, 1], ElementType::F32, |rank| {
            rank.start_weights();
            let Rank { number, model, exchange, .. } = rank;
            exchange.wait_for_all_weights(model.weights_mut()).unwrap();
            let mut copies = 0;
            for flat in 0..model.layout().flats.len() {
                let buffer: &[f32] = model.weights().flat(flat).whole().typed();
                for segment in &model.layout().flats[flat].segments {
                    let owner = if segment.replicated { 0 } else { *number % 2 };
                    let of_owner = |value: &f32| *value as usize % 2 == owner;
                    assert!(buffer[segment.range.clone()].iter().all(of_owner), "{}", segment.name);
                    copies += usize::from(segment.replicated);
                }
            }
            assert_eq!(copies, 5, "two norms of each block, and the last one");
        });
    }

    #[test]
    fn weights_are_gathered_from_all_shards() {
        on_ranks([1, 3, 1], ElementType::F32, |rank| {
            rank.start_weights();
            let Rank { model, exchange, .. } = rank;
            // First a buffer that is used first, then the other buffers.
            exchange.wait_for_weights(model.weights_mut(), 1).unwrap();
            assert!(!model.weights().flat(1).is_empty());
            exchange.wait_for_all_weights(model.weights_mut()).unwrap();
            for flat in 0..model.layout().flats.len() {
                let buffer: &[f32] = model.weights().flat(flat).whole().typed();
                let owner = |at: usize| (at * 3 / buffer.len()) as f32;
                let expected: Vec<f32> = (0..buffer.len()).map(owner).collect();
                assert_eq!(buffer, expected);
            }
        });
    }
}
