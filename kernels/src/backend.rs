//! The interface of a device: its buffers, and every operator forward and backward.
//!
//! Buffers are allocated when a model is planned and reused in every step. Operators write into
//! views of them; what accumulates says so. Matrices are row-major, a linear layer's weight is
//! `[outputs, inputs]`, and the shape letters are those of `kernels/README.md`.

use std::ops::Range;

use crate::adamw::AdamW;
use crate::attention::{AttentionShape, KeyValues, Visibility};
use crate::cross_entropy::{HeadGradients, HeadShape};
use crate::error::Result;
use crate::ranks::{AllReduce, HeadRanks, Heads, VocabularyRows};
use crate::region::{Region, RegionMut};
use crate::rope::{QkvShape, RopeTable};
use crate::router::{QueryNormRouter, RouterGradient};
use crate::scalar::{Element, Scalar};

/// Read access to a part of a [`Backend`]'s buffer.
pub type View<'a, B, S> = <B as Backend>::View<'a, S>;
/// Write access to a part of a [`Backend`]'s buffer.
pub type ViewMut<'a, B, S> = <B as Backend>::ViewMut<'a, S>;

/// Bytes of a device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceMemory {
    /// In use, by this program and others.
    pub used: u64,
    /// In all.
    pub total: u64,
}

/// Passes and a step that a device can take memory for beforehand ([`Backend::reserve`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkingSet {
    /// Attention of a micro-batch.
    pub attention: AttentionShape,
    /// Whether a router selects heads.
    pub routed: bool,
    /// Whether there are backward passes and updates.
    pub training: bool,
    /// Width of the residual stream, C.
    pub width: usize,
    /// The most tensors of a [`Backend::squared_norms`].
    pub tensors: usize,
}

/// What becomes of the numbers where a weight's gradient is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accumulation {
    /// They are replaced, and need not have been written before.
    Overwrite,
    /// The gradient is added to them.
    Add,
}

/// A device, its buffers and its operators.
///
/// `T` is the type of weights and activations, `G` of gradients, `M` of the optimiser's moments.
/// Every method may run asynchronously until [`Backend::synchronize`] or [`Backend::download`].
///
/// # Errors
/// Every operator refuses buffers whose lengths do not fit its shape ([`crate::Error::Shape`]).
pub trait Backend: Send + Sync + Sized + 'static {
    /// An owned buffer.
    type Buffer<S: Scalar>: Send + Sync;
    /// Read access to a part of a buffer.
    type View<'a, S: Scalar>: Copy;
    /// Write access to a part of a buffer.
    type ViewMut<'a, S: Scalar>;
    /// What the router decided for the tokens of one micro-batch in one block, and what its
    /// backward pass needs.
    type Routing: Send + Sync;

    /// Runs a group of operators, such as a training step, where each of them starts soonest: on
    /// the CPU, on one of the threads that share its work.
    fn scope<R: Send>(&self, operators: impl FnOnce() -> R + Send) -> R {
        operators()
    }

    // ---- memory ----

    /// A name for messages, such as `the CPU`.
    fn name(&self) -> String;

    /// The device's own memory; `None` where buffers lie in the host's.
    fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    /// A buffer of `len` zeros.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] when the device has no room.
    fn allocate<S: Scalar>(&self, len: usize) -> Result<Self::Buffer<S>>;

    /// Numbers in a buffer.
    fn len<S: Scalar>(buffer: &Self::Buffer<S>) -> usize;

    /// Read access to `range`, which lies within the buffer.
    fn view<S: Scalar>(buffer: &Self::Buffer<S>, range: Range<usize>) -> Self::View<'_, S>;

    /// Write access to `range`, which lies within the buffer.
    fn view_mut<S: Scalar>(
        buffer: &mut Self::Buffer<S>,
        range: Range<usize>,
    ) -> Self::ViewMut<'_, S>;

    /// The view with its type erased.
    fn region<'a, S: Scalar>(view: Self::View<'a, S>) -> Region<'a>;

    /// The view with its type erased.
    fn region_mut<'a, S: Scalar>(view: Self::ViewMut<'a, S>) -> RegionMut<'a>;

    /// Copies from the host; both hold the same count.
    fn upload<S: Scalar>(&self, source: &[S], destination: Self::ViewMut<'_, S>) -> Result<()>;

    /// Copies to the host; both hold the same count.
    fn download<S: Scalar>(&self, source: Self::View<'_, S>, destination: &mut [S]) -> Result<()>;

    /// Lets the host change numbers: on a device, copies them there and back. For small tables: it waits
    /// for the operators so far.
    fn on_host<S: Scalar>(
        &self,
        numbers: Self::ViewMut<'_, S>,
        change: impl FnOnce(&mut [S]) -> Result<()>,
    ) -> Result<()>;

    /// Copies on the device; both hold the same count.
    fn copy<S: Scalar>(
        &self,
        source: Self::View<'_, S>,
        destination: Self::ViewMut<'_, S>,
    ) -> Result<()>;

    /// Sets every number to zero.
    fn zero<S: Scalar>(&self, destination: Self::ViewMut<'_, S>) -> Result<()>;

    /// `y = x`, rounded to the type of y; both hold the same count.
    fn convert<X: Element, Y: Element>(
        &self,
        x: Self::View<'_, X>,
        y: Self::ViewMut<'_, Y>,
    ) -> Result<()>;

    /// `out = x + y`, in f32, rounded once; all hold the same count.
    fn add<T: Element>(
        &self,
        x: Self::View<'_, T>,
        y: Self::View<'_, T>,
        out: Self::ViewMut<'_, T>,
    ) -> Result<()>;

    /// Takes the memory that operators need for themselves on such passes, with numbers of type
    /// `T`, so that none is taken or given back while they run. Without it they take it when they
    /// need it.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] when the device has no room.
    fn reserve<T: Element>(&self, passes: &WorkingSet) -> Result<()>;

    /// Waits until all operators so far are done.
    fn synchronize(&self) -> Result<()>;

    // ---- embedding ----

    /// `out[n] = table[ids[n]]`; ids `[N]`, table `[V, C]` of the rows that are held, out `[N, C]`. The
    /// others give zeros.
    ///
    /// # Errors
    /// [`crate::Error::Vocabulary`] for an id outside the vocabulary, where the device can tell.
    fn embedding_forward<T: Element>(
        &self,
        width: usize,
        rows: VocabularyRows,
        ids: Self::View<'_, u32>,
        table: Self::View<'_, T>,
        out: Self::ViewMut<'_, T>,
    ) -> Result<()>;

    /// `d_table[ids[n]] += d_out[n]`, in the order of n, of the rows that are held.
    fn embedding_backward<T: Element, G: Element>(
        &self,
        width: usize,
        rows: VocabularyRows,
        ids: Self::View<'_, u32>,
        d_out: Self::View<'_, T>,
        d_table: Self::ViewMut<'_, G>,
    ) -> Result<()>;

    // ---- RMSNorm ----

    /// `y = x * inv_rms * weight`, `inv_rms[n] = 1 / sqrt(mean(x[n]^2) + eps)`; x, y `[N, C]`,
    /// weight `[C]`, inv_rms `[N]`.
    fn rms_norm_forward<T: Element>(
        &self,
        eps: f64,
        x: Self::View<'_, T>,
        weight: Self::View<'_, T>,
        y: Self::ViewMut<'_, T>,
        inv_rms: Self::ViewMut<'_, f32>,
    ) -> Result<()>;

    /// Adds the gradients of [`Backend::rms_norm_forward`] to `d_x` and `d_weight`.
    fn rms_norm_backward<T: Element, G: Element>(
        &self,
        x: Self::View<'_, T>,
        weight: Self::View<'_, T>,
        inv_rms: Self::View<'_, f32>,
        d_y: Self::View<'_, T>,
        d_x: Self::ViewMut<'_, T>,
        d_weight: Self::ViewMut<'_, G>,
    ) -> Result<()>;

    // ---- linear ----

    /// `y = x weight^T (+ residual)`; x `[N, inputs]`, weight `[outputs, inputs]`, y and residual
    /// `[N, outputs]`.
    fn linear_forward<T: Element>(
        &self,
        inputs: usize,
        x: Self::View<'_, T>,
        weight: Self::View<'_, T>,
        residual: Option<Self::View<'_, T>>,
        y: Self::ViewMut<'_, T>,
    ) -> Result<()>;

    /// `d_x = d_y weight`.
    fn linear_backward_input<T: Element>(
        &self,
        inputs: usize,
        d_y: Self::View<'_, T>,
        weight: Self::View<'_, T>,
        d_x: Self::ViewMut<'_, T>,
    ) -> Result<()>;

    /// `d_weight = d_y^T x`, or `d_weight += d_y^T x`, as `accumulation` says; without a token the
    /// product is zeros.
    fn linear_backward_weight<T: Element, G: Element>(
        &self,
        inputs: usize,
        x: Self::View<'_, T>,
        d_y: Self::View<'_, T>,
        d_weight: Self::ViewMut<'_, G>,
        accumulation: Accumulation,
    ) -> Result<()>;

    // ---- RoPE and the router ----

    /// Room for the routing of up to `tokens` tokens, over all heads of a layer of which some may be
    /// held here.
    fn routing(
        &self,
        tokens: usize,
        heads: Heads,
        router: QueryNormRouter,
    ) -> Result<Self::Routing>;

    /// Rotates queries and keys in place and, before that, routes the queries: one pass over them.
    ///
    /// `qkv` is `[B*T, (H + 2G) * D]`: queries, keys, values of a token side by side. Token t of a
    /// sequence is at position `first_position + t`, which the table must cover. A routing whose heads
    /// are divided among ranks needs `all_reduce`, once.
    fn rope_route_forward<T: Element>(
        &self,
        shape: &QkvShape,
        table: RopeTable<'_, Self>,
        first_position: usize,
        qkv: Self::ViewMut<'_, T>,
        routing: Option<&mut Self::Routing>,
        all_reduce: Option<AllReduce<'_, Self>>,
    ) -> Result<()>;

    /// Turns the gradient of rotated queries and keys into that of the unrotated ones, in place,
    /// and adds the router's gradient (design, section 2.6 and 2.7) to the queries'.
    ///
    /// `qkv` holds what the forward pass left: rotated queries and keys.
    fn rope_route_backward<T: Element>(
        &self,
        shape: &QkvShape,
        table: RopeTable<'_, Self>,
        first_position: usize,
        qkv: Self::View<'_, T>,
        d_qkv: Self::ViewMut<'_, T>,
        router: Option<RouterGradient<'_, Self>>,
    ) -> Result<()>;

    /// `out[0] += scale * sum_i f_i P_i`, the balance loss of one block and micro-batch.
    fn balance_loss(
        &self,
        routing: &Self::Routing,
        scale: f64,
        out: Self::ViewMut<'_, f64>,
    ) -> Result<()>;

    /// Copies the selection to the host: 1 where a token selected a routed head;
    /// `[tokens, routed]`, of all ranks' heads.
    fn routed_mask(&self, routing: &Self::Routing, mask: &mut [u8]) -> Result<()>;

    /// Copies the gates to the host; `[tokens, routed]`, of all ranks' heads.
    fn gates(&self, routing: &Self::Routing, gates: &mut [f32]) -> Result<()>;

    // ---- attention ----

    /// Attention of the selected (token, head) pairs; the rows of the others become zero.
    ///
    /// `queries` is `[B*T, row_stride]` with the query heads first in each row; `out` is
    /// `[B*T, H*D]`, `log_sum_exp` `[B*T, H]` (natural logarithm of the sum of exponentials of the
    /// scaled scores). With `weights` `[B*T, H]` each head's output is multiplied by its weight.
    #[allow(clippy::too_many_arguments)]
    fn attention_forward<T: Element>(
        &self,
        shape: &AttentionShape,
        queries: Self::View<'_, T>,
        key_values: KeyValues<'_, Self, T>,
        visibility: Visibility<'_, Self>,
        selection: Option<&Self::Routing>,
        weights: Option<Self::View<'_, f32>>,
        out: Self::ViewMut<'_, T>,
        log_sum_exp: Self::ViewMut<'_, f32>,
    ) -> Result<()>;

    /// Gradient of [`Backend::attention_forward`] over the packed `qkv` of a training step.
    ///
    /// Overwrites `d_qkv` (rows of queries that were not selected become zero) and, where given,
    /// `delta` `[B*T, H]`: `<d_out, O>` with O the head's output before its weight, 0 where not
    /// selected.
    #[allow(clippy::too_many_arguments)]
    fn attention_backward<T: Element>(
        &self,
        shape: &AttentionShape,
        qkv: Self::View<'_, T>,
        visibility: Visibility<'_, Self>,
        selection: Option<&Self::Routing>,
        weights: Option<Self::View<'_, f32>>,
        out: Self::View<'_, T>,
        log_sum_exp: Self::View<'_, f32>,
        d_out: Self::View<'_, T>,
        d_qkv: Self::ViewMut<'_, T>,
        delta: Option<Self::ViewMut<'_, f32>>,
    ) -> Result<()>;

    /// Copies the keys and values of one sequence's new tokens from `qkv` to rows
    /// `first_position..` of a contiguous cache, `[capacity, G*D]` each.
    fn key_value_append<T: Element>(
        &self,
        shape: &QkvShape,
        first_position: usize,
        qkv: Self::View<'_, T>,
        keys: Self::ViewMut<'_, T>,
        values: Self::ViewMut<'_, T>,
    ) -> Result<()>;

    // ---- SwiGLU ----

    /// `out = silu(gate) * up`; gate_up `[N, 2I]` with the gate first, out `[N, I]`.
    fn swiglu_forward<T: Element>(
        &self,
        width: usize,
        gate_up: Self::View<'_, T>,
        out: Self::ViewMut<'_, T>,
    ) -> Result<()>;

    /// The gradient of [`Backend::swiglu_forward`], in place: `gate_up` turns into its gradient,
    /// and `out` from the output's gradient into the output, which therefore needs no keeping.
    fn swiglu_backward<T: Element>(
        &self,
        width: usize,
        gate_up: Self::ViewMut<'_, T>,
        out: Self::ViewMut<'_, T>,
    ) -> Result<()>;

    // ---- output head and loss ----

    /// Length of the scratch buffer that [`Backend::cross_entropy`] wants.
    fn cross_entropy_scratch(&self, shape: &HeadShape) -> usize;

    /// Length of the sums that [`Backend::cross_entropy`] wants of `ranks` ranks that share the rows of
    /// the head.
    fn cross_entropy_sums(&self, shape: &HeadShape, ranks: usize) -> usize;

    /// Cross-entropy of the output projection, by chunks of tokens so that the logits of all of
    /// them are never held: `loss[0] += sum_n -log softmax(x[n] weight^T)[targets[n]]` over the
    /// targets that are not [`crate::cross_entropy::IGNORED`]; and, where asked for, its gradients.
    ///
    /// x `[N, C]`, weight `[V, C]`, targets `[N]`. Of a head whose rows are divided among `ranks`, the
    /// shape and the weight have this rank's; rank 0 adds the loss, and the ranks' `d_x` are to be added
    /// up.
    #[allow(clippy::too_many_arguments)]
    fn cross_entropy<T: Element, G: Element>(
        &self,
        shape: &HeadShape,
        x: Self::View<'_, T>,
        weight: Self::View<'_, T>,
        targets: Self::View<'_, u32>,
        scratch: Self::ViewMut<'_, f32>,
        loss: Self::ViewMut<'_, f64>,
        gradients: Option<HeadGradients<'_, Self, T, G>>,
        ranks: Option<HeadRanks<'_, Self>>,
    ) -> Result<()>;

    // ---- optimiser ----

    /// `out[0] += sum(x^2)` over all of `xs`, which may be of any length and begin anywhere.
    fn squared_norms<G: Element>(
        &self,
        xs: &[Self::View<'_, G>],
        out: Self::ViewMut<'_, f64>,
    ) -> Result<()>;

    /// One AdamW step on a flat range. With `remainder`, which bf16 weights alone have, f32 numbers
    /// are updated ([`crate::adamw::remainder`]); without it what `weights` hold. With `squared_norm`
    /// the gradient is first clipped to `step.clip_norm`.
    #[allow(clippy::too_many_arguments)]
    fn adamw<T: Element, G: Element, M: Element>(
        &self,
        step: &AdamW,
        squared_norm: Self::View<'_, f64>,
        gradients: Self::View<'_, G>,
        weights: Self::ViewMut<'_, T>,
        remainder: Option<Self::ViewMut<'_, i16>>,
        first_moment: Self::ViewMut<'_, M>,
        second_moment: Self::ViewMut<'_, M>,
    ) -> Result<()>;
}
