//! Scratch memory of attention on a GPU.

use crate::attention::AttentionShape;
use crate::scalar::{DType, Element};

/// Head dimensions for which Hopper's kernels are compiled.
const HOPPER_WIDTHS: [usize; 2] = [64, 128];
/// Largest head dimension of the other kernels on tensor cores.
pub(crate) const MAX_TILED_HEAD_DIM: usize = 128;
/// Packed rows of a tile of the backward pass of Hopper's kernels.
pub(crate) const ROWS: usize = 64;
/// Maximum scratch memory of several sequences in one launch of Hopper's backward pass.
const MAX_BACKWARD_BYTES: usize = 512 << 20;

/// Returns the bytes of a tile of bf16.
pub(crate) fn tile_bytes(rows: usize, width: usize) -> usize {
    rows * width * 2
}

/// Returns `row_tile_bytes` of hopper.cuh.
fn row_tile_bytes(width: usize) -> usize {
    tile_bytes(2 * ROWS, width) + ROWS * 16
}

/// Returns the bytes of the packed rows; 0 if every row is selected.
pub(crate) fn packed_bytes(shape: &AttentionShape, routed: bool) -> usize {
    if routed { (shape.tokens() * shape.heads + shape.batch * shape.kv_heads) * 4 } else { 0 }
}

/// Returns the bytes of the packed rows before other areas, which start at multiples of 16 bytes.
pub(crate) fn packed_before_areas(shape: &AttentionShape, routed: bool) -> usize {
    packed_bytes(shape, routed).next_multiple_of(16)
}

/// Returns the bytes of `<d_out, O>` if the caller does not request it, rounded up to a multiple of 16.
pub(crate) fn delta_bytes(shape: &AttentionShape) -> usize {
    (shape.tokens() * shape.heads * size_of::<f32>()).next_multiple_of(16)
}

/// Returns whether offsets of queries, keys and values within a sequence fit 32 bits, with `key_stride`
/// elements from one key to the next.
pub(crate) fn fits_32_bits(shape: &AttentionShape, key_stride: usize) -> bool {
    let longest = shape.query_length.max(shape.key_length);
    let widest = shape.query_stride.max(key_stride).max(shape.heads);
    u32::try_from(longest.saturating_mul(widest)).is_ok()
}

/// Returns whether Hopper's kernels support the type and shape: bf16, a head_dim of 64 or 128. Addresses
/// and strides may add conditions.
pub(crate) fn hopper_supports<T: Element>(shape: &AttentionShape) -> bool {
    T::DTYPE == DType::BF16 && HOPPER_WIDTHS.contains(&shape.head_dim) && shape.tokens() > 0
}

/// Returns the row tiles of each key/value head of a sequence.
pub(crate) fn row_tiles(shape: &AttentionShape) -> usize {
    (shape.query_length * shape.group_size()).div_ceil(ROWS)
}

/// Bytes of the scratch of Hopper's backward pass after the packed rows, for several sequences.
pub(crate) struct Areas {
    pub row_tiles: usize,
    pub d_q_sums: usize,
    pub semaphores: usize,
}

impl Areas {
    pub(crate) fn new(shape: &AttentionShape, sequences: usize) -> Self {
        let tiles = sequences * shape.kv_heads * row_tiles(shape);
        Areas {
            row_tiles: tiles * row_tile_bytes(shape.head_dim),
            d_q_sums: tiles * ROWS * shape.head_dim * 4,
            semaphores: tiles * 4,
        }
    }

    fn bytes(&self) -> usize {
        self.row_tiles + self.d_q_sums + self.semaphores
    }
}

/// Returns the sequences per launch of Hopper's backward pass: at least one, and as many as fit
/// [`MAX_BACKWARD_BYTES`].
pub(crate) fn sequences_at_once(shape: &AttentionShape) -> usize {
    let one = Areas::new(shape, 1).bytes().max(1);
    (MAX_BACKWARD_BYTES / one).clamp(1, shape.batch.max(1))
}

pub(crate) fn hopper_backward_bytes(shape: &AttentionShape, routed: bool) -> usize {
    packed_before_areas(shape, routed) + Areas::new(shape, sequences_at_once(shape)).bytes()
}

/// Returns the scratch of the backward pass of packed queries, keys and values of `T` on a Hopper GPU. Other GPUs
/// do not need more.
pub(crate) fn backward_bytes<T: Element>(shape: &AttentionShape, routed: bool) -> usize {
    let tensor_cores = T::DTYPE == DType::BF16 && fits_32_bits(shape, shape.query_stride);
    let path = if tensor_cores && hopper_supports::<T>(shape) {
        hopper_backward_bytes(shape, routed)
    } else if tensor_cores
        && shape.head_dim <= MAX_TILED_HEAD_DIM
        && shape.head_dim.is_multiple_of(2)
    {
        packed_bytes(shape, routed)
    } else {
        0
    };
    delta_bytes(shape) + path
}
