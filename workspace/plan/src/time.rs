//! The time of a step on a machine with a hardware profile. The formulas are in `docs/plan.md`.

use moh_model::model_parallel::ModelPart;
use moh_model::{ModelConfig, Recompute};

use super::communication::{self, Volume};
use super::hardware::Hardware;
use super::work::Work;

/// Seconds of one step, by activity. They sum to the step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepTime {
    /// Passes of the busiest pipeline stage.
    pub compute: f64,
    /// Its tensor-parallel communication.
    pub tensor: f64,
    /// Its sends to other pipeline stages.
    pub sends: f64,
    /// The pipeline bubble.
    pub bubble: f64,
    /// Data-parallel communication of gradients and weights, as far as it is exposed.
    pub data: f64,
    /// AdamW, the gradient norm and zeroing gradients.
    pub optimizer: f64,
}

/// Seconds of one micro-batch on one rank, forward and backward, over all its chunks.
#[derive(Debug, Clone, Copy, Default)]
struct PassTime {
    compute: f64,
    tensor: f64,
    sends: f64,
}

/// The forward pass's fraction of both passes. The backward pass has two matmuls for each forward matmul.
const FORWARD: f64 = 1.0 / 3.0;

impl StepTime {
    /// Returns the seconds of the step.
    pub fn total(&self) -> f64 {
        let StepTime { compute, tensor, sends, bubble, data, optimizer } = *self;
        compute + tensor + sends + bubble + data + optimizer
    }

    pub(super) fn new(work: &Work, hardware: &Hardware) -> StepTime {
        let ranks = 0..work.layout.pipeline;
        let passes: Vec<PassTime> =
            ranks.clone().map(|rank| PassTime::new(work, hardware, rank)).collect();
        let busier = |most: PassTime, next: &PassTime| {
            if next.total() > most.total() { *next } else { most }
        };
        let busiest = passes.iter().fold(PassTime::default(), busier);
        let all: f64 = passes.iter().map(PassTime::total).sum();
        let largest = |seconds: &dyn Fn(usize, &PassTime) -> f64| {
            let each = ranks.clone().zip(&passes).map(|(rank, pass)| seconds(rank, pass));
            each.fold(0.0, f64::max)
        };
        let micro_batches = work.own_micro_batches() as f64;
        StepTime {
            compute: micro_batches * busiest.compute,
            tensor: micro_batches * busiest.tensor,
            sends: micro_batches * busiest.sends,
            bubble: (all - busiest.total()) / work.layout.virtual_stages.max(1) as f64,
            data: largest(&|rank, pass| data(work, hardware, rank, pass)),
            optimizer: largest(&|rank, _| optimizer(work, hardware, rank)),
        }
    }
}

impl PassTime {
    fn total(&self) -> f64 {
        self.compute + self.tensor + self.sends
    }

    fn new(work: &Work, hardware: &Hardware, rank: usize) -> PassTime {
        let layout = work.layout;
        let ring = hardware.ring(layout.tensor, 1);
        let neighbour = hardware.to_neighbour(layout.ranks());
        PassTime {
            compute: compute(work, hardware, rank),
            tensor: seconds(communication::tensor(work, rank), ring, hardware),
            sends: seconds(communication::sends(work, rank), neighbour, hardware),
        }
    }
}

fn seconds(volume: Volume, bytes_per_second: f64, hardware: &Hardware) -> f64 {
    volume.bytes / bytes_per_second + volume.operations * hardware.latency()
}

/// Returns the seconds of the operators of one micro-batch.
fn compute(work: &Work, hardware: &Hardware, rank: usize) -> f64 {
    let matmul = hardware.matmul(work.recipe.run.dtype);
    let attention = matmul * hardware.device.attention_share.value;
    let memory = 1e9 * hardware.device.memory_gb_per_s.value;
    let blocks: usize = work.parts(rank).map(|part| part.num_blocks()).sum();
    let has_head = work.parts(rank).any(|part| part.last);
    // Recomputes the blocks' forward pass.
    let again = match work.recipe.memory.recompute {
        Recompute::Block => 1.0,
        Recompute::None | Recompute::Norms => 0.0,
    };
    let per_token = PerToken::new(work, rank);
    let mut block = per_token.linear * (3.0 + again) / matmul
        + per_token.attention * (3.5 + again) / attention
        + per_token.block_bytes / memory;
    let mut head = per_token.head * 3.0 / matmul + per_token.head_bytes / memory;
    if work.teacher.is_some() {
        // The teacher's forward pass. Its logits are written, and read by the loss and by the gradients.
        block += per_token.linear / matmul
            + per_token.teacher_attention / attention
            + numbers_moved_forward(work) * work.recipe.run.dtype.bytes() as f64 / memory;
        head += (per_token.head / matmul) + per_token.head_bytes / memory;
    }
    work.tokens() as f64 * (blocks as f64 * block + if has_head { head } else { 0.0 })
}

/// One rank's work per token, for one block and for the head.
#[derive(Debug, Clone, Copy, PartialEq)]
struct PerToken {
    /// Forward FLOPs of a block's matmuls, averaged over the rank's blocks.
    linear: f64,
    /// Forward FLOPs of its attention core, averaged over the rank's blocks.
    attention: f64,
    /// Forward FLOPs of a teacher's attention core, averaged over the rank's blocks.
    teacher_attention: f64,
    /// Forward FLOPs of the output head.
    head: f64,
    /// Bytes that a block's other operators read and write, forward and backward.
    block_bytes: f64,
    /// Bytes of the logits, which are written, read and overwritten by their gradient.
    head_bytes: f64,
}

impl PerToken {
    fn new(work: &Work, rank: usize) -> PerToken {
        let model = &work.model;
        let tensor = work.layout.tensor.max(1) as f64;
        let keys = (work.sequence_length() as f64 + 1.0) / 2.0;
        let active = |model: &ModelConfig| {
            mean(work, rank, |layer| model.layer_heads(layer).active() as f64) / tensor
        };
        let attention = |active: f64| 4.0 * keys * model.head_dim as f64 * active;
        PerToken {
            linear: 2.0 * mean(work, rank, |layer| work.elements.blocks[layer].matrices as f64),
            attention: attention(active(model)),
            teacher_attention: work.teacher.as_ref().map_or(0.0, |model| attention(active(model))),
            head: 2.0 * work.elements.vocabulary as f64,
            block_bytes: moved(work),
            head_bytes: 3.0 * 4.0 * work.share(model.vocab_size),
        }
    }
}

/// Returns the mean of a value of each layer over a rank's blocks.
fn mean(work: &Work, rank: usize, of_layer: impl Fn(usize) -> f64) -> f64 {
    let layers = || work.parts(rank).flat_map(ModelPart::layers);
    layers().map(of_layer).sum::<f64>() / layers().count().max(1) as f64
}

/// Returns the numbers that the norms of a block read and write per token in a forward pass.
fn moved_by_norms(work: &Work) -> f64 {
    2.0 * 2.0 * work.model.hidden_size as f64 / work.layout.tensor.max(1) as f64
}

/// Returns a rank's widths of query heads, key (or value) heads and the MLP.
fn widths(work: &Work) -> [f64; 3] {
    let model = &work.model;
    let widths = [model.query_width(), model.key_value_width(), model.intermediate_size];
    widths.map(|width| work.share(width))
}

/// Returns the numbers that norms, RoPE and SwiGLU of a block read and write per token in a forward pass.
fn numbers_moved_forward(work: &Work) -> f64 {
    let [q, kv, i] = widths(work);
    moved_by_norms(work) + 2.0 * (q + kv) + 3.0 * i
}

/// Returns the bytes that norms, RoPE and SwiGLU of a block read and write per token, forward and backward.
fn moved(work: &Work) -> f64 {
    let [q, kv, i] = widths(work);
    let (norms, forward) = (moved_by_norms(work), numbers_moved_forward(work));
    let backward = 2.0 * norms + 2.0 * (q + kv) + 2.0 * q + 6.0 * i;
    let again = match work.recipe.memory.recompute {
        Recompute::None => 0.0,
        Recompute::Norms => norms,
        Recompute::Block => forward,
    };
    (forward + backward + again) * work.recipe.run.dtype.bytes() as f64
}

/// Returns the seconds of exposed data-parallel communication: gradients overlap with the last backward pass,
/// weights with the first forward pass.
fn data(work: &Work, hardware: &Hardware, rank: usize, pass: &PassTime) -> f64 {
    let ring = hardware.ring(work.layout.data, work.layout.tensor);
    let neighbour = hardware.to_neighbour(work.layout.ranks());
    let exposed = |volume: Volume, beside: f64| {
        let exchange = seconds(volume, ring, hardware);
        exchange - beside.min(exchange * hardware.network.data_overlap.value)
    };
    let gradients = communication::reduce_scatter(work, rank);
    let weights = communication::all_gather(work, rank);
    exposed(gradients, (1.0 - FORWARD) * pass.compute)
        + exposed(weights, FORWARD * pass.compute)
        + seconds(communication::tied_head(work, rank), neighbour, hardware)
}

/// Returns the seconds of the optimiser, which reads and writes its state once.
fn optimizer(work: &Work, hardware: &Hardware, rank: usize) -> f64 {
    let precision = &work.recipe.precision;
    let elements = work.rank_elements(rank) as f64;
    let share = elements / work.layout.data.max(1) as f64;
    // Reads the gradients twice, for the norm and the update; reads and writes both moments and 4
    // bytes of each weight (in bf16 including its remainder).
    let (gradient, moment) = (precision.gradients.bytes(), precision.moments.bytes());
    let update = 2.0 * gradient as f64 + 2.0 * 4.0 + 4.0 * moment as f64;
    share * update / (1e9 * hardware.device.memory_gb_per_s.value)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Layout;
    use crate::tests::{llama3_8b, small};

    /// Returns a profile of 100 TFLOP/s in bf16, attention at half of that, 1 TB/s of memory, 8 ranks a node with 100
    /// GB/s between them and 10 GB/s to others, no latency, no overlap.
    fn round() -> Hardware {
        let text = "name = \"round\"\n[device]\nmemory_bytes = 80e9\nreserved_bytes = 0\n\
            matmul_bf16_tflops = 100\nmatmul_f32_tflops = 10\nattention_share = 0.5\n\
            memory_gb_per_s = 1000\n[node]\nranks = 8\nfilesystem_write_gb_per_s = 1\n[network]\n\
            within_node_gb_per_s = 100\nbetween_nodes_gb_per_s = 10\nlatency_us = 0\n\
            data_overlap = 0\n";
        Hardware::parse(text, Path::new("round.toml")).unwrap()
    }

    fn time(overrides: &[&str], stage: usize, layout: Layout, hardware: &Hardware) -> StepTime {
        let (recipe, model) = llama3_8b(overrides);
        StepTime::new(&Work::new(&recipe, &recipe.stages[stage], &model, layout).unwrap(), hardware)
    }

    // Forward, of a token: a block of LLaMA-3-8B has 218,103,808 weights in matrices and the head 659,030,016; 4096.5
    // keys on average, 32 heads of 128; c = 4096, q + kv = 5120, i = 14,336.
    const LINEAR: f64 = 2.0 * (32.0 * 218_103_808.0 + 659_030_016.0);
    const ATTENTION: f64 = 32.0 * 4.0 * 4096.5 * 4096.0;
    /// Numbers that a block's norms, RoPE and SwiGLU move.
    const MOVED: f64 = 4.0 * 4096.0 + 2.0 * 5120.0 + 3.0 * 14_336.0;

    #[track_caller]
    fn close(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-9, "{found} {expected}");
    }

    #[test]
    fn compute_is_products_attention_and_what_is_moved() {
        // 160,896 logits in f32 are moved three times.
        let backward = 8.0 * 4096.0 + 2.0 * 5120.0 + 2.0 * 4096.0 + 6.0 * 14_336.0;
        let moved = 2.0 * 32.0 * (MOVED + backward + 4.0 * 4096.0) + 12.0 * 160_896.0;
        let token = 3.0 * LINEAR / 1e14 + 3.5 * ATTENTION / 5e13 + moved / 1e12;
        let alone = time(&[], 0, Layout::ALONE, &round());
        close(alone.compute, 16_777_216.0 * token);
        assert_eq!((alone.tensor, alone.sends, alone.bubble, alone.data), (0.0, 0.0, 0.0, 0.0));
        // 24 of 32 heads save a quarter of attention, whole blocks again cost one more forward.
        let moh = time(&[], 1, Layout::ALONE, &round());
        close(alone.compute - moh.compute, 16_777_216.0 * 3.5 * 0.25 * ATTENTION / 5e13);
        // Dense layers on the first rank of a pipeline, half of the heads on the second, which has the head
        // and so fewer blocks.
        let counts = |first: usize, second: usize| [vec![first; 18], vec![second; 14]].concat();
        let shared = format!("stage.moh.moh.shared_heads={:?}", counts(32, 10));
        let top_k = format!("stage.moh.moh.routed_top_k={:?}", counts(0, 6));
        let (recipe, model) = llama3_8b(&[&shared, &top_k]);
        let layout = Layout { pipeline: 2, ..Layout::ALONE };
        let work = Work::new(&recipe, &recipe.stages[1], &model, layout).unwrap();
        let active = |layer| work.model.layer_heads(layer).active() as f64;
        assert_eq!([0, 1].map(|rank| mean(&work, rank, active)), [32.0, 16.0]);
        let again = time(&["memory.recompute=block"], 0, Layout::ALONE, &round());
        let more = 2.0 * 32.0 * 218_103_808.0 / 1e14
            + ATTENTION / 5e13
            + 2.0 * 32.0 * (MOVED - 4.0 * 4096.0) / 1e12;
        close(again.compute - alone.compute, 16_777_216.0 * more);
    }

    #[test]
    fn a_teacher_passes_forward_beside_the_model() {
        let teacher = "stage.moh.distill={ teacher = \"another\" }";
        let token =
            LINEAR / 1e14 + ATTENTION / 5e13 + (2.0 * 32.0 * MOVED + 12.0 * 160_896.0) / 1e12;
        let times = |layout| [&[][..], &[teacher]].map(|set| time(set, 1, layout, &round()));
        let [alone, taught] = times(Layout::ALONE);
        close(taught.compute - alone.compute, 16_777_216.0 * token);
        let (tensor, pipeline) =
            (Layout { tensor: 2, ..Layout::ALONE }, Layout { pipeline: 4, ..Layout::ALONE });
        let [alone, taught] = times(tensor);
        // A teacher adds 4 exchanges to the 10 of each of 32 blocks, and 2 to the 4 of the ends. The exchanges of
        // heads' norms and sums are small.
        let more = (taught.tensor / alone.tensor - 1.0) / (130.0 / 324.0);
        assert!((more - 1.0).abs() < 0.02, "{more}");
        // The busiest rank sends forward and backward, or in one direction.
        let [alone, taught] = times(pipeline);
        let more = taught.sends / alone.sends;
        assert!(more == 1.5 || more == 2.0 || more == 1.0, "{more}");
    }

    #[test]
    fn the_optimizer_moves_its_state_once() {
        // f32 gradients and bf16 moments: 8 + 8 + 8 bytes a number of the share, 4 of all.
        let layout = Layout { data: 64, ..Layout::ALONE };
        let time = time(&[], 0, layout, &round());
        close(time.optimizer, 8_297_648_128.0 * 24.0 / 64.0 / 1e12);
    }

    #[test]
    fn exchanges_take_their_bytes_over_the_bandwidth() {
        // Two tensor ranks in a node, and 32 data ranks, four in each node, so 40 GB/s.
        let layout = Layout { tensor: 2, data: 32, ..Layout::ALONE };
        let mut hardware = round();
        let (recipe, model) = llama3_8b(&[]);
        let work = Work::new(&recipe, &recipe.stages[0], &model, layout).unwrap();
        let traffic = communication::Traffic::new(&work, 0);
        let found = StepTime::new(&work, &hardware);
        close(found.tensor, traffic.tensor.bytes / 100e9);
        close(found.data, traffic.data.bytes / 40e9);
        // The whole exchange fits beside the passes of a micro-batch, which take seconds.
        hardware.network.data_overlap.value = 1.0;
        assert_eq!(StepTime::new(&work, &hardware).data, 0.0);
        hardware.network.latency_us.value = 10.0;
        let latency = StepTime::new(&work, &hardware).tensor - found.tensor;
        close(latency, 1e-5 * traffic.tensor.operations);
    }

    #[test]
    fn equal_stages_wait_for_the_published_share_of_a_step() {
        // A vocabulary of one row makes a head that is next to nothing.
        let overrides = ["model.new.vocab_size=1", "model.new.num_hidden_layers=8"];
        let (recipe, model) = small(&overrides);
        // 2 micro-batches a step: (p - 1) / (v m + p - 1) of the passes' time.
        for (pipeline, virtual_stages, share) in [(2, 1, 1.0 / 3.0), (4, 1, 0.6), (4, 2, 3.0 / 7.0)]
        {
            let layout = Layout { pipeline, virtual_stages, ..Layout::ALONE };
            let work = Work::new(&recipe, &recipe.stages[0], &model, layout).unwrap();
            let mut hardware = round();
            hardware.network.within_node_gb_per_s.value = 1e9;
            let time = StepTime::new(&work, &hardware);
            let found = time.bubble / (time.compute + time.bubble);
            assert!((found - share).abs() < 2e-3, "{pipeline} {virtual_stages}: {found} {share}");
        }
    }
}
