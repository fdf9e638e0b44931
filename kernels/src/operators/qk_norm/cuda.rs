//! Query and key norms on a GPU.

use super::{QkNorm, QkNormBackward, QkNormForward, check};
use crate::attention::AttentionShape;
use crate::cuda::parameters::qk_norm::{Backward, Forward};
use crate::cuda::{Cuda, THREADS, name};
use crate::workspace::gpu::{QK_NORM_GROUPS, qk_norm_bytes};
use crate::{Element, Result, check_len};

const WARP: usize = 32;
/// Heads of a block in the forward pass, as in qk_norm.cu.
const HEADS: usize = 64;
/// Bytes that a thread reads at once.
const WIDE_BYTES: u64 = 16;

impl QkNorm for Cuda {
    fn qk_norm_forward<T: Element>(&self, args: QkNormForward<'_, Self, T>) -> Result<()> {
        const OPERATOR: &str = "qk_norm_forward";
        let QkNormForward { shape, eps, qkv, weight, normed } = args;
        check(OPERATOR, shape, [qkv.len, weight.len], ("normed", normed.len))?;
        let parameters = Forward {
            qkv: qkv.address,
            weight: weight.address,
            normed: normed.address,
            tokens: shape.tokens() as u64,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u64,
            eps,
        };
        let heads = shape.tokens() * (shape.heads + 2 * shape.kv_heads);
        self.launch(&name::<T>(OPERATOR), [heads.div_ceil(HEADS), 1], 0, &parameters)
    }

    fn qk_norm_backward<T: Element, G: Element>(
        &self,
        args: QkNormBackward<'_, Self, T, G>,
    ) -> Result<()> {
        const OPERATOR: &str = "qk_norm_backward";
        let QkNormBackward { shape, eps, qkv, weight, d_qkv, d_weight } = args;
        check(OPERATOR, shape, [qkv.len, weight.len], ("d_qkv", d_qkv.len))?;
        check_len(OPERATOR, "d_weight", d_weight.len, weight.len)?;
        let (tokens, dim) = (shape.tokens(), shape.head_dim);
        let heads = tokens * (shape.heads + shape.kv_heads);
        let groups = tokens.min(QK_NORM_GROUPS);
        let table = (heads * size_of::<f32>()) as u64;
        let attention = AttentionShape::of_qkv(shape, shape.length);
        let scratch = self.scratch(qk_norm_bytes(&attention))?;
        let parameters = Backward {
            qkv: qkv.address,
            weight: weight.address,
            d_qkv: d_qkv.address,
            inv_rms: scratch,
            correction: scratch + table,
            partial: scratch + 2 * table,
            d_weight: d_weight.address,
            tokens: tokens as u64,
            groups: groups as u64,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: dim as u64,
            eps,
        };
        if parameters.teams_read_heads::<T>() {
            let kernel = name::<T>("qk_norm_backward_heads");
            self.launch(&kernel, [groups, 1], 0, &parameters)?;
        } else {
            let warps = [(heads * WARP).div_ceil(THREADS), 1];
            let columns = [(groups * dim).div_ceil(THREADS), 1];
            self.launch(&name::<T>("qk_norm_measure"), warps, 0, &parameters)?;
            self.launch(&name::<T>(OPERATOR), columns, 0, &parameters)?;
        }
        self.launch(&name::<G>("qk_norm_backward_weight"), [2 * dim, 1], 0, &parameters)
    }
}

impl Backward {
    /// Returns whether at most a warp's threads read a head, 16 bytes each.
    fn teams_read_heads<T: Element>(&self) -> bool {
        let Backward { qkv, weight, d_qkv, head_dim, .. } = *self;
        let bytes = head_dim * size_of::<T>() as u64;
        let aligned = [qkv, weight, d_qkv, bytes].iter().all(|at| at % WIDE_BYTES == 0);
        aligned && bytes <= WARP as u64 * WIDE_BYTES
    }
}
