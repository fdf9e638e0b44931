//! Attention on a GPU: on Hopper's tensor cores (`hopper`) or the tensor cores of any GPU (`tiled`)
//! if they support the shape, otherwise by plain arithmetic (`plain`). Generated tokens have separate
//! kernels (`decode`).

mod decode;
mod hopper;
mod packed;
mod path;
mod plain;
mod tiled;

pub use path::AttentionPath;

use super::{
    Attention, AttentionArgs, AttentionBackward, AttentionForward, AttentionShape, KeyValues,
    SequenceAttention,
};
use crate::cuda::{Cuda, CudaView};
use crate::workspace::gpu::attention::{delta_bytes, fits_32_bits, packed_bytes};
use crate::{Element, Result, ensure};

/// A pass of attention on a GPU.
#[derive(Clone, Copy)]
struct Pass<'a, 'v> {
    cuda: &'a Cuda,
    args: &'a AttentionArgs<'v, Cuda>,
    at: &'a Addresses,
}

/// The addresses of the tensors; 0 for tensors that the pass does not have.
#[derive(Default)]
struct Addresses {
    q: u64,
    k: u64,
    v: u64,
    /// Elements from one key to the next.
    key_stride: usize,
    block_table: u64,
    block_length: usize,
    out: u64,
    log_sum_exp: u64,
    d_out: u64,
    d_qkv: u64,
    delta: u64,
}

impl Addresses {
    fn of_keys<T: Element>(shape: &AttentionShape, key_values: KeyValues<'_, Cuda, T>) -> Self {
        match key_values {
            KeyValues::Contiguous { keys, values, row_stride } => Addresses {
                k: keys.address,
                v: values.address,
                key_stride: row_stride,
                ..Self::default()
            },
            KeyValues::Paged { keys, values, block_table, block_length } => Addresses {
                k: keys.address,
                v: values.address,
                key_stride: shape.head_dim,
                block_table: block_table.address,
                block_length,
                ..Self::default()
            },
        }
    }

    /// Returns the addresses in a buffer with the queries, keys and values of each token in one row.
    fn of_qkv<T: Element>(shape: &AttentionShape, qkv: u64) -> Self {
        let at = |heads: usize| qkv + (heads * shape.head_dim * size_of::<T>()) as u64;
        Addresses {
            q: qkv,
            k: at(shape.heads),
            v: at(shape.heads + shape.kv_heads),
            key_stride: shape.query_stride,
            ..Self::default()
        }
    }

    /// Returns whether all rows of bf16 start at multiples of `count` elements.
    fn are_multiples_of(&self, shape: &AttentionShape, count: usize) -> bool {
        let strides = [shape.head_dim, shape.query_stride, self.key_stride];
        let starts = [self.q, self.k, self.v, self.out, self.d_out, self.d_qkv];
        strides.iter().all(|stride| stride.is_multiple_of(count))
            && starts.iter().all(|at| at.is_multiple_of(2 * count as u64))
    }

    /// Returns whether offsets of queries, keys and values within a sequence fit 32 bits.
    fn fit_32_bits(&self, shape: &AttentionShape) -> bool {
        fits_32_bits(shape, self.key_stride)
    }
}

impl<'a> AttentionArgs<'a, Cuda> {
    /// Returns the number of local heads before the routed heads.
    fn shared_heads(&self) -> usize {
        self.selection.map_or(self.shape.heads, |selection| selection.shared_heads)
    }

    /// Returns the routed heads that each token selected; `None` if every token computes every head.
    fn routed_mask(&self) -> Option<CudaView<'a, u8>> {
        self.selection.map(|selection| selection.routed).filter(|mask| mask.len > 0)
    }

    fn weights(&self) -> Option<CudaView<'a, f32>> {
        self.selection.and_then(|selection| selection.weights)
    }

    /// Returns whether rows may be unselected.
    fn is_routed(&self) -> bool {
        self.routed_mask().is_some()
    }

    fn check_visible(&self, operator: &'static str) -> Result<()> {
        let (tokens, keys) = (self.shape.tokens(), self.shape.key_length);
        ensure(operator, tokens == 0 || keys > 0, || "query 0 sees no key".into())
    }
}

/// Returns the maximum scratch of the backward pass over aligned rows of `T`, including a delta that the
/// caller does not request.
pub(crate) fn backward_scratch_bytes<T: Element>(
    cuda: &Cuda,
    shape: &AttentionShape,
    routed: bool,
) -> usize {
    let nowhere = Addresses::of_qkv::<T>(shape, 0);
    let args = &AttentionArgs::causal(*shape);
    let path = AttentionPath::choose::<T>(Pass { cuda, args, at: &nowhere });
    delta_bytes(shape) + path.backward_scratch_bytes(shape, routed)
}

impl Attention for Cuda {
    fn last_path(&self) -> Option<&'static str> {
        self.attention_path().map(AttentionPath::name)
    }

    fn attention_forward<T: Element>(&self, forward: AttentionForward<'_, Self, T>) -> Result<()> {
        forward.check(None)?;
        let AttentionForward { args, queries, key_values, out, log_sum_exp } = forward;
        let shape = &args.shape;
        args.check_visible("attention_forward")?;
        let at = Addresses {
            q: queries.address,
            out: out.address,
            log_sum_exp: log_sum_exp.address,
            ..Addresses::of_keys(shape, key_values)
        };
        let packed = || self.scratch(packed_bytes(shape, args.is_routed()));
        let pass = Pass { cuda: self, args: &args, at: &at };
        let path = AttentionPath::choose::<T>(pass);
        path.remember(self);
        match path {
            AttentionPath::Hopper => hopper::forward(pass, packed()?),
            AttentionPath::Tiled => tiled::forward(pass, packed()?),
            AttentionPath::Plain => plain::forward::<T>(pass),
        }
    }

    fn attention_of_sequences<T: Element>(
        &self,
        mut args: SequenceAttention<'_, Self, T>,
    ) -> Result<()> {
        args.check()?;
        decode::forward(self, &args)?;
        let mut prompts = args.sequences.iter().filter(|span| span.is_prompt);
        prompts.try_for_each(|span| self.attention_forward(args.of(span)))
    }

    fn attention_backward<T: Element>(
        &self,
        backward: AttentionBackward<'_, Self, T>,
    ) -> Result<()> {
        backward.check()?;
        let AttentionBackward { args, qkv, out, log_sum_exp, d_out, d_qkv, delta } = backward;
        let shape = &args.shape;
        args.check_visible("attention_backward")?;
        let mut at = Addresses {
            out: out.address,
            log_sum_exp: log_sum_exp.address,
            d_out: d_out.address,
            d_qkv: d_qkv.address,
            ..Addresses::of_qkv::<T>(shape, qkv.address)
        };
        let path = AttentionPath::choose::<T>(Pass { cuda: self, args: &args, at: &at });
        path.remember(self);
        let own_delta = if delta.is_some() { 0 } else { delta_bytes(shape) };
        let others = path.backward_scratch_bytes(shape, args.is_routed());
        let scratch = self.scratch(own_delta + others)?;
        at.delta = delta.map_or(scratch, |delta| delta.address);
        let others = scratch + own_delta as u64;
        let pass = Pass { cuda: self, args: &args, at: &at };
        match path {
            AttentionPath::Hopper => hopper::backward(pass, others),
            AttentionPath::Tiled => tiled::backward(pass, others),
            AttentionPath::Plain => plain::backward::<T>(pass),
        }
    }
}
