//! A model on a device, or a rank's part of it: its weights in flat buffers, and the results of its passes.

use moh_kernels::router::Routing;
use moh_kernels::{AnyBuffer, Backend, ElementType, Memory, Purpose};

use crate::architecture::Layers;
use crate::layers::{Context, RopeTables, RouterLayer, Tokens};
use crate::router::{self, LayerRouting, RoutingStatistics};
use crate::{
    Activations, AuxiliaryLosses, Error, FlatBuffers, ModelConfig, ModelLayout, ModelParallel,
    PassRole, PassShape, PassSizes, Result, Segment, Teacher,
};

/// A Llama or Qwen3 model, dense or Mixture-of-Head, on a device: the whole model, or a rank's part of it.
pub struct Model<B: Backend> {
    pub(crate) backend: B,
    /// The type of activations.
    element: ElementType,
    pub(crate) config: ModelConfig,
    pub(crate) layout: ModelLayout,
    pub(crate) parallel: ModelParallel,
    pub(crate) weights: FlatBuffers<B>,
    pub(crate) layers: Layers,
    pub(crate) rope: RopeTables<B>,
    /// See [`Model::set_teacher`].
    pub(crate) teacher: Option<Box<Teacher<B>>>,
}

/// The buffers of a model or of a part of it: its weights, and the tables of rotary position embedding.
pub struct ModelBuffers<M: Memory> {
    pub(crate) weights: FlatBuffers<M>,
    pub(crate) rope: RopeTables<M>,
}

impl<M: Memory> ModelBuffers<M> {
    /// Allocates zeros, for positions below `positions`.
    pub fn zeros(
        memory: &M,
        element: ElementType,
        config: &ModelConfig,
        layout: &ModelLayout,
        positions: usize,
    ) -> Result<Self> {
        let weights = || FlatBuffers::zeros(memory, element, layout);
        Ok(ModelBuffers {
            weights: memory.for_purpose(Purpose::Weights, weights)?,
            rope: RopeTables::zeros(memory, config.head_dim, positions)?,
        })
    }
}

/// The weights of the losses of a training pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LossConfig {
    /// 1 / (targets of the whole step), times the cross-entropy's weight.
    pub cross_entropy: f32,
    /// Weight of each auxiliary loss, divided by the number of its terms: beta / micro-batches for the balance loss,
    /// weight / targets for the distillation loss.
    pub auxiliary: AuxiliaryLosses<f32>,
    /// Whether the loss reaches the gates through the selection (straight-through; on in training).
    pub straight_through: bool,
}

impl<B: Backend> Model<B> {
    /// Creates a model with weights and activations of type `element`, for positions below `positions`; `source` writes
    /// the weights, tensor by tensor.
    pub fn new<E: From<Error>>(
        backend: B,
        element: ElementType,
        config: ModelConfig,
        positions: usize,
        source: impl FnMut(&Segment, &mut [f32]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let parallel = ModelParallel::whole(&config);
        Self::of_part(backend, element, config, positions, parallel, 1, source)
    }

    /// Creates one rank's part of a model; `ranks` ranks can shard the optimiser state of its
    /// buffers ([`ModelLayout::of_part`]).
    pub fn of_part<E: From<Error>>(
        backend: B,
        element: ElementType,
        config: ModelConfig,
        positions: usize,
        parallel: ModelParallel,
        ranks: usize,
        source: impl FnMut(&Segment, &mut [f32]) -> Result<(), E>,
    ) -> Result<Self, E> {
        let mut model = Self::zeros_of_part(backend, element, config, positions, parallel, ranks)?;
        model.weights.fill(&model.backend, &model.layout, source)?;
        Ok(model)
    }

    /// Creates one rank's part of a model as [`Self::of_part`] does, with weights of zeros.
    pub fn zeros_of_part(
        backend: B,
        element: ElementType,
        config: ModelConfig,
        positions: usize,
        parallel: ModelParallel,
        ranks: usize,
    ) -> Result<Self> {
        let routers = router::of_config(&config);
        let (layers, flats) = Layers::new(&config, &routers, ranks, parallel.part());
        let layout = ModelLayout { flats, num_blocks: config.num_hidden_layers };
        if let Some(moh) = &config.moh {
            config.check_moh(moh)?;
        }
        let buffers = ModelBuffers::zeros(&backend, element, &config, &layout, positions)?;
        let ModelBuffers { weights, mut rope } = buffers;
        rope.fill(&backend, &config.rope, config.head_dim)?;
        Ok(Model {
            backend,
            element,
            config,
            layout,
            parallel,
            weights,
            layers,
            rope,
            teacher: None,
        })
    }

    /// Returns the device.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Returns the type of weights and activations.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// Returns this rank's part of the model, and the ranks with the other parts.
    pub fn parallel(&self) -> &ModelParallel {
        &self.parallel
    }

    /// Returns whether this rank has the whole model.
    pub fn is_whole(&self) -> bool {
        self.parallel.stages() == 1 && self.parallel.part().tensor.ranks == 1
    }

    /// Returns the configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Changes the attention, but not the weights. Activations that were planned before cannot be used any more.
    ///
    /// # Errors
    /// Fails if the head counts do not fit the model, or if the router needs matrices that the model lacks.
    pub fn set_moh(&mut self, moh: Option<crate::MohConfig>) -> Result<()> {
        if let Some(moh) = &moh {
            self.config.check_moh(moh)?;
        }
        if let Some(missing) = self.config.added_tensors(moh.as_ref())?.first() {
            let reason = format!("the model was created without {missing}, which its router needs");
            return Err(Error::Invalid(reason));
        }
        self.config.moh = moh;
        for (layer, block) in self.layers.blocks.iter_mut().enumerate() {
            let before = block.attention.router.take();
            block.attention.router = router::of_layer(&self.config, layer)
                .and_then(|spec| RouterLayer::after(&self.config, spec, before.as_ref()));
        }
        Ok(())
    }

    /// Returns the location of each tensor.
    pub fn layout(&self) -> &ModelLayout {
        &self.layout
    }

    /// Returns the number of positions of the RoPE tables.
    pub fn positions(&self) -> usize {
        B::len(&self.rope.cos) * 2 / self.config.head_dim
    }

    /// Returns the weights.
    pub fn weights(&self) -> &FlatBuffers<B> {
        &self.weights
    }

    /// Returns the context of the layers of a pass over `tokens`.
    pub(crate) fn context<'a>(&'a self, tokens: Tokens<'a, B>) -> Context<'a, B> {
        Context {
            backend: &self.backend,
            element: self.element,
            weights: &self.weights,
            parallel: &self.parallel,
            rope: &self.rope,
            packed: None,
            tokens,
        }
    }

    /// Returns the weights, for updates.
    pub fn weights_mut(&mut self) -> &mut FlatBuffers<B> {
        &mut self.weights
    }

    /// Returns the number of layers with a router that selects heads, at least 1. The balance loss is averaged over
    /// these layers.
    pub(crate) fn routed_layers(&self) -> usize {
        self.layer_routers().filter(|(_, router)| router.selects()).count().max(1)
    }

    /// Returns each layer with routed heads, with its router.
    fn layer_routers(&self) -> impl Iterator<Item = (usize, &RouterLayer)> {
        let blocks = self.layers.blocks.iter().enumerate();
        blocks.filter_map(|(layer, block)| Some((layer, block.attention.router.as_ref()?)))
    }

    /// Returns empty statistics of every layer that selects heads.
    pub fn routing_statistics(&self) -> RoutingStatistics {
        let heads = self.config.num_attention_heads;
        let of_layer = |(layer, router): (usize, &RouterLayer)| {
            LayerRouting::new(layer, router.spec.shared_heads(), heads)
        };
        let routers = self.layer_routers().filter(|(_, router)| router.selects());
        RoutingStatistics { layers: routers.map(of_layer).collect() }
    }

    /// Returns the sizes of passes with the model's own routers.
    pub fn pass_sizes(&self, pass: PassShape) -> Result<PassSizes<'_>> {
        let (config, part) = (&self.config, self.parallel.part());
        let heads = part.tensor.heads(config);
        let shape = |router: &RouterLayer| router.spec.routing_shape(pass.tokens(), heads);
        let routing = router::largest(self.layer_routers().map(|(_, router)| shape(router)))?;
        let (role, tensors) = (PassRole::Alone, self.layout.segments().count());
        let element = self.element();
        Ok(PassSizes { config, part, pass, element, role, routing, tensors })
    }

    /// Returns the logits of the last forward pass, `[N, V]`.
    pub fn logits(&self, activations: &Activations<B>) -> Result<Vec<f32>> {
        if !self.is_whole() {
            return Err(Error::divided());
        }
        let elements = activations.shape.tokens() * self.config.vocab_size;
        let mut logits = AnyBuffer::zeros(&self.backend, self.element(), elements)?;
        let cx = self.context(Tokens::whole(activations.shape));
        let normed = activations.head.normed.y.whole();
        self.layers.head.linear.forward(&cx, normed, None, &mut logits)?;
        Ok(logits.whole().to_f32(&self.backend)?)
    }

    /// Returns the routed heads that each token selected in the last forward pass: `[N, R]` for each layer, with R the
    /// routed heads in ascending order; empty for a dense layer. Activations that recompute blocks do not have every
    /// block's routing.
    pub fn routed_mask(&self, activations: &Activations<B>) -> Result<Vec<Vec<u8>>> {
        self.of_routings(activations, |routing, mask| {
            self.backend.download(routing.selected(), mask)
        })
    }

    /// Returns the gates of the last forward pass, `[N, R]` for each layer as in [`Model::routed_mask`].
    pub fn gates(&self, activations: &Activations<B>) -> Result<Vec<Vec<f32>>> {
        self.of_routings(activations, |routing, gates| {
            self.backend.download(routing.gates(), gates)
        })
    }

    /// Returns a table `[N, R]` for each block with a saved routing.
    fn of_routings<S: Copy + Default>(
        &self,
        activations: &Activations<B>,
        read: impl Fn(&Routing<B>, &mut [S]) -> moh_kernels::Result<()>,
    ) -> Result<Vec<Vec<S>>> {
        let table = |routing: Option<&Routing<B>>| {
            // A pass never starts the routing of a layer without a router, which has no tokens then.
            let Some(routing) = routing else { return Ok(Vec::new()) };
            let (columns, shared) = (routing.columns(), routing.shared());
            let mut table = vec![S::default(); routing.tokens() * columns];
            read(routing, &mut table)?;
            if shared.len() > shared.leading() {
                let mut column = (0..columns).cycle();
                table.retain(|_| {
                    column.next().is_some_and(|column| !shared.contains(shared.leading() + column))
                });
            }
            Ok(table)
        };
        let first = activations.passes.iter().take(1);
        first.flat_map(|pass| pass.blocks.routings()).map(table).collect()
    }
}
