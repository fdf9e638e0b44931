//! Attention on Hopper's tensor cores (hopper/hopper.cu).
//!
//! The gradient of the queries is summed over tiles of keys: starting with the first keys if
//! results must have the same bits in every run, or else in the order in which the tiles finish.

use bytemuck::{Pod, Zeroable};

use super::packed::{PACK_BACKWARD, PACK_FORWARD, Packed, Parameters};
use super::{Addresses, AttentionArgs};
use crate::cuda::{BoxedTensor, Cuda, TensorMap, mirrored};
use crate::error::Result;
use crate::gpu_workspace::attention::{
    Areas, ROWS, hopper_supports, packed_before_areas, row_tiles, sequences_at_once, tile_bytes,
};
use crate::scalar::Element;

/// Threads per block of the forward and backward kernels, and of the kernels before and after the
/// backward one.
const THREADS: usize = 384;
const OTHER_THREADS: usize = 256;
/// Keys of a tile, and packed rows of a tile in the forward pass.
const KEYS: usize = 128;
const FORWARD_ROWS: usize = 128;
/// Stages of tiles in shared memory, and of queries in the backward pass.
const STAGES: usize = 2;
const QUERY_STAGES: usize = 3;
/// Columns of a matrix's panel in shared memory.
const PANEL: usize = 64;
/// Alignment of rows in elements: 16 bytes.
const ALIGNMENT: usize = 8;
/// `Scratch` of hopper.cuh.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Scratch {
    row_tiles: u64,
    d_q_sums: u64,
    /// 0 if the tiles of keys add to d_q in any order: none of them waits, and every run rounds
    /// differently.
    semaphores: u64,
    next_tile: u64,
    /// Blocks of the backward pass that run at the same time: a group. Odd groups visit rows in
    /// ascending order, even groups in descending order; if 0, all descend.
    blocks_at_once: u32,
    padding: u32,
}

mirrored!(
    Scratch, 40,
    row_tiles 0, d_q_sums 8, semaphores 16, next_tile 24, blocks_at_once 32, padding 36,
);

/// `Maps` of hopper.cuh.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Maps {
    k: TensorMap,
    v: TensorMap,
}

mirrored!(Maps, 256, k 0, v 128);

/// `forward_shared` of hopper.cuh.
fn forward_shared_bytes(width: usize) -> usize {
    STAGES * (tile_bytes(FORWARD_ROWS + 2 * KEYS, width) + 4 * FORWARD_ROWS * 4 + 4 * 4)
        + 6 * STAGES * 8
}

/// `backward_shared` of hopper.cuh.
fn backward_shared_bytes(width: usize) -> usize {
    tile_bytes(2 * KEYS + (QUERY_STAGES + STAGES) * ROWS, width)
        + STAGES * tile_bytes(ROWS, KEYS)
        + ROWS * width * 4
        + QUERY_STAGES * ROWS * 16
        + (2 * (QUERY_STAGES + STAGES) + 1) * 8
        + 6 * 4
}

/// Whether these kernels support the problem: a Hopper GPU, bf16, a head_dim of 64 or 128, contiguous
/// keys, rows that start at multiples of 16 bytes, and indices into a sequence that fit 32 bits.
pub(super) fn supports<T: Element>(
    cuda: &Cuda,
    args: &AttentionArgs<'_, Cuda>,
    at: &Addresses,
) -> bool {
    let (shape, device) = (&args.shape, cuda.device());
    hopper_supports::<T>(shape)
        && at.block_table == 0
        && at.are_multiples_of(shape, ALIGNMENT)
        && at.fit_32_bits(shape)
        && device.runs_hopper()
        && forward_shared_bytes(shape.head_dim) <= cuda.most_shared_bytes()
        && backward_shared_bytes(shape.head_dim) <= cuda.most_shared_bytes()
}

/// A range of sequences of a problem whose rows are packed.
struct Part<'a, 'v> {
    packed: &'a Packed<'a, 'v>,
    parameters: Parameters,
    scratch: Scratch,
    maps: Maps,
}

impl<'a, 'v> Part<'a, 'v> {
    fn new(packed: &'a Packed<'a, 'v>, parameters: Parameters, scratch: Scratch) -> Result<Self> {
        let shape = &packed.args.shape;
        let ([k, v], stride) = parameters.key_values();
        let map = |address| {
            packed.cuda.device().tensor_map(&BoxedTensor {
                address,
                dimensions: [
                    (shape.kv_heads * shape.head_dim) as u64,
                    shape.key_length as u64,
                    parameters.batch() as u64,
                ],
                strides: [2 * stride, 2 * stride * shape.key_length as u64],
                sides: [PANEL as u32, KEYS as u32, 1],
            })
        };
        let maps = Maps { k: map(k)?, v: map(v)? };
        Ok(Part { packed, parameters, scratch, maps })
    }

    /// Runs a kernel, with the maps as its last argument if `WITH_MAPS`.
    fn run<const WITH_MAPS: bool>(
        &self,
        threads: usize,
        kernel: &str,
        grid: [usize; 3],
        shared_bytes: usize,
    ) -> Result<()> {
        let kernel = format!("{kernel}_d{}", self.packed.args.shape.head_dim);
        let structures = [
            bytemuck::bytes_of(&self.parameters),
            bytemuck::bytes_of(&self.scratch),
            bytemuck::bytes_of(&self.maps),
        ];
        let structures = if WITH_MAPS { &structures[..] } else { &structures[..2] };
        self.packed.cuda.launch_with(threads, &kernel, grid, shared_bytes, structures)
    }

    fn forward(&self) -> Result<()> {
        let shape = &self.packed.args.shape;
        let grid = [self.packed.cuda.device().multiprocessors(), 1, 1];
        self.run::<true>(THREADS, "hopper_forward", grid, forward_shared_bytes(shape.head_dim))
    }

    fn backward(&self) -> Result<()> {
        let shape = &self.packed.args.shape;
        let width = shape.head_dim;
        let grid = |blocks| [blocks, shape.kv_heads, self.parameters.batch()];
        // One thread per 8 elements of a row.
        let blocks = row_tiles(shape) * (ROWS * width / 8 / OTHER_THREADS);
        self.run::<false>(OTHER_THREADS, "hopper_prepare", grid(blocks), 0)?;
        let key_tiles = shape.key_length.div_ceil(KEYS);
        let by_key_tile = [key_tiles * shape.kv_heads, 1, self.parameters.batch()];
        let shared_bytes = backward_shared_bytes(width);
        self.run::<true>(THREADS, "hopper_backward", by_key_tile, shared_bytes)?;
        let (blocks, shared_bytes) = (row_tiles(shape), tile_bytes(ROWS, width));
        self.run::<false>(OTHER_THREADS, "hopper_finish", grid(blocks), shared_bytes)
    }
}

pub(super) fn forward(
    cuda: &Cuda,
    args: &AttentionArgs<'_, Cuda>,
    at: &Addresses,
    scratch: u64,
) -> Result<()> {
    let packed = Packed::new(PACK_FORWARD, cuda, args, at, scratch)?;
    let scratch = Scratch { next_tile: cuda.counter()?, ..Scratch::zeroed() };
    Part::new(&packed, packed.parameters, scratch)?.forward()
}

pub(super) fn backward(
    cuda: &Cuda,
    args: &AttentionArgs<'_, Cuda>,
    at: &Addresses,
    scratch: u64,
) -> Result<()> {
    backward_by(sequences_at_once(&args.shape), cuda, args, at, scratch)
}

/// The backward pass, with `sequences` sequences at a time.
fn backward_by(
    sequences: usize,
    cuda: &Cuda,
    args: &AttentionArgs<'_, Cuda>,
    at: &Addresses,
    scratch: u64,
) -> Result<()> {
    let shape = &args.shape;
    let packed = Packed::new(PACK_BACKWARD, cuda, args, at, scratch)?;
    let areas = Areas::new(shape, sequences);
    let row_tiles = scratch + packed_before_areas(shape, args.is_routed()) as u64;
    let d_q_sums = row_tiles + areas.row_tiles as u64;
    let semaphores = if cuda.is_deterministic() { d_q_sums + areas.d_q_sums as u64 } else { 0 };
    // The same number of each head.
    let at_once = (cuda.device().multiprocessors() / shape.kv_heads).max(1) * shape.kv_heads;
    let blocks_at_once = if semaphores == 0 { at_once as u32 } else { 0 };
    let scratch = Scratch { row_tiles, d_q_sums, semaphores, blocks_at_once, ..Scratch::zeroed() };
    for first in (0..shape.batch).step_by(sequences) {
        let count = sequences.min(shape.batch - first);
        Part::new(&packed, packed.parameters.of_sequences(first, count), scratch)?.backward()?;
    }
    Ok(())
}

#[cfg(all(test, feature = "cuda-emulator"))]
#[allow(clippy::unwrap_used)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::attention::{AttentionShape, Selection};
    use crate::cuda::CudaBuffer;
    use crate::gpu_workspace::attention::hopper_backward_bytes;
    use crate::memory::Memory;
    use crate::rope::QkvShape;

    const SHAPE: QkvShape = QkvShape { batch: 3, length: 40, heads: 4, kv_heads: 2, head_dim: 64 };

    /// Elements of both signs, different everywhere.
    fn elements(count: usize, factor: f32) -> Vec<bf16> {
        (0..count).map(|at| bf16::from_f32((at as f32 * factor).sin())).collect()
    }

    fn uploaded<S: crate::Scalar>(cuda: &Cuda, elements: &[S]) -> CudaBuffer<S> {
        let mut buffer = cuda.allocate(elements.len()).unwrap();
        cuda.upload(elements, buffer.view_mut(0..elements.len())).unwrap();
        buffer
    }

    /// One of the three heads that are not shared, another one for each token.
    fn selected() -> Vec<u8> {
        (0..SHAPE.tokens() * 3).map(|at| u8::from(at % 3 == at / 3 * 7 % 3)).collect()
    }

    #[test]
    fn sequences_in_several_parts_have_the_gradients_of_all_at_once() {
        let cuda = Cuda::emulated();
        let (tokens, pairs) = (SHAPE.tokens(), SHAPE.tokens() * SHAPE.heads);
        let qkv = uploaded(&cuda, &elements(tokens * SHAPE.row(), 0.37));
        let routed = uploaded(&cuda, &selected());
        // The documents' lengths differ between sequences.
        let start = |at: usize| {
            let (length, position) = (11 + at / SHAPE.length, at % SHAPE.length);
            (position / length * length) as u32
        };
        let starts: Vec<u32> = (0..tokens).map(start).collect();
        let starts = uploaded(&cuda, &starts);
        let weights: Vec<f32> = (0..pairs).map(|at| 1.0 + at as f32 / pairs as f32).collect();
        let weights = uploaded(&cuda, &weights);
        let shape = AttentionShape {
            batch: SHAPE.batch,
            query_length: SHAPE.length,
            key_length: SHAPE.length,
            heads: SHAPE.heads,
            kv_heads: SHAPE.kv_heads,
            head_dim: SHAPE.head_dim,
            query_stride: SHAPE.row(),
        };
        let selection = Selection {
            shared_heads: 1,
            routed: routed.view(0..routed.len()),
            weights: Some(weights.view(0..pairs)),
        };
        let args = AttentionArgs {
            document_start: Some(starts.view(0..tokens)),
            selection: Some(selection),
            ..AttentionArgs::causal(shape)
        };

        let outputs = pairs * SHAPE.head_dim;
        let out = uploaded(&cuda, &vec![bf16::NAN; outputs]);
        let log_sum_exp = uploaded(&cuda, &vec![f32::NAN; pairs]);
        let d_out = uploaded(&cuda, &elements(outputs, 0.73));
        let results = |sequences| {
            let d_qkv = uploaded(&cuda, &vec![bf16::NAN; tokens * SHAPE.row()]);
            let delta = uploaded(&cuda, &vec![f32::NAN; pairs]);
            let at = Addresses {
                out: out.address(),
                log_sum_exp: log_sum_exp.address(),
                d_out: d_out.address(),
                d_qkv: d_qkv.address(),
                delta: delta.address(),
                ..Addresses::of_qkv::<bf16>(&shape, qkv.address())
            };
            let scratch = cuda.scratch(hopper_backward_bytes(&shape, true)).unwrap();
            forward(&cuda, &args, &at, scratch).unwrap();
            backward_by(sequences, &cuda, &args, &at, scratch).unwrap();
            let mut gradients = vec![bf16::ZERO; d_qkv.len()];
            cuda.download(d_qkv.view(0..d_qkv.len()), &mut gradients).unwrap();
            let mut deltas = vec![0f32; pairs];
            cuda.download(delta.view(0..pairs), &mut deltas).unwrap();
            assert!(gradients.iter().all(|x| x.is_finite()) && deltas.iter().all(|x| !x.is_nan()));
            (gradients, deltas)
        };
        let all = results(SHAPE.batch);
        assert!(results(1) == all);
        assert!(results(2) == all);
    }
}
