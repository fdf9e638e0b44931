//! Pairs of bf16 in tiles, which Intel's tile unit (AMX) multiplies and adds in f32.

use bytemuck::{Pod, Zeroable};
use pulp::{Arch, Simd, WithSimd};

use super::factor::{Block, Factor};
use super::matmul::{Matmul, Sizes};
use super::pair::Pair;
use crate::matmul::{Bf16Path, in_place};
use crate::scalar::Element;

/// A [`Pair`] that is multiplied in tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(super) struct TilePair(Pair);

/// Columns of the narrowest head that is multiplied in tiles: it is padded to 32 columns.
const FEWEST: usize = 16;

impl Factor for TilePair {
    const TERMS: usize = Pair::TERMS;
    const MULTIPLE: usize = in_place::MULTIPLE;
    const LEFT_ALONG_TERMS: bool = true;

    fn multiplies<T: Element>(arch: Arch, head_dim: usize) -> bool {
        Pair::multiplies::<T>(arch, head_dim)
            && Bf16Path::in_use() == Bf16Path::Amx
            && head_dim >= FEWEST
    }

    #[inline(always)]
    fn of<T: Element>(term: impl Fn(usize) -> T) -> TilePair {
        TilePair(Pair::of(term))
    }

    fn dispatch<W: WithSimd>(arch: Arch, work: W) -> W::Output {
        in_place::with_tiles(|| Pair::dispatch(arch, work))
    }

    #[inline(always)]
    fn matmul<S: Simd>(_: S, matmul: Matmul<'_, TilePair>, out: &mut [f32], accumulate: bool) {
        let Matmul { sizes: Sizes { rows, depth, columns }, left, right } = matmul;
        assert!(left.column_stride == 1);
        let left = (bytemuck::cast_slice(left.data), left.row_stride);
        let right = bytemuck::cast_slice(right);
        // SAFETY: only `dispatch` runs this code, with the tiles configured.
        #[allow(unsafe_code)]
        unsafe {
            in_place::multiply([rows, depth, columns], left, right, out, accumulate);
        }
    }

    #[inline(always)]
    fn store<S: Simd>(
        simd: S,
        block: &mut Block<'_, TilePair>,
        two: usize,
        keys: [[S::f32s; 2]; 2],
    ) {
        let mut pairs = Block::<Pair> {
            elements: block.elements,
            along_keys: bytemuck::cast_slice_mut(block.along_keys),
            along_rows: bytemuck::cast_slice_mut(block.along_rows),
        };
        Pair::store(simd, &mut pairs, two, keys);
    }

    #[inline(always)]
    fn choose<'a>(_: &'a [f32], stored: &'a [TilePair]) -> &'a [TilePair] {
        stored
    }
}
