//! Memory of one rank, in bytes, by purpose: runs the constructors of a run's buffers on a memory
//! that counts, and adds the memory outside buffers.

use moh_comm::Coordinates;
use moh_kernels::Memory as _;
use moh_kernels::ranks::share;
use moh_kernels::{CountedDevice, CountingMemory, Purpose};
use moh_model::model_parallel::{ModelPart, TensorShare};
use moh_model::{Activations, ModelBuffers, ModelConfig, ModelLayout, PassSizes, Shard, Slots};
use moh_recipe::{DeviceKind, Recipe, Stage};
use moh_step::{
    Evaluator, OptimizerState, StepBuffers, StepConfig, StepSizes, pipeline_schedule, ranks,
};

use super::work::{Layout, Work, step_config};
use crate::Error;

/// GPU memory of a process before its first buffer: the driver's context and the kernels.
const CONTEXT: u64 = 512 << 20;
/// GPU memory of NCCL's channels.
const NCCL: u64 = 1 << 30;

/// Memory of one rank, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankMemory {
    /// The rank in its pipeline, from 0.
    pub pipeline_rank: usize,
    /// Passes in flight, each of one micro-batch through one chunk.
    pub in_flight: u64,
    /// Buffers, in the order of [`Purpose::ALL`].
    buffers: [u64; Purpose::ALL.len()],
    /// Copies of messages that other pipeline stages have not received yet.
    pub messages: u64,
    /// Scratch of the CPU's threads.
    pub thread_scratch: u64,
    /// The GPU's driver and libraries.
    pub libraries: u64,
    /// Host memory for the copy of the state that a checkpoint is written from.
    pub staging: u64,
    /// The device.
    pub device: DeviceKind,
}

impl RankMemory {
    /// Returns the bytes of the buffers with this purpose.
    pub fn bytes(&self, purpose: Purpose) -> u64 {
        self.buffers[purpose as usize]
    }

    /// Returns the total in the device's memory.
    pub fn total(&self) -> u64 {
        let on_host = match self.device {
            DeviceKind::Cpu => [self.thread_scratch, self.staging],
            DeviceKind::Cuda => [0; 2],
        };
        sum([sum(self.buffers), self.messages, self.libraries, sum(on_host)])
    }

    /// Returns the memory of the rank at `place` in `layout` in a stage of `recipe`, on a model with its grown
    /// vocabulary.
    ///
    /// # Errors
    /// Fails if the layout does not divide the model, or if the heads cannot be routed.
    pub fn of_rank(
        recipe: &Recipe,
        stage: &Stage,
        model: &ModelConfig,
        layout: Layout,
        place: Coordinates,
    ) -> Result<RankMemory, Error> {
        let work = Work::new(recipe, stage, model, layout)?;
        let micro_batches = usize::try_from(work.micro_batches()).unwrap_or(usize::MAX);
        let own = share(micro_batches, place.data, layout.data).len();
        Self::at(&work, &parts(&work)?[place.pipeline], place, own)
    }

    pub(super) fn fullest(work: &Work) -> Result<RankMemory, Error> {
        let (parts, data) = (parts(work)?, work.layout.data as u64);
        let count = |count| usize::try_from(count).unwrap_or(usize::MAX);
        // Data ranks differ by at most one micro-batch.
        let most = count(work.micro_batches().div_ceil(data.max(1)));
        let fewest = count(work.micro_batches() / data.max(1));
        let counts = if most == fewest { vec![most] } else { vec![most, fewest] };
        let mut fullest: Option<RankMemory> = None;
        for (pipeline, part) in parts.iter().enumerate() {
            for tensor in distinct_tensor_ranks(work) {
                for &micro_batches in &counts {
                    let place = Coordinates { tensor, data: 0, pipeline };
                    let found = Self::at(work, part, place, micro_batches)?;
                    // The first of equal ranks.
                    fullest = match fullest {
                        Some(most) if most.total() >= found.total() => Some(most),
                        _ => Some(found),
                    };
                }
            }
        }
        let none = || moh_model::Error::undivided(work.model.num_hidden_layers, 0);
        Ok(fullest.ok_or_else(none)?)
    }

    /// Returns the memory of a rank with this many micro-batches in a step, and with its shard of a part of the
    /// model.
    fn at(
        work: &Work,
        part: &ModelPart,
        place: Coordinates,
        micro_batches: usize,
    ) -> Result<RankMemory, Error> {
        let stage = pipeline_schedule::PipelineStage {
            number: place.pipeline,
            stages: work.layout.pipeline.max(1),
            chunks: part.chunks.len(),
        };
        let tensor = TensorShare { rank: place.tensor, ranks: work.layout.tensor.max(1) };
        tensor.check(&work.model)?;
        let part = &ModelPart { tensor, ..part.clone() };
        let device = work.recipe.run.device;
        let slots = stage.slots(micro_batches);
        let mut found = RankMemory {
            pipeline_rank: place.pipeline,
            in_flight: slots.passes as u64,
            buffers: [0; Purpose::ALL.len()],
            messages: 0,
            thread_scratch: 0,
            libraries: 0,
            staging: 0,
            device,
        };
        if !fits_address_space(work) {
            found.buffers[Purpose::Activations as usize] = u64::MAX;
            return Ok(found);
        }
        let memory = counting(work);
        let data = work.layout.data.max(1);
        let layout = ModelLayout::of_part(&work.model, data, part);
        let buffers = Buffers { work, part, layout: &layout, slots, memory: &memory };
        let (message, staging) = buffers.allocate()?;
        let of_teacher = match work.stage.distill {
            Some(_) => stage.teacher_messages(micro_batches),
            None => 0,
        };
        let messages = stage.messages(micro_batches).saturating_add(of_teacher) as u64;
        found.buffers = Purpose::ALL.map(|purpose| memory.bytes(purpose));
        found.messages = messages.saturating_mul(message as u64);
        found.thread_scratch = memory.thread_scratch();
        found.libraries = libraries(&memory, device, work.layout.ranks());
        found.staging = staging;
        Ok(found)
    }
}

struct Buffers<'a> {
    work: &'a Work<'a>,
    part: &'a ModelPart,
    layout: &'a ModelLayout,
    slots: Slots,
    memory: &'a CountingMemory,
}

impl Buffers<'_> {
    /// Calls a run's constructors in the same order. Returns the bytes of a message to another stage, and of the host's
    /// copy for checkpoints.
    fn allocate(self) -> Result<(usize, u64), Error> {
        let Buffers { work, part, layout, slots, memory } = self;
        let (recipe, config) = (work.recipe, &work.model);
        let (element, moments) = (recipe.run.dtype, recipe.precision.moments);
        let (batch, length) = (work.micro_batch, recipe.data.sequence_length);
        let step = StepConfig { micro_batch: batch, ..step_config(recipe, work.stage) };
        let data_ranks = work.layout.data.max(1);
        ranks::values(memory)?;
        let positions = recipe.longest_sequence();
        ModelBuffers::zeros(memory, element, config, layout, positions)?;
        let shard = Shard { rank: 0, size: data_ranks };
        OptimizerState::zeros(memory, layout, shard, element, moments)?;
        let passes = PassSizes::new(config, layout, part, step.pass_shape(), element)?;
        let passes = passes.in_role(step.role());
        let StepConfig { gradients, reduce, .. } = step;
        let sizes = StepSizes { layout, passes, slots, data_ranks, gradients, reduce };
        StepBuffers::new(memory, &sizes)?;
        if !recipe.data.validation.is_empty() {
            Evaluator::of_part(memory, passes, batch, length)?;
        }
        if let Some(teacher) = &work.teacher {
            // The teacher has the model's shape, so its part is the same.
            let layout = &ModelLayout::of_part(teacher, 1, part);
            memory.for_purpose(Purpose::Teacher, || {
                ModelBuffers::zeros(memory, element, teacher, layout, positions)?;
                let passes = PassSizes::new(teacher, layout, part, step.pass_shape(), element)?;
                Activations::of_teacher(memory, passes)
            })?;
        }
        let staging = moh_checkpoint::staging_bytes(layout, shard, element, moments);
        Ok((passes.message_bytes(), staging))
    }
}

/// Returns the GPU memory of the driver and libraries.
fn libraries(memory: &CountingMemory, device: DeviceKind, ranks: usize) -> u64 {
    match device {
        DeviceKind::Cpu => 0,
        DeviceKind::Cuda => {
            sum([CONTEXT, memory.matmul_workspace(), if ranks > 1 { NCCL } else { 0 }])
        }
    }
}

fn parts(work: &Work) -> Result<Vec<ModelPart>, Error> {
    let Layout { pipeline, virtual_stages, .. } = work.layout;
    Ok(ModelPart::divide(&work.model, pipeline.max(1), virtual_stages.max(1))?)
}

fn distinct_tensor_ranks(work: &Work) -> Vec<usize> {
    let (model, ranks) = (&work.model, work.layout.tensor.max(1));
    let mut seen = Vec::new();
    let is_new = |rank: &usize| {
        let share = TensorShare { rank: *rank, ranks };
        // A routing has a column for each head after the leading shared heads.
        let leading = (0..model.num_hidden_layers).map(|l| model.layer_heads(l).shared.leading());
        let shared = leading.min().map(|count| share.heads(model).local_below(count));
        let sizes = (share.mlp_width(model), share.vocabulary(model).count, shared);
        let is_new = !seen.contains(&sizes);
        seen.push(sizes);
        is_new
    };
    (0..ranks).filter(is_new).collect()
}

/// Returns a memory that counts as the recipe's device does.
pub(crate) fn counting(work: &Work) -> CountingMemory {
    CountingMemory::new(match work.recipe.run.device {
        DeviceKind::Cpu => CountedDevice::Cpu,
        DeviceKind::Cuda => CountedDevice::Gpu,
    })
}

/// Returns whether every buffer's length fits a `usize`.
pub(crate) fn fits_address_space(work: &Work) -> bool {
    let model = &work.model;
    let [hidden, mlp, heads] =
        [model.hidden_size, model.intermediate_size, model.num_attention_heads];
    let row = model.query_width().saturating_add(2 * model.key_value_width());
    let widths = [hidden, 2 * mlp, row, 16 * heads].map(|width| width as u128);
    let of_tokens = work.tokens().saturating_mul(widths.iter().sum());
    let of_rows = model.vocab_size as u128 * (hidden as u128 + work.tokens().min(1024));
    of_tokens.max(of_rows) < usize::MAX as u128 / 16
}

fn sum<const N: usize>(bytes: [u64; N]) -> u64 {
    bytes.into_iter().fold(0, u64::saturating_add)
}
