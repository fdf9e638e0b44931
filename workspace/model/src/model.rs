//! A model on a device: weights in flat buffers, and passes over micro-batches.

use moh_comm::{Group, Reduce};
use moh_kernels::cross_entropy::HeadGradients;
use moh_kernels::ranks::HeadRanks;
use moh_kernels::router::QueryNormRouter;
use moh_kernels::{Backend, Element};

use crate::activations::{Activations, Recompute, whole, whole_mut};
use crate::block::{RouterScale, Tokens};
use crate::layout::{ModelLayout, Segment};
use crate::model_parallel::ModelParallel;
use crate::parameters::FlatBuffers;
use crate::{Error, ModelConfig, rope};

/// Tags of the residual stream and of its gradient between stages.
const FORWARD: u32 = 3;
const BACKWARD: u32 = 4;

/// A Llama or Mixture-of-Head model with weights of type `T` on a device.
pub struct Model<B: Backend, T: Element> {
    pub(crate) backend: B,
    pub(crate) config: ModelConfig,
    pub(crate) layout: ModelLayout,
    pub(crate) parallel: ModelParallel,
    pub(crate) weights: FlatBuffers<B, T>,
    pub(crate) rope_cos: B::Buffer<f32>,
    pub(crate) rope_sin: B::Buffer<f32>,
}

/// Factors of a training pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossScale {
    /// 1 / (targets of the whole step).
    pub cross_entropy: f32,
    /// Weight of the balance loss over the micro-batches of the step: beta / micro-batches.
    pub balance: f32,
    /// Whether the loss reaches the gates through the selection (on in training).
    pub straight_through: bool,
}

/// Sums over a step, on the device: what passes and the optimiser add to.
pub struct StepSums<B: Backend> {
    /// Cross-entropy of the targets, balance loss averaged over layers, squared gradients.
    sums: B::Buffer<f64>,
}

impl<B: Backend> StepSums<B> {
    /// Zeros.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn new(backend: &B) -> Result<Self, Error> {
        Ok(StepSums { sums: backend.allocate(3)? })
    }

    /// Starts again from zero.
    ///
    /// # Errors
    /// When the device fails.
    pub fn zero(&mut self, backend: &B) -> Result<(), Error> {
        Ok(backend.zero(whole_mut::<B, f64>(&mut self.sums))?)
    }

    pub(crate) fn cross_entropy(&mut self) -> B::ViewMut<'_, f64> {
        B::view_mut(&mut self.sums, 0..1)
    }

    pub(crate) fn balance(&mut self) -> B::ViewMut<'_, f64> {
        B::view_mut(&mut self.sums, 1..2)
    }

    /// The squared norm of the gradients, `[1]`.
    pub fn squared_norm(&self) -> B::View<'_, f64> {
        B::view(&self.sums, 2..3)
    }

    /// The same, to add to.
    pub fn squared_norm_mut(&mut self) -> B::ViewMut<'_, f64> {
        B::view_mut(&mut self.sums, 2..3)
    }

    /// Adds up the sums of the ranks of `group`.
    ///
    /// # Errors
    /// When another rank has failed.
    pub fn all_reduce(&mut self, group: &Group) -> Result<(), Error> {
        Ok(group.all_reduce::<B, f64>(whole_mut::<B, f64>(&mut self.sums), Reduce::Sum)?)
    }

    /// Waits for the device, returns the sums of the cross-entropies of the targets, of the balance
    /// loss over micro-batches, and of the squared gradients.
    ///
    /// # Errors
    /// When the device fails.
    pub fn read(&self, backend: &B) -> Result<[f64; 3], Error> {
        let mut sums = [0f64; 3];
        backend.download(whole::<B, f64>(&self.sums), &mut sums)?;
        Ok(sums)
    }

    /// As [`Self::read`], of the two losses, and starts again from zero.
    ///
    /// # Errors
    /// When the device fails.
    pub fn take(&mut self, backend: &B) -> Result<(f64, f64), Error> {
        let [cross_entropy, balance, _] = self.read(backend)?;
        self.zero(backend)?;
        Ok((cross_entropy, balance))
    }
}

impl<B: Backend, T: Element> Model<B, T> {
    /// A model whose weights `source` writes, tensor by tensor, for positions below `positions`.
    ///
    /// # Errors
    /// What `source` refuses, counts of heads that do not fit, or a device without room.
    pub fn new<E: From<Error>>(
        backend: B,
        config: ModelConfig,
        positions: usize,
        source: impl FnMut(&Segment, &mut [f32]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let parallel = ModelParallel::whole(&config);
        Self::of_part(backend, config, positions, parallel, 1, source)
    }

    /// As [`Model::new`], the part of one rank of `parallel`, with buffers whose optimiser's state `ranks`
    /// ranks can share ([`ModelLayout::padded`]).
    ///
    /// # Errors
    /// As [`Model::new`].
    pub fn of_part<E: From<Error>>(
        backend: B,
        config: ModelConfig,
        positions: usize,
        parallel: ModelParallel,
        ranks: usize,
        source: impl FnMut(&Segment, &mut [f32]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let layout = ModelLayout::of_part(&config, ranks, parallel.part());
        let mut model = Self::zeros(backend, config, layout, parallel, positions)?;
        model.weights.fill(&model.backend, &model.layout, source)?;
        Ok(model)
    }

    fn zeros(
        backend: B,
        config: ModelConfig,
        layout: ModelLayout,
        parallel: ModelParallel,
        positions: usize,
    ) -> Result<Self, Error> {
        if let Some(moh) = &config.moh {
            moh.validate(config.num_attention_heads)?;
        }
        let weights = FlatBuffers::zeros(&backend, &layout)?;
        let (cos, sin) = rope::table(&config.rope, config.head_dim, positions);
        let mut rope_cos = backend.allocate(cos.len())?;
        let mut rope_sin = backend.allocate(sin.len())?;
        backend.upload(&cos, whole_mut::<B, f32>(&mut rope_cos))?;
        backend.upload(&sin, whole_mut::<B, f32>(&mut rope_sin))?;
        Ok(Model { backend, config, layout, parallel, weights, rope_cos, rope_sin })
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The part of a model that this one is, and the ranks that have the others.
    pub fn parallel(&self) -> &ModelParallel {
        &self.parallel
    }

    /// Whether this rank holds all of the model.
    pub fn is_whole(&self) -> bool {
        self.parallel.stages() == 1 && !self.is_shared()
    }

    /// The configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Changes the attention, which changes no weight; activations that were planned before do
    /// not fit any more.
    ///
    /// # Errors
    /// Counts of heads that do not fit.
    pub fn set_moh(&mut self, moh: Option<crate::MohConfig>) -> Result<(), Error> {
        if let Some(moh) = &moh {
            moh.validate(self.config.num_attention_heads)?;
        }
        self.config.moh = moh;
        Ok(())
    }

    /// Where each tensor lies.
    pub fn layout(&self) -> &ModelLayout {
        &self.layout
    }

    /// Positions that the model was made for.
    pub fn positions(&self) -> usize {
        B::len(&self.rope_cos) * 2 / self.config.head_dim
    }

    /// The weights.
    pub fn weights(&self) -> &FlatBuffers<B, T> {
        &self.weights
    }

    /// The tensor of a buffer that holds one, without padding.
    pub(crate) fn weights_of(&self, flat: usize) -> B::View<'_, T> {
        self.weights.view(flat, self.layout.flats[flat].used())
    }

    /// The weights, for the optimiser.
    pub fn weights_mut(&mut self) -> &mut FlatBuffers<B, T> {
        &mut self.weights
    }

    /// The router of a Mixture-of-Head model; `None` for a dense one, and for one that routes no
    /// head or selects all of them, which is dense.
    pub(crate) fn router(&self) -> Option<QueryNormRouter> {
        let moh = self.config.moh?;
        (self.routed_heads() > 0)
            .then_some(QueryNormRouter { shared_heads: moh.shared_heads, top_k: moh.routed_top_k })
    }

    /// Routed heads of a block, on all ranks; 0 in a dense model.
    pub(crate) fn routed_heads(&self) -> usize {
        self.config.moh.map_or(0, |moh| self.config.num_attention_heads - moh.shared_heads)
    }

    /// The forward pass up to the final norm, of this stage between its neighbours; adds the balance loss
    /// to `sums`. Weights that are on their way from other ranks are waited for where they are first
    /// used.
    ///
    /// # Errors
    /// A token id outside the vocabulary, or a failing device or rank.
    pub fn forward(
        &mut self,
        activations: &mut Activations<B, T>,
        sums: &mut StepSums<B>,
    ) -> Result<(), Error> {
        let Activations { shape, ids, first_key, stream, blocks, .. } = activations;
        let tokens =
            Tokens::<B> { shape: *shape, first_position: 0, first_key: first_key.as_ref() };
        let n = shape.tokens();
        let part = self.parallel.part().clone();
        let neighbours = self.parallel.pipeline().clone();
        let stage = neighbours.rank();
        if part.first {
            self.weights.arrive(ModelLayout::EMBEDDING)?;
            self.embed(n, ids, &mut stream[0], blocks.gathered())?;
        } else {
            neighbours.recv::<B, T>(whole_mut::<B, T>(&mut stream[0]), stage - 1, FORWARD)?;
        }
        let share = 1.0 / self.config.num_hidden_layers as f64;
        for layer in part.layers.clone() {
            let (before, after) = stream.split_at_mut(layer - part.layers.start + 1);
            let (input, output) = (&before[layer - part.layers.start], &mut after[0]);
            let mut block = blocks.of(layer);
            self.weights.arrive(self.layout.block_index(layer))?;
            self.attend(&tokens, input, &mut block, None)?;
            self.activate(n, &mut block)?;
            self.project_down(n, &mut block, output)?;
            // Every rank that shares the heads knows the loss.
            if let (Some(routing), 0) = (&block.kept.routing, part.tensor.rank) {
                self.backend.balance_loss(routing, share, sums.balance())?;
            }
        }
        let output = &stream[part.layers.len()];
        if !part.last {
            let output = whole::<B, T>(output);
            return Ok(neighbours.send::<B, T>(output, stage + 1, FORWARD)?);
        }
        self.weights.arrive(self.layout.final_norm_index())?;
        self.weights.arrive(self.layout.head_index())?;
        let held = self.stream_len(n);
        self.backend.rms_norm_forward(
            self.config.rms_norm_eps,
            B::view(output, 0..held),
            self.weights_of(self.layout.final_norm_index()),
            B::view_mut(&mut activations.final_normed, 0..held),
            B::view_mut(&mut activations.final_inv_rms, 0..self.token_share(n).held()),
        )?;
        Ok(())
    }

    /// The embedding of the tokens whose rows are held here.
    fn embed(
        &self,
        tokens: usize,
        ids: &B::Buffer<u32>,
        stream: &mut B::Buffer<T>,
        gathered: &mut Option<B::Buffer<T>>,
    ) -> Result<(), Error> {
        let (backend, width) = (&self.backend, self.config.hidden_size);
        let rows = self.parallel.part().tensor.vocabulary(&self.config);
        let (ids, table) = (whole::<B, u32>(ids), self.weights_of(ModelLayout::EMBEDDING));
        let Some(partial) = gathered else {
            return Ok(backend.embedding_forward(
                width,
                rows,
                ids,
                table,
                whole_mut::<B, T>(stream),
            )?);
        };
        let into = B::view_mut(partial, 0..tokens * width);
        backend.embedding_forward(width, rows, ids, table, into)?;
        let own = self.reduce_scatter(tokens, partial)?;
        let held = B::view_mut(stream, 0..own.len());
        Ok(backend.copy(B::view(partial, own), held)?)
    }

    /// Adds the cross-entropy of the uploaded micro-batch to `sums`, without gradients, on the stage that
    /// has the head.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn evaluate(
        &mut self,
        activations: &mut Activations<B, T>,
        sums: &mut StepSums<B>,
    ) -> Result<(), Error> {
        self.forward(activations, sums)?;
        match self.parallel.part().last {
            true => self.losses::<f32>(activations, sums, None),
            false => Ok(()),
        }
    }

    /// Adds the cross-entropy to `sums`; with gradients, writes that of the normed residual stream.
    fn losses<G: Element>(
        &self,
        activations: &mut Activations<B, T>,
        sums: &mut StepSums<B>,
        gradients: Option<HeadGradients<'_, B, T, G>>,
    ) -> Result<(), Error> {
        let Activations { shape, blocks, final_normed, targets, head_sums, .. } = activations;
        let (n, tensor) = (shape.tokens(), self.parallel.part().tensor);
        let all_reduce = &self.sum_over_ranks();
        self.backend.cross_entropy(
            &self.head_shape(n),
            self.gather(n, final_normed, blocks.gathered())?,
            self.weights_of(self.layout.head_index()),
            whole::<B, u32>(targets),
            whole_mut::<B, f32>(&mut activations.head_scratch),
            sums.cross_entropy(),
            gradients,
            self.is_shared().then(|| HeadRanks {
                rows: tensor.vocabulary(&self.config),
                rank: (tensor.rank, tensor.ranks),
                sums: whole_mut::<B, f64>(head_sums),
                all_reduce,
            }),
        )?;
        Ok(())
    }

    /// Forward and backward over the uploaded micro-batch: adds its losses to `sums` and its
    /// gradients to `gradients`.
    ///
    /// # Errors
    /// As [`Model::forward`] and [`Model::backward`].
    pub fn forward_backward<G: Element>(
        &mut self,
        activations: &mut Activations<B, T>,
        gradients: &mut FlatBuffers<B, G>,
        scale: LossScale,
        sums: &mut StepSums<B>,
    ) -> Result<(), Error> {
        self.forward(activations, sums)?;
        self.backward(activations, gradients, scale, sums, None)
    }

    /// The backward pass after a forward pass, of this stage between its neighbours: adds the
    /// cross-entropy to `sums` and the gradients to `gradients`. With `reduce`, of a step's last
    /// micro-batch, the sum of each buffer over the group's ranks starts as soon as the buffer is
    /// complete; that of a tied head on two stages waits for [`Model::reduce_tied_head`].
    ///
    /// # Errors
    /// A failing device or rank; activations planned without a backward pass are refused.
    pub fn backward<G: Element>(
        &self,
        activations: &mut Activations<B, T>,
        gradients: &mut FlatBuffers<B, G>,
        scale: LossScale,
        sums: &mut StepSums<B>,
        reduce: Option<&Group>,
    ) -> Result<(), Error> {
        let complete = |gradients: &mut FlatBuffers<B, G>, flat| match reduce {
            Some(group) => {
                self.add_up_replicated(gradients, flat)?;
                gradients.start_reduce_scatter(flat, group)
            }
            None => Ok(()),
        };
        let part = self.parallel.part();
        let (neighbours, layout) = (self.parallel.pipeline(), &self.layout);
        if part.last {
            self.head_backward(activations, gradients, scale, sums)?;
            if layout.head_index() != ModelLayout::EMBEDDING {
                complete(gradients, layout.head_index())?;
            }
            complete(gradients, layout.final_norm_index())?;
        }
        let Activations { shape, recompute, stream, blocks, backward, .. } = activations;
        let Some(scratch) = backward else {
            return Err(Error::NotPlannedForTraining);
        };
        if !part.last {
            let d_stream = whole_mut::<B, T>(&mut scratch.d_stream);
            neighbours.recv::<B, T>(d_stream, neighbours.rank() + 1, BACKWARD)?;
        }
        let n = shape.tokens();
        let first_key = activations.first_key.as_ref();
        let tokens = Tokens::<B> { shape: *shape, first_position: 0, first_key };
        let router = RouterScale {
            balance_weight: scale.balance / self.config.num_hidden_layers as f32,
            straight_through: scale.straight_through,
        };
        for layer in part.layers.clone().rev() {
            let (input, mut block) = (&stream[layer - part.layers.start], blocks.of(layer));
            match recompute {
                Recompute::None => {}
                Recompute::Cheap => self.recompute_norms(n, input, &mut block)?,
                Recompute::Block => {
                    self.attend(&tokens, input, &mut block, None)?;
                    self.project_up(n, &mut block)?;
                }
            }
            self.block_backward(&tokens, input, block, scratch, gradients, router)?;
            complete(gradients, layout.block_index(layer))?;
        }
        if !part.first {
            let d_stream = whole::<B, T>(&scratch.d_stream);
            return Ok(neighbours.send::<B, T>(d_stream, neighbours.rank() - 1, BACKWARD)?);
        }
        let embedding = &layout.flats[ModelLayout::EMBEDDING];
        self.backend.embedding_backward(
            self.config.hidden_size,
            part.tensor.vocabulary(&self.config),
            whole::<B, u32>(&activations.ids),
            self.gather(n, &scratch.d_stream, blocks.gathered())?,
            gradients.view_mut(ModelLayout::EMBEDDING, embedding.used()),
        )?;
        match self.parallel.ends() {
            Some(_) => Ok(()),
            None => complete(gradients, ModelLayout::EMBEDDING),
        }
    }

    /// From the targets to the gradient of the residual stream after the last block.
    fn head_backward<G: Element>(
        &self,
        activations: &mut Activations<B, T>,
        gradients: &mut FlatBuffers<B, G>,
        scale: LossScale,
        sums: &mut StepSums<B>,
    ) -> Result<(), Error> {
        let Some(mut scratch) = activations.backward.take() else {
            return Err(Error::NotPlannedForTraining);
        };
        let (backend, layout) = (&self.backend, &self.layout);
        let (n, width) = (activations.shape.tokens(), self.config.hidden_size);
        let head = layout.head_index();
        let head_gradients = HeadGradients::<B, T, G> {
            scale: scale.cross_entropy,
            d_x: B::view_mut(&mut scratch.d_branch, 0..n * width),
            d_weight: gradients.view_mut(head, layout.flats[head].used()),
        };
        let found = self.losses(activations, sums, Some(head_gradients));
        let Activations { stream, backward, .. } = activations;
        let scratch = backward.insert(scratch);
        found?;
        backend.zero(whole_mut::<B, T>(&mut scratch.d_stream))?;
        let final_norm = layout.final_norm_index();
        let own = self.reduce_scatter(n, &mut scratch.d_branch)?;
        let held = own.len();
        backend.rms_norm_backward(
            B::view(&stream[self.parallel.part().layers.len()], 0..held),
            self.weights_of(final_norm),
            B::view(&activations.final_inv_rms, 0..self.token_share(n).held()),
            B::view(&scratch.d_branch, own),
            B::view_mut(&mut scratch.d_stream, 0..held),
            gradients.view_mut(final_norm, layout.flats[final_norm].used()),
        )?;
        Ok(())
    }

    /// Adds up what ranks that share the other tensors have of the gradients of those that they all hold.
    fn add_up_replicated<G: Element>(
        &self,
        gradients: &mut FlatBuffers<B, G>,
        flat: usize,
    ) -> Result<(), Error> {
        let segments = self.layout.flats[flat].segments.iter();
        for segment in segments.filter(|segment| segment.replicated) {
            let part = gradients.view_mut(flat, segment.range.clone());
            self.parallel.tensor().all_reduce::<B, G>(part, Reduce::Sum)?;
        }
        Ok(())
    }

    /// Starts the sums that the last backward pass of a step starts, in the same order, on a rank that
    /// takes no pass.
    ///
    /// # Errors
    /// When another rank has failed.
    pub fn reduce_without_pass<G: Element>(
        &self,
        gradients: &mut FlatBuffers<B, G>,
        reduce: &Group,
    ) -> Result<(), Error> {
        let waits = |flat| self.parallel.ends().is_some() && flat == ModelLayout::EMBEDDING;
        let mut order = self.layout.backward_order().filter(|&flat| !waits(flat));
        order.try_for_each(|flat| gradients.start_reduce_scatter(flat, reduce))
    }

    /// Adds up the gradients of a tied head that two stages hold, after a step's last backward pass, and
    /// starts their sum over the ranks of `reduce`; nothing on other stages and models.
    ///
    /// # Errors
    /// When another rank has failed.
    pub fn reduce_tied_head<G: Element>(
        &self,
        gradients: &mut FlatBuffers<B, G>,
        reduce: &Group,
    ) -> Result<(), Error> {
        let Some(ends) = self.parallel.ends() else { return Ok(()) };
        let whole = whole_mut::<B, G>(gradients.flat_mut(ModelLayout::EMBEDDING));
        ends.all_reduce::<B, G>(whole, Reduce::Sum)?;
        gradients.start_reduce_scatter(ModelLayout::EMBEDDING, reduce)
    }

    /// Logits of the last forward pass, `[N, V]`.
    ///
    /// # Errors
    /// A failing device, or no room for the logits; [`Error::Divided`] of a part of a model.
    pub fn logits(&self, activations: &Activations<B, T>) -> Result<Vec<f32>, Error> {
        if !self.is_whole() {
            return Err(Error::Divided);
        }
        let tokens = activations.shape.tokens();
        self.project(whole::<B, T>(&activations.final_normed), tokens)
    }

    /// Logits of normed rows `[tokens, C]`, on the host.
    pub(crate) fn project(&self, normed: B::View<'_, T>, tokens: usize) -> Result<Vec<f32>, Error> {
        let backend = &self.backend;
        let mut logits = backend.allocate::<T>(tokens * self.config.vocab_size)?;
        backend.linear_forward(
            self.config.hidden_size,
            normed,
            self.weights_of(self.layout.head_index()),
            None,
            whole_mut::<B, T>(&mut logits),
        )?;
        let mut host = vec![T::from_f32(0.0); tokens * self.config.vocab_size];
        backend.download(whole::<B, T>(&logits), &mut host)?;
        Ok(host.iter().map(|value| value.to_f32()).collect())
    }

    /// Which routed heads each token selected in the last forward pass, `[layers, N, R]`; empty
    /// for a dense model. The activations keep every block's routing unless they recompute blocks.
    ///
    /// # Errors
    /// A failing device.
    pub fn routed_mask(&self, activations: &Activations<B, T>) -> Result<Vec<u8>, Error> {
        self.of_routings(activations, |routing, masks| self.backend.routed_mask(routing, masks))
    }

    /// The gates of the last forward pass, `[layers, N, R]`; empty for a dense model.
    ///
    /// # Errors
    /// A failing device.
    pub fn gates(&self, activations: &Activations<B, T>) -> Result<Vec<f32>, Error> {
        self.of_routings(activations, |routing, gates| self.backend.gates(routing, gates))
    }

    /// One table `[N, R]` of each routing that the activations keep, one after the other.
    fn of_routings<S: Copy + Default>(
        &self,
        activations: &Activations<B, T>,
        read: impl Fn(&B::Routing, &mut [S]) -> moh_kernels::Result<()>,
    ) -> Result<Vec<S>, Error> {
        let table = activations.shape.tokens() * self.routed_heads();
        let mut tables = Vec::new();
        for routing in activations.blocks.routings() {
            let start = tables.len();
            tables.resize(start + table, S::default());
            read(routing, &mut tables[start..])?;
        }
        Ok(tables)
    }
}
