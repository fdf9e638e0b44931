//! Attention on Hopper's tensor cores (hopper/hopper.cu).
//!
//! The gradient of the queries is summed over tiles of keys. If results must have the same bits in every
//! run, the sum starts with the first keys, otherwise it has the order in which the tiles finish.

use bytemuck::Zeroable;

use super::Pass;
use super::packed::{PACK_BACKWARD, PACK_FORWARD, Packed};
use crate::cuda::BoxedTensor;
use crate::cuda::parameters::hopper_attention::{Maps, Scratch};
use crate::cuda::parameters::tiled_attention::Parameters;
use crate::workspace::gpu::attention::{
    Areas, ROWS, hopper_supports, packed_before_areas, row_tiles, sequences_at_once, tile_bytes,
};
use crate::{Element, Result};

/// Threads per block of the forward and backward kernels, and of the kernels before and after the
/// backward kernel.
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

/// Returns `forward_shared` of hopper.cuh.
fn forward_shared_bytes(width: usize) -> usize {
    STAGES * (tile_bytes(FORWARD_ROWS + 2 * KEYS, width) + 4 * FORWARD_ROWS * 4 + 4 * 4)
        + 6 * STAGES * 8
}

/// Returns `backward_shared` of hopper.cuh.
fn backward_shared_bytes(width: usize) -> usize {
    tile_bytes(2 * KEYS + (QUERY_STAGES + STAGES) * ROWS, width)
        + STAGES * tile_bytes(ROWS, KEYS)
        + ROWS * width * 4
        + QUERY_STAGES * ROWS * 16
        + (2 * (QUERY_STAGES + STAGES) + 1) * 8
        + 6 * 4
}

/// Returns whether these kernels support the problem: a Hopper GPU, bf16, a head_dim of 64 or 128, contiguous
/// keys, rows that start at multiples of 16 bytes, and indices into a sequence that fit 32 bits.
pub(super) fn supports<T: Element>(pass: Pass<'_, '_>) -> bool {
    let Pass { cuda, args, at } = pass;
    let (shape, device) = (&args.shape, cuda.device());
    hopper_supports::<T>(shape)
        && at.block_table == 0
        && at.are_multiples_of(shape, ALIGNMENT)
        && at.fit_32_bits(shape)
        && device.runs_hopper()
        && forward_shared_bytes(shape.head_dim) <= cuda.most_shared_bytes
        && backward_shared_bytes(shape.head_dim) <= cuda.most_shared_bytes
}

/// A range of sequences of a problem with packed rows.
struct Part<'a, 'v> {
    packed: &'a Packed<'a, 'v>,
    parameters: Parameters,
    scratch: Scratch,
    maps: Maps,
}

impl<'a, 'v> Part<'a, 'v> {
    fn new(packed: &'a Packed<'a, 'v>, parameters: Parameters, scratch: Scratch) -> Result<Self> {
        let shape = &packed.pass.args.shape;
        let Parameters { k, v, kv_stride, batch, .. } = parameters;
        let map = |address| {
            packed.pass.cuda.device().tensor_map(&BoxedTensor {
                address,
                dimensions: [
                    (shape.kv_heads * shape.head_dim) as u64,
                    shape.key_length as u64,
                    batch.into(),
                ],
                strides: [2 * kv_stride, 2 * kv_stride * shape.key_length as u64],
                sides: [PANEL as u32, KEYS as u32, 1],
            })
        };
        let maps = Maps { k: map(k)?, v: map(v)? };
        Ok(Part { packed, parameters, scratch, maps })
    }

    fn run<const WITH_MAPS: bool>(
        &self,
        threads: usize,
        kernel: &str,
        grid: [usize; 3],
        shared_bytes: usize,
    ) -> Result<()> {
        let kernel = format!("{kernel}_d{}", self.packed.pass.args.shape.head_dim);
        let structures = [
            bytemuck::bytes_of(&self.parameters),
            bytemuck::bytes_of(&self.scratch),
            bytemuck::bytes_of(&self.maps),
        ];
        let structures = if WITH_MAPS { &structures[..] } else { &structures[..2] };
        self.packed.pass.cuda.launch_with(threads, &kernel, grid, shared_bytes, structures)
    }

    fn forward(&self) -> Result<()> {
        let shape = &self.packed.pass.args.shape;
        let grid = [self.packed.pass.cuda.device().multiprocessors(), 1, 1];
        self.run::<true>(THREADS, "hopper_forward", grid, forward_shared_bytes(shape.head_dim))
    }

    fn backward(&self) -> Result<()> {
        let shape = &self.packed.pass.args.shape;
        let width = shape.head_dim;
        let batch = self.parameters.batch as usize;
        let grid = |blocks| [blocks, shape.kv_heads, batch];
        // One thread per 8 elements of a row.
        let blocks = row_tiles(shape) * (ROWS * width / 8 / OTHER_THREADS);
        self.run::<false>(OTHER_THREADS, "hopper_prepare", grid(blocks), 0)?;
        let key_tiles = shape.key_length.div_ceil(KEYS);
        let by_key_tile = [key_tiles * shape.kv_heads, 1, batch];
        let shared_bytes = backward_shared_bytes(width);
        self.run::<true>(THREADS, "hopper_backward", by_key_tile, shared_bytes)?;
        let (blocks, shared_bytes) = (row_tiles(shape), tile_bytes(ROWS, width));
        self.run::<false>(OTHER_THREADS, "hopper_finish", grid(blocks), shared_bytes)
    }
}

pub(super) fn forward(pass: Pass<'_, '_>, scratch: u64) -> Result<()> {
    let packed = Packed::new(PACK_FORWARD, pass, scratch)?;
    let scratch = Scratch { next_tile: pass.cuda.counter()?, ..Scratch::zeroed() };
    Part::new(&packed, packed.parameters, scratch)?.forward()
}

pub(super) fn backward(pass: Pass<'_, '_>, scratch: u64) -> Result<()> {
    backward_by(sequences_at_once(&pass.args.shape), pass, scratch)
}

/// Runs the backward pass, with `sequences` sequences at a time.
fn backward_by(sequences: usize, pass: Pass<'_, '_>, scratch: u64) -> Result<()> {
    let Pass { cuda, args, .. } = pass;
    let shape = &args.shape;
    let packed = Packed::new(PACK_BACKWARD, pass, scratch)?;
    let areas = Areas::new(shape, sequences);
    let row_tiles = scratch + packed_before_areas(shape, args.is_routed()) as u64;
    let d_q_sums = row_tiles + areas.row_tiles as u64;
    let semaphores = if cuda.is_deterministic() { d_q_sums + areas.d_q_sums as u64 } else { 0 };
    // The group has the same number of blocks of each head.
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
    use crate::attention::cuda::Addresses;
    use crate::attention::{AttentionArgs, AttentionShape, Selection};
    use crate::cuda::{Cuda, CudaBuffer};
    use crate::workspace::gpu::attention::hopper_backward_bytes;
    use crate::{Memory, QkvShape};

    /// Returns elements of both signs, all different.
    fn elements(count: usize, factor: f32) -> Vec<bf16> {
        (0..count).map(|at| bf16::from_f32((at as f32 * factor).sin())).collect()
    }

    fn uploaded<S: crate::Scalar>(cuda: &Cuda, elements: &[S]) -> CudaBuffer<S> {
        let mut buffer = cuda.allocate(elements.len()).unwrap();
        cuda.upload(elements, buffer.view_mut(0..elements.len())).unwrap();
        buffer
    }

    fn downloaded<S: crate::Scalar>(cuda: &Cuda, buffer: &CudaBuffer<S>) -> Vec<S> {
        let mut elements = vec![S::zeroed(); buffer.len()];
        cuda.download(buffer.view(0..buffer.len()), &mut elements).unwrap();
        elements
    }

    /// Causal attention of the heads that each token selects, within documents.
    struct Problem {
        cuda: Cuda,
        shape: AttentionShape,
        qkv: CudaBuffer<bf16>,
        /// `[tokens, heads]`.
        selected: CudaBuffer<u8>,
        weights: CudaBuffer<f32>,
        document_start: CudaBuffer<u32>,
    }

    /// The results of a backward pass.
    #[derive(PartialEq)]
    struct Results {
        gradients: Vec<bf16>,
        delta: Vec<f32>,
        /// The semaphores of the last sequences.
        semaphores: Vec<u32>,
    }

    impl Problem {
        fn new(
            shape: QkvShape,
            is_selected: impl Fn(usize, usize) -> bool,
            document_start: impl Fn(usize, usize) -> usize,
        ) -> Self {
            let QkvShape { length, heads, .. } = shape;
            let (tokens, pairs) = (shape.tokens(), shape.tokens() * heads);
            let selected: Vec<u8> =
                (0..pairs).map(|at| u8::from(is_selected(at / heads, at % heads))).collect();
            let weights: Vec<f32> = (0..pairs).map(|at| 1.0 + at as f32 / pairs as f32).collect();
            let starts: Vec<u32> =
                (0..tokens).map(|at| document_start(at / length, at % length) as u32).collect();
            let cuda = Cuda::emulated();
            Problem {
                qkv: uploaded(&cuda, &elements(tokens * shape.row(), 0.37)),
                selected: uploaded(&cuda, &selected),
                weights: uploaded(&cuda, &weights),
                document_start: uploaded(&cuda, &starts),
                shape: AttentionShape::of_qkv(&shape, length),
                cuda,
            }
        }

        /// Runs both passes, the backward pass with `sequences` sequences at a time.
        fn run(&self, sequences: usize) -> Results {
            let (cuda, shape) = (&self.cuda, &self.shape);
            let pairs = self.selected.len();
            let selection = Selection {
                shared_heads: 0,
                routed: self.selected.view(0..pairs),
                weights: Some(self.weights.view(0..pairs)),
            };
            let args = AttentionArgs {
                document_start: Some(self.document_start.view(0..shape.tokens())),
                selection: Some(selection),
                ..AttentionArgs::causal(*shape)
            };
            let out = uploaded(cuda, &vec![bf16::NAN; pairs * shape.head_dim]);
            let log_sum_exp = uploaded(cuda, &vec![f32::NAN; pairs]);
            let d_out = uploaded(cuda, &elements(out.len(), 0.73));
            let d_qkv = uploaded(cuda, &vec![bf16::NAN; self.qkv.len()]);
            let delta = uploaded(cuda, &vec![f32::NAN; pairs]);
            let at = Addresses {
                out: out.address(),
                log_sum_exp: log_sum_exp.address(),
                d_out: d_out.address(),
                d_qkv: d_qkv.address(),
                delta: delta.address(),
                ..Addresses::of_qkv::<bf16>(shape, self.qkv.address())
            };
            let scratch = cuda.scratch(hopper_backward_bytes(shape, true)).unwrap();
            let pass = Pass { cuda, args: &args, at: &at };
            forward(pass, scratch).unwrap();
            backward_by(sequences, pass, scratch).unwrap();
            let areas = Areas::new(shape, sequences);
            let areas_at = scratch + packed_before_areas(shape, true) as u64;
            let mut semaphores = vec![0u32; areas.semaphores / size_of::<u32>()];
            let semaphores_at = areas_at + (areas.row_tiles + areas.d_q_sums) as u64;
            let bytes = bytemuck::cast_slice_mut(&mut semaphores);
            cuda.device().download(semaphores_at, bytes).unwrap();
            let (gradients, delta) = (downloaded(cuda, &d_qkv), downloaded(cuda, &delta));
            assert!(gradients.iter().all(|x| x.is_finite()) && delta.iter().all(|x| !x.is_nan()));
            Results { gradients, delta, semaphores }
        }
    }

    #[test]
    fn sequences_in_several_parts_have_the_gradients_of_all_at_once() {
        let shape = QkvShape { batch: 3, length: 40, heads: 4, kv_heads: 2, head_dim: 64 };
        // The first head, and one of the three other heads, which differs from token to token.
        let is_selected = |token: usize, head: usize| head == 0 || head - 1 == token * 7 % 3;
        // The documents' lengths differ between sequences.
        let start = |sequence: usize, position: usize| {
            let length = 11 + sequence;
            position / length * length
        };
        let problem = Problem::new(shape, is_selected, start);
        let all = problem.run(shape.batch);
        for sequences in [1, 2] {
            let parts = problem.run(sequences);
            assert!(parts.gradients == all.gradients && parts.delta == all.delta);
        }
    }

    /// The first 101 tokens select the query heads of the second key/value head, the other tokens select the
    /// heads of the first. Therefore no row of the second head sees keys from 128 on, and its last row tile is
    /// partial.
    #[test]
    fn a_row_tile_is_visited_by_the_tiles_of_keys_that_it_sees() {
        let shape = QkvShape { batch: 1, length: 300, heads: 4, kv_heads: 2, head_dim: 64 };
        let changes = 101;
        let problem = Problem::new(shape, |token, head| (token < changes) == (head >= 2), |_, _| 0);
        // For each key/value head, the tokens with rows, two rows each.
        let visits = [changes..shape.length, 0..changes].map(|tokens| {
            let row_tiles = (2 * tokens.len()).div_ceil(ROWS);
            let last = |tile: usize| (tokens.start + (tile + 1) * ROWS / 2).min(tokens.end) - 1;
            (0..row_tiles).map(|tile| (last(tile) / KEYS + 1) as u32).collect::<Vec<_>>()
        });
        let semaphores = problem.run(1).semaphores;
        let of_head: Vec<_> = semaphores.chunks(semaphores.len() / shape.kv_heads).collect();
        assert_eq!(of_head[0][..visits[0].len()], visits[0]);
        assert_eq!(of_head[1][..visits[1].len()], visits[1]);
    }
}
