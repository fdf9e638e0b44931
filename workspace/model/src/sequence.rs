//! Sequence parallelism: each tensor-parallel rank has the residual stream of some of the tokens.
//! Rows are all-gathered before a matmul, and its result is reduce-scattered.

use std::ops::Range;

use moh_comm::Reduce;
use moh_kernels::linear::LinearForward;
use moh_kernels::{Backend, Element, View, ViewMut};

use crate::Error;
use crate::model::Model;
use crate::model_parallel::TokenShare;

impl<B: Backend, T: Element> Model<B, T> {
    /// The tokens of a micro-batch that are local to this rank.
    pub(crate) fn token_share(&self, tokens: usize) -> TokenShare {
        self.parallel.part().tensor.tokens(tokens)
    }

    /// Elements of the local residual stream for this many tokens.
    pub(crate) fn stream_len(&self, tokens: usize) -> usize {
        self.token_share(tokens).local() * self.config.hidden_size
    }

    /// The all-reduce over the tensor-parallel ranks, for operators that need it before their end.
    pub(crate) fn sum_over_ranks(
        &self,
    ) -> impl for<'v> Fn(ViewMut<'v, B, f64>) -> moh_kernels::Result<()> + Sync {
        |table| {
            let summed = self.parallel.tensor().all_reduce::<B, f64>(table, Reduce::Sum);
            summed.map_err(|error| moh_kernels::Error::Ranks(error.to_string()))
        }
    }

    /// Whether several ranks have shards of each tensor.
    pub(crate) fn is_tensor_parallel(&self) -> bool {
        self.parallel.part().tensor.ranks > 1
    }

    /// All-gathers the rows `[N, C]` of all tokens from the ranks' `local` rows, into `gathered`;
    /// without tensor parallelism returns `local`.
    pub(crate) fn gather<'a>(
        &self,
        tokens: usize,
        local: &'a B::Buffer<T>,
        gathered: &'a mut Option<B::Buffer<T>>,
    ) -> Result<View<'a, B, T>, Error> {
        let (width, own) = (self.config.hidden_size, self.stream_len(tokens));
        let Some(gathered) = gathered else { return Ok(B::view(local, 0..own)) };
        let share = self.token_share(tokens);
        let start = share.start() * width;
        let into = B::view_mut(gathered, start..start + own);
        self.backend.copy(B::view(local, 0..own), into)?;
        let whole = B::view_mut(gathered, 0..share.padded() * width);
        self.parallel.tensor().all_gather::<B, T>(whole)?;
        Ok(B::view(gathered, 0..tokens * width))
    }

    /// Reduce-scatters the rows `[N, C]` in `partial`; returns the range of this rank's rows in it.
    pub(crate) fn reduce_scatter(
        &self,
        tokens: usize,
        partial: &mut B::Buffer<T>,
    ) -> Result<Range<usize>, Error> {
        let (share, width) = (self.token_share(tokens), self.config.hidden_size);
        let start = share.start() * width;
        let own = start..start + self.stream_len(tokens);
        if self.is_tensor_parallel() {
            let whole = B::view_mut(partial, 0..share.padded() * width);
            self.parallel.tensor().reduce_scatter::<B, T>(whole, Reduce::Sum)?;
        }
        Ok(own)
    }

    /// `out = residual + x weight^T` for the local tokens, with x `[N, inputs]`; its columns may be
    /// sharded.
    pub(crate) fn project_to_stream(
        &self,
        projection: Projection<'_, B, T>,
        residual: &B::Buffer<T>,
        out: &mut B::Buffer<T>,
        gathered: &mut Option<B::Buffer<T>>,
    ) -> Result<(), Error> {
        let Projection { tokens, inputs, x, weight } = projection;
        let (x, weight) = (B::reborrow(x), B::reborrow(weight));
        let own = self.stream_len(tokens);
        let Some(partial) = gathered else {
            let (residual, y) = (Some(B::view(residual, 0..own)), B::view_mut(out, 0..own));
            let forward = LinearForward { inputs, x, weight, residual, y };
            return Ok(self.backend.linear_forward(forward)?);
        };
        let y = B::view_mut(partial, 0..tokens * self.config.hidden_size);
        self.backend.linear_forward(LinearForward { inputs, x, weight, residual: None, y })?;
        let local = self.reduce_scatter(tokens, partial)?;
        let (residual, branch) = (B::view(residual, 0..own), B::view(partial, local));
        Ok(self.backend.add(residual, branch, B::view_mut(out, 0..own))?)
    }
}

/// A matmul whose result is added to the residual stream.
pub(crate) struct Projection<'a, B: Backend, T: Element> {
    /// Tokens, N.
    pub tokens: usize,
    /// Columns of the weight.
    pub inputs: usize,
    /// `[N, inputs]`.
    pub x: View<'a, B, T>,
    /// `[C, inputs]`.
    pub weight: View<'a, B, T>,
}
