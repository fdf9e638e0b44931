//! Memory of one rank, in bytes, by what it is for. The formulas are in `docs/plan.md`.
//!
//! What is counted here is what a rank allocates: [`StateBytes`] once, [`ActivationBytes`] for every
//! micro-batch that is under way. Workspaces of libraries and the system's own needs come on top.

use moh_kernels::cross_entropy::{GPU_CHUNK, HeadShape};
use moh_kernels::{Cpu, ElementType, Workspace};
use moh_model::model_parallel::Part;

use super::work::Work;
use crate::recipe::{Device, Recompute};

/// Memory of weights and optimiser, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateBytes {
    /// Weights in the compute dtype.
    pub weights: u64,
    /// What bf16 weights lack of the f32 numbers that the optimiser updates.
    pub remainder: u64,
    /// Gradients.
    pub gradients: u64,
    /// Rounded gradients on their way between data ranks, where `precision.reduce` asks for them.
    pub rounded: u64,
    /// Both moments.
    pub moments: u64,
}

/// Memory that depends on the micro-batch, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ActivationBytes {
    /// What forward leaves for backward, of all micro-batches that are under way.
    pub kept: u64,
    /// Gradients of one block's activations.
    pub block_gradients: u64,
    /// Where the parts of tensor ranks are gathered.
    pub gathered: u64,
    /// One chunk of logits.
    pub logits: u64,
    /// The buffers of the validation loss.
    pub evaluation: u64,
}

/// Memory of one rank, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RankMemory {
    /// The rank's place in its pipeline, from 0.
    pub pipeline_rank: usize,
    /// Passes, each of one micro-batch through one part, whose activations it holds.
    pub in_flight: u64,
    /// Weights and optimiser.
    pub state: StateBytes,
    /// What depends on the micro-batch.
    pub activations: ActivationBytes,
}

impl StateBytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        let StateBytes { weights, remainder, gradients, rounded, moments } = *self;
        sum([weights, remainder, gradients, rounded, moments])
    }
}

impl ActivationBytes {
    /// All of it.
    pub fn total(&self) -> u64 {
        let ActivationBytes { kept, block_gradients, gathered, logits, evaluation } = *self;
        sum([kept, block_gradients, gathered, logits, evaluation])
    }
}

impl RankMemory {
    /// All of it.
    pub fn total(&self) -> u64 {
        sum([self.state.total(), self.activations.total()])
    }

    /// Memory of the rank of `work` that has most to hold.
    pub(super) fn fullest(work: &Work) -> RankMemory {
        let ranks = (1..work.layout.pipeline).map(|rank| RankMemory::new(work, rank));
        // The first of equal ones.
        ranks.fold(
            RankMemory::new(work, 0),
            |most, next| {
                if next.total() > most.total() { next } else { most }
            },
        )
    }

    /// Memory of rank `rank` of the pipeline.
    pub(super) fn new(work: &Work, rank: usize) -> RankMemory {
        RankMemory {
            pipeline_rank: rank,
            in_flight: work.in_flight(rank),
            state: state(work, rank),
            activations: activations(work, rank),
        }
    }
}

/// Weights and gradients whole on every data rank; the optimiser's state divided among them.
fn state(work: &Work, rank: usize) -> StateBytes {
    let (dtype, precision) = (work.recipe.run.dtype, &work.recipe.precision);
    let numbers = work.rank_numbers(rank);
    let share = numbers / work.layout.data.max(1) as u128;
    let of = |numbers: u128, bytes: usize| saturate(numbers.saturating_mul(bytes as u128));
    let rounds = work.layout.data > 1
        && precision.gradients == ElementType::F32
        && precision.reduce == ElementType::BF16;
    StateBytes {
        weights: of(numbers, dtype.bytes()),
        remainder: match dtype {
            ElementType::F32 => 0,
            ElementType::BF16 => of(share, 2),
        },
        gradients: of(numbers, precision.gradients.bytes()),
        rounded: if rounds { of(numbers, 2) } else { 0 },
        moments: of(share, 2 * precision.moments.bytes()),
    }
}

fn activations(work: &Work, rank: usize) -> ActivationBytes {
    let per_token = Widths::new(work);
    let recompute = work.recipe.memory.recompute;
    let of = |bytes: u128| saturate(work.tokens().saturating_mul(bytes));
    // A place has room for the largest part.
    let largest = |recompute| work.parts(rank).map(|part| per_token.kept(part, recompute)).max();
    let kept = |recompute| largest(recompute).unwrap_or(0);
    let in_flight = u128::from(work.in_flight(rank));
    let has_head = work.parts(rank).any(|part| part.last);
    // Tokens where the embedding is, targets where the head is, document starts with a document mask; no
    // more micro-batches than passes are in flight.
    let has_embedding = work.parts(rank).any(|part| part.first);
    let read = [has_embedding, has_head, work.recipe.data.document_mask];
    let ids = read.iter().map(|&read| if read { 4 } else { 0 }).sum::<u128>();
    let logits = if has_head { logits(work) } else { 0 };
    let shared = per_token.wide + if has_head { per_token.final_norm } else { 0 };
    let evaluation = kept(Recompute::Block) + ids + shared;
    ActivationBytes {
        kept: of(in_flight.saturating_mul(kept(recompute) + ids).saturating_add(shared)),
        block_gradients: of(per_token.gradients),
        gathered: if work.layout.tensor > 1 { of(per_token.gathered) } else { 0 },
        logits,
        evaluation: match work.recipe.data.validation {
            Some(_) => of(evaluation).saturating_add(logits),
            None => 0,
        },
    }
}

/// Bytes for one token on one rank.
struct Widths {
    /// Of the residual stream, on each of the ranks that share a sequence.
    stream: u128,
    /// What a block keeps that is costly to compute again, its input left out.
    block: u128,
    /// Norms, cheap to compute again.
    norms: u128,
    /// Shared by all blocks and micro-batches: the activated MLP, and the gradient of queries, keys and
    /// values.
    wide: u128,
    /// The final norm.
    final_norm: u128,
    gradients: u128,
    gathered: u128,
}

impl Widths {
    fn new(work: &Work) -> Widths {
        let model = &work.model;
        let e = work.recipe.run.dtype.bytes() as u128;
        let tensor = work.layout.tensor.max(1) as u128;
        // Ranks of a tensor group each hold the residual stream of their part of the tokens.
        let shared = |bytes: u128| bytes.div_ceil(tensor);
        let (c, h) = (model.hidden_size as u128, model.num_attention_heads as u128);
        let (q, kv, i) = (work.query_width(), work.key_value_width(), work.mlp_width());
        let stream = shared(c * e);
        let routing = match work.most_routed_heads() {
            0 => 0,
            // Norm in f64, gate in f32 and selection of each, and the deviation in f64.
            routed => routed * (8 + 4 + 1) + 8,
        };
        let log_sum_exp = shared(4 * h);
        // Tensor ranks add up their parts of a branch's gradient, and the gradients of all heads' weights.
        let (branch, deltas) = match tensor {
            1 => (stream, 0),
            _ => (c * e, 8 * work.most_routed_heads()),
        };
        Widths {
            stream,
            block: (q + 2 * kv) * e + q * e + log_sum_exp + stream + 2 * i * e + routing,
            norms: 2 * stream + shared(8),
            wide: i.max(q + 2 * kv) * e,
            final_norm: stream + shared(4),
            gradients: stream + branch.max(q * e) + log_sum_exp + deltas,
            gathered: c * e,
        }
    }

    /// What forward leaves for backward in one part of the model.
    fn kept(&self, part: &Part, recompute: Recompute) -> u128 {
        let blocks = part.num_blocks() as u128;
        let of_blocks = match recompute {
            Recompute::None => blocks * (self.block + self.norms),
            Recompute::Cheap => blocks * self.block + self.norms,
            Recompute::Block => self.block + self.norms,
        };
        (blocks + 1) * self.stream + of_blocks
    }
}

/// One chunk of logits in f32, as long as the device's operator asks for.
fn logits(work: &Work) -> u64 {
    let clamp = |count: u128| usize::try_from(count).unwrap_or(usize::MAX);
    let width = work.model.hidden_size;
    let head = HeadShape::whole(clamp(work.tokens()), width, clamp(work.vocabulary()));
    let numbers = match work.recipe.run.device {
        Device::Cpu => Cpu.cross_entropy_scratch(&head),
        // The operator itself is not in every build.
        Device::Cuda => GPU_CHUNK.min(head.tokens).saturating_mul(head.vocab_size),
    };
    (numbers as u64).saturating_mul(4)
}

pub(super) fn saturate(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

fn sum<const N: usize>(bytes: [u64; N]) -> u64 {
    bytes.into_iter().fold(0, u64::saturating_add)
}
