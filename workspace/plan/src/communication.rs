//! A rank's traffic, computed from the sizes of its collectives and sends. The formulas are in
//! `docs/plan.md`.

use std::iter::Sum;
use std::ops::{Add, Mul};

use moh_kernels::ElementType;
use moh_model::Recompute;
use moh_model::model_parallel::ModelPart;

use super::work::Work;

/// A number of operations, and the bytes that one rank sends in them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Volume {
    /// Number of operations.
    pub operations: f64,
    /// Bytes that one rank sends. It receives the same number.
    pub bytes: f64,
}

/// One rank's traffic in a step, by process group.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Traffic {
    /// Data ranks: gradients and weights.
    pub data: Volume,
    /// Tensor ranks: activations and their gradients.
    pub tensor: Volume,
    /// Pipeline stages: activations and their gradients, and a tied head's gradients.
    pub pipeline: Volume,
}

impl Add for Volume {
    type Output = Volume;

    fn add(self, other: Volume) -> Volume {
        Volume { operations: self.operations + other.operations, bytes: self.bytes + other.bytes }
    }
}

impl Mul<f64> for Volume {
    type Output = Volume;

    fn mul(self, times: f64) -> Volume {
        Volume { operations: self.operations * times, bytes: self.bytes * times }
    }
}

impl Sum for Volume {
    fn sum<I: Iterator<Item = Volume>>(volumes: I) -> Volume {
        volumes.fold(Volume::default(), Add::add)
    }
}

impl Volume {
    fn ring(ranks: usize, bytes: f64) -> Volume {
        match ranks {
            0 | 1 => Volume::default(),
            ranks => Volume { operations: 1.0, bytes: bytes * (ranks - 1) as f64 / ranks as f64 },
        }
    }

    /// Returns an all-reduce of `bytes` in a ring of `ranks`, as one operation.
    fn all_reduce(ranks: usize, bytes: f64) -> Volume {
        Volume { bytes: 2.0 * Volume::ring(ranks, bytes).bytes, ..Volume::ring(ranks, bytes) }
    }
}

impl Traffic {
    /// Returns the bytes sent to all groups.
    pub fn bytes(&self) -> f64 {
        self.data.bytes + self.tensor.bytes + self.pipeline.bytes
    }

    pub(super) fn new(work: &Work, rank: usize) -> Traffic {
        let micro_batches = work.own_micro_batches() as f64;
        Traffic {
            data: reduce_scatter(work, rank) + all_gather(work, rank),
            tensor: tensor(work, rank) * micro_batches,
            pipeline: sends(work, rank) * micro_batches + tied_head(work, rank),
        }
    }
}

/// Returns the reduce-scatters of a step's gradients over the data ranks: one for each flat buffer.
pub(super) fn reduce_scatter(work: &Work, rank: usize) -> Volume {
    let precision = &work.recipe.precision;
    let dtype = match precision.gradients {
        ElementType::F32 => precision.reduce,
        ElementType::BF16 => ElementType::BF16,
    };
    of_flat_buffers(work, rank, dtype)
}

/// Returns the all-gathers of the updated weights over the data ranks.
pub(super) fn all_gather(work: &Work, rank: usize) -> Volume {
    of_flat_buffers(work, rank, work.recipe.run.dtype)
}

fn of_flat_buffers(work: &Work, rank: usize, dtype: ElementType) -> Volume {
    let bytes = work.rank_elements(rank) as f64 * dtype.bytes() as f64;
    let ring = Volume::ring(work.layout.data, bytes);
    Volume { operations: ring.operations * work.flat_buffers(rank) as f64, ..ring }
}

/// Returns the tensor-parallel traffic of one micro-batch, forward and backward, over all chunks of a rank.
pub(super) fn tensor(work: &Work, rank: usize) -> Volume {
    work.parts(rank).map(|part| tensor_of_part(work, part)).sum()
}

fn tensor_of_part(work: &Work, part: &ModelPart) -> Volume {
    let ranks = work.layout.tensor;
    let tokens = work.tokens() as f64;
    let activation = Volume::ring(ranks, activation_bytes(work));
    // Two all-gathers and two reduce-scatters forward, four and two backward. Recomputing a block repeats the forward
    // operations except the last reduce-scatter.
    let of_block = match work.recipe.memory.recompute {
        Recompute::None | Recompute::Norms => 4.0 + 6.0,
        Recompute::Block => 4.0 + 6.0 + 3.0,
    };
    let blocks = part.num_blocks() as f64;
    // A teacher has a forward pass only.
    let teacher = if work.teacher.is_some() { 1.0 } else { 0.0 };
    let of_block = of_block + 4.0 * teacher;
    let blocks = (activation * of_block + router(work, part, blocks)) * blocks;
    // Forward and backward; each rank's logarithm of its sum, and the target's logit.
    let embedding = activation * if part.first { 2.0 + teacher } else { 0.0 };
    let head = match part.last {
        true => {
            let sums = if work.teacher.is_some() { 4.0 } else { 1.0 };
            let losses = tokens * (sums * ranks as f64 + 1.0) * 8.0;
            activation * (2.0 + teacher) + Volume::all_reduce(ranks, losses)
        }
        false => Volume::default(),
    };
    blocks + embedding + head
}

/// Returns the tensor-parallel traffic of the router for one micro-batch, forward and backward, averaged over a chunk's
/// blocks.
fn router(work: &Work, part: &ModelPart, blocks: f64) -> Volume {
    if !work.model.moh.as_ref().is_some_and(|moh| moh.router.selects()) {
        return Volume::default();
    }
    // Routers that weigh heads also exchange values of shared heads.
    let weighs = work.model.moh.as_ref().is_some_and(|moh| moh.router.weighs());
    let routed = part.layers().map(|layer| match work.model.routed_heads(layer) {
        routed if weighs && routed > 0 => work.model.num_attention_heads,
        routed => routed,
    });
    let (routing, heads) =
        routed.filter(|&heads| heads > 0).fold((0, 0), |sum, heads| (sum.0 + 1, sum.1 + heads));
    // Forward, the heads' norms in f64; backward, the gradients of their gates.
    let bytes = work.tokens() as f64 * (heads as f64 / blocks.max(1.0)) * 8.0;
    let of_all = Volume::all_reduce(work.layout.tensor, bytes) * 2.0;
    let share = f64::from(routing) / blocks.max(1.0);
    Volume { operations: of_all.operations * share, ..of_all }
}

/// Returns the sends between pipeline stages for one micro-batch, forward and backward.
pub(super) fn sends(work: &Work, rank: usize) -> Volume {
    if work.layout.pipeline <= 1 {
        return Volume::default();
    }
    let send = Volume {
        operations: 1.0,
        bytes: activation_bytes(work) / work.layout.tensor.max(1) as f64,
    };
    // A chunk sends forward unless it is the last, and backward unless it is the first. A teacher's chunk sends forward
    // too.
    let forward = if work.teacher.is_some() { 2.0 } else { 1.0 };
    let count = |part: &ModelPart| forward * f64::from(!part.last) + f64::from(!part.first);
    send * work.parts(rank).map(count).sum::<f64>()
}

/// Returns the all-reduce of a tied head's gradients between the first and last stage, once a step.
pub(super) fn tied_head(work: &Work, rank: usize) -> Volume {
    let is_end = work.parts(rank).any(|part| part.first || part.last);
    if !(work.model.tie_word_embeddings && is_end && work.layout.pipeline > 1) {
        return Volume::default();
    }
    let bytes = work.recipe.precision.gradients.bytes() as f64;
    Volume::all_reduce(2, work.elements.vocabulary as f64 * bytes)
}

/// Returns the bytes of a micro-batch's residual stream.
fn activation_bytes(work: &Work) -> f64 {
    work.tokens() as f64 * work.model.hidden_size as f64 * work.recipe.run.dtype.bytes() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Layout;
    use crate::tests::{llama3_8b, small};

    /// A micro-batch of 8192 tokens of 4096 elements in bf16.
    const STREAM: f64 = 67_108_864.0;

    fn traffic(overrides: &[&str], stage: usize, layout: Layout, rank: usize) -> Traffic {
        let (recipe, model) = llama3_8b(overrides);
        Traffic::new(&Work::new(&recipe, &recipe.stages[stage], &model, layout).unwrap(), rank)
    }

    #[test]
    fn data_ranks_exchange_every_gradient_and_every_weight_once() {
        let layout = Layout { data: 8, ..Layout::ALONE };
        // 7/8 of 8,297,648,128 parameters are sent: 4 bytes a gradient, 2 a weight, in two operations for each of 32
        // blocks, embedding, norm and head.
        let found = traffic(&[], 0, layout, 0);
        assert_eq!(found.data.bytes, 7.0 / 8.0 * 6.0 * 8_297_648_128.0);
        assert_eq!(found.data.operations, 2.0 * 35.0);
        assert_eq!((found.tensor, found.pipeline), (Volume::default(), Volume::default()));
        let rounded = traffic(&["precision.reduce=bf16"], 0, layout, 0);
        assert_eq!(rounded.data.bytes, 7.0 / 8.0 * 4.0 * 8_297_648_128.0);
        assert_eq!(traffic(&[], 0, Layout::ALONE, 0), Traffic::default());
    }

    #[test]
    fn tensor_ranks_exchange_ten_activations_a_block() {
        let layout = Layout { tensor: 2, data: 2048, ..Layout::ALONE };
        // One micro-batch: 10 for each of 32 blocks, 2 for the embedding, 2 for the head, half of each
        // sent; and 8192 x 3 elements of 8 bytes, all-reduced by two ranks.
        let dense = traffic(&[], 0, layout, 0);
        assert_eq!(dense.tensor.operations, 320.0 + 4.0 + 1.0);
        assert_eq!(dense.tensor.bytes, 324.0 * STREAM / 2.0 + 8192.0 * 3.0 * 8.0);
        // 16 routed heads, twice in each block; recomputation adds 3 activations.
        let moh = traffic(&["memory.recompute=block"], 1, layout, 0);
        assert_eq!(moh.tensor.operations, 32.0 * 15.0 + 4.0 + 1.0);
        let routing = 32.0 * 2.0 * 8192.0 * 16.0 * 8.0;
        assert_eq!(moh.tensor.bytes, 420.0 * STREAM / 2.0 + routing + 8192.0 * 3.0 * 8.0);
        // If every second block is dense, it exchanges no routing.
        let shared = format!("stage.moh.moh.shared_heads={:?}", [32, 16].repeat(16));
        let top_k = format!("stage.moh.moh.routed_top_k={:?}", [0, 8].repeat(16));
        let mixed = traffic(&["memory.recompute=block", &shared, &top_k], 1, layout, 0);
        assert_eq!(moh.tensor.operations - mixed.tensor.operations, 16.0 * 2.0);
        assert_eq!(moh.tensor.bytes - mixed.tensor.bytes, routing / 2.0);
    }

    #[test]
    fn neighbours_in_a_pipeline_send_activations_and_gradients() {
        let layout = |virtual_stages| Layout { tensor: 2, data: 8, pipeline: 4, virtual_stages };
        // 2048 / 8 micro-batches, half of each activation, forward except from the last rank and backward except from
        // the first.
        let sent = |virtual_stages, rank| {
            traffic(&[], 1, layout(virtual_stages), rank).pipeline.bytes / (256.0 * STREAM / 2.0)
        };
        assert_eq!([0, 1, 2, 3].map(|rank| sent(1, rank)), [1.0, 2.0, 2.0, 1.0]);
        assert_eq!([0, 1, 2, 3].map(|rank| sent(4, rank)), [7.0, 8.0, 8.0, 7.0]);
    }

    #[test]
    fn a_tied_head_is_summed_by_both_ends() {
        let (recipe, model) = small(&["model.new.tie_word_embeddings=true"]);
        let layout = Layout { pipeline: 3, ..Layout::ALONE };
        let work = Work::new(&recipe, &recipe.stages[0], &model, layout).unwrap();
        // 512 rows of 64 f32.
        let bytes = [0, 1, 2].map(|rank| tied_head(&work, rank).bytes);
        assert_eq!(bytes, [131_072.0, 0.0, 131_072.0]);
    }
}
