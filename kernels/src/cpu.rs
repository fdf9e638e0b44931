//! The CPU: buffers are vectors, operators run on rayon's threads.

use std::ops::Range;

use pulp::Arch;
use rayon::prelude::*;

use crate::adamw::{self, AdamW};
use crate::attention::cpu::{Problem, Saved};
use crate::attention::{self, AttentionShape, KeyValues, Visibility};
use crate::backend::{Accumulation, Backend, WorkingSet};
use crate::cross_entropy::{self, HeadGradients, HeadShape};
use crate::error::{Error, Result, check_len};
use crate::ranks::{AllReduce, HeadRanks, Heads, VocabularyRows};
use crate::region::{Memory, MemoryMut, Region, RegionMut};
use crate::rope::{self, QkvShape, RopeTable};
use crate::router::cpu::CpuRouting;
use crate::router::{QueryNormRouter, RouterGradient};
use crate::scalar::{Element, Scalar};
use crate::{add, convert, embedding, key_value_cache, linear, rms_norm, span, swiglu};

/// Numbers that one task copies or sets to zero.
const PART: usize = 256 * 1024;

/// The CPU as a [`Backend`]; its thread count is rayon's (`RAYON_NUM_THREADS`).
#[derive(Debug, Clone, Copy, Default)]
pub struct Cpu;

impl Backend for Cpu {
    type Buffer<S: Scalar> = Vec<S>;
    type View<'a, S: Scalar> = &'a [S];
    type ViewMut<'a, S: Scalar> = &'a mut [S];
    type Routing = CpuRouting;

    fn name(&self) -> String {
        "the CPU".into()
    }

    fn scope<R: Send>(&self, operators: impl FnOnce() -> R + Send) -> R {
        let sink = span::of_thread();
        rayon::scope(|_| span::on_behalf(sink, operators))
    }

    fn allocate<S: Scalar>(&self, len: usize) -> Result<Vec<S>> {
        let refuse = || Error::OutOfMemory {
            device: self.name(),
            bytes: len.saturating_mul(size_of::<S>()),
        };
        // Zeroed memory straight from the system where it has room, and no abort where not.
        bytemuck::try_zeroed_slice_box(len).map(|buffer| buffer.into_vec()).map_err(|()| refuse())
    }

    fn len<S: Scalar>(buffer: &Vec<S>) -> usize {
        buffer.len()
    }

    fn view<S: Scalar>(buffer: &Vec<S>, range: Range<usize>) -> &[S] {
        &buffer[range]
    }

    fn view_mut<S: Scalar>(buffer: &mut Vec<S>, range: Range<usize>) -> &mut [S] {
        &mut buffer[range]
    }

    fn region<'a, S: Scalar>(view: Self::View<'a, S>) -> Region<'a> {
        let memory = Memory::Host(bytemuck::cast_slice(view));
        Region { dtype: S::DTYPE, len: view.len(), memory }
    }

    fn region_mut<'a, S: Scalar>(view: Self::ViewMut<'a, S>) -> RegionMut<'a> {
        let len = view.len();
        let memory = MemoryMut::Host(bytemuck::cast_slice_mut(view));
        RegionMut { dtype: S::DTYPE, len, memory }
    }

    fn upload<S: Scalar>(&self, source: &[S], destination: &mut [S]) -> Result<()> {
        self.copy(source, destination)
    }

    fn download<S: Scalar>(&self, source: &[S], destination: &mut [S]) -> Result<()> {
        self.copy(source, destination)
    }

    fn on_host<S: Scalar>(
        &self,
        numbers: &mut [S],
        change: impl FnOnce(&mut [S]) -> Result<()>,
    ) -> Result<()> {
        change(numbers)
    }

    fn copy<S: Scalar>(&self, source: &[S], destination: &mut [S]) -> Result<()> {
        check_len("copy", "destination", destination.len(), source.len())?;
        let parts = destination.par_chunks_mut(PART).zip(source.par_chunks(PART));
        parts.for_each(|(to, from)| to.copy_from_slice(from));
        Ok(())
    }

    fn zero<S: Scalar>(&self, destination: &mut [S]) -> Result<()> {
        destination.par_chunks_mut(PART).for_each(|part| part.fill(S::zeroed()));
        Ok(())
    }

    fn convert<X: Element, Y: Element>(&self, x: &[X], y: &mut [Y]) -> Result<()> {
        convert::cpu::convert(x, y)
    }

    fn add<T: Element>(&self, x: &[T], y: &[T], out: &mut [T]) -> Result<()> {
        add::cpu::add(x, y, out)
    }

    /// Scratch of the CPU belongs to its threads and is the host's.
    fn reserve<T: Element>(&self, _passes: &WorkingSet) -> Result<()> {
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        Ok(())
    }

    fn embedding_forward<T: Element>(
        &self,
        width: usize,
        rows: VocabularyRows,
        ids: &[u32],
        table: &[T],
        out: &mut [T],
    ) -> Result<()> {
        embedding::cpu::forward(width, rows, ids, table, out)
    }

    fn embedding_backward<T: Element, G: Element>(
        &self,
        width: usize,
        rows: VocabularyRows,
        ids: &[u32],
        d_out: &[T],
        d_table: &mut [G],
    ) -> Result<()> {
        embedding::cpu::backward(width, rows, ids, d_out, d_table)
    }

    fn rms_norm_forward<T: Element>(
        &self,
        eps: f64,
        x: &[T],
        weight: &[T],
        y: &mut [T],
        inv_rms: &mut [f32],
    ) -> Result<()> {
        rms_norm::cpu::forward(eps, x, weight, y, inv_rms)
    }

    fn rms_norm_backward<T: Element, G: Element>(
        &self,
        x: &[T],
        weight: &[T],
        inv_rms: &[f32],
        d_y: &[T],
        d_x: &mut [T],
        d_weight: &mut [G],
    ) -> Result<()> {
        rms_norm::cpu::backward(x, weight, inv_rms, d_y, d_x, d_weight)
    }

    fn linear_forward<T: Element>(
        &self,
        inputs: usize,
        x: &[T],
        weight: &[T],
        residual: Option<&[T]>,
        y: &mut [T],
    ) -> Result<()> {
        linear::cpu::forward(inputs, x, weight, residual, y)
    }

    fn linear_backward_input<T: Element>(
        &self,
        inputs: usize,
        d_y: &[T],
        weight: &[T],
        d_x: &mut [T],
    ) -> Result<()> {
        linear::cpu::backward_input(inputs, d_y, weight, d_x)
    }

    fn linear_backward_weight<T: Element, G: Element>(
        &self,
        inputs: usize,
        x: &[T],
        d_y: &[T],
        d_weight: &mut [G],
        accumulation: Accumulation,
    ) -> Result<()> {
        linear::cpu::backward_weight(inputs, x, d_y, d_weight, accumulation)
    }

    fn routing(
        &self,
        tokens: usize,
        heads: Heads,
        router: QueryNormRouter,
    ) -> Result<Self::Routing> {
        CpuRouting::new(tokens, heads, router)
    }

    fn rope_route_forward<T: Element>(
        &self,
        shape: &QkvShape,
        table: RopeTable<'_, Self>,
        first_position: usize,
        qkv: &mut [T],
        routing: Option<&mut CpuRouting>,
        all_reduce: Option<AllReduce<'_, Self>>,
    ) -> Result<()> {
        rope::cpu::forward(shape, table, first_position, qkv, routing, all_reduce)
    }

    fn rope_route_backward<T: Element>(
        &self,
        shape: &QkvShape,
        table: RopeTable<'_, Self>,
        first_position: usize,
        qkv: &[T],
        d_qkv: &mut [T],
        router: Option<RouterGradient<'_, Self>>,
    ) -> Result<()> {
        rope::cpu::backward(shape, table, first_position, qkv, d_qkv, router)
    }

    fn balance_loss(&self, routing: &CpuRouting, scale: f64, out: &mut [f64]) -> Result<()> {
        check_len("balance_loss", "out", out.len(), 1)?;
        out[0] += scale * routing.balance_loss();
        Ok(())
    }

    fn routed_mask(&self, routing: &CpuRouting, mask: &mut [u8]) -> Result<()> {
        self.copy(routing.mask(), mask)
    }

    fn gates(&self, routing: &CpuRouting, gates: &mut [f32]) -> Result<()> {
        self.copy(routing.gates(), gates)
    }

    fn attention_forward<T: Element>(
        &self,
        shape: &AttentionShape,
        queries: &[T],
        key_values: KeyValues<'_, Self, T>,
        visibility: Visibility<'_, Self>,
        selection: Option<&CpuRouting>,
        weights: Option<&[f32]>,
        out: &mut [T],
        log_sum_exp: &mut [f32],
    ) -> Result<()> {
        let Visibility { causal, query_offset, first_key } = visibility;
        let problem =
            Problem { shape: *shape, causal, query_offset, first_key, selection, weights };
        attention::cpu::forward(Arch::new(), problem, queries, key_values, out, log_sum_exp)
    }

    fn attention_backward<T: Element>(
        &self,
        shape: &AttentionShape,
        qkv: &[T],
        visibility: Visibility<'_, Self>,
        selection: Option<&CpuRouting>,
        weights: Option<&[f32]>,
        out: &[T],
        log_sum_exp: &[f32],
        d_out: &[T],
        d_qkv: &mut [T],
        delta: Option<&mut [f32]>,
    ) -> Result<()> {
        let Visibility { causal, query_offset, first_key } = visibility;
        let problem =
            Problem { shape: *shape, causal, query_offset, first_key, selection, weights };
        let saved = Saved { qkv, out, log_sum_exp, d_out };
        attention::cpu::backward(Arch::new(), problem, saved, d_qkv, delta)
    }

    fn key_value_append<T: Element>(
        &self,
        shape: &QkvShape,
        first_position: usize,
        qkv: &[T],
        keys: &mut [T],
        values: &mut [T],
    ) -> Result<()> {
        key_value_cache::cpu::append(shape, first_position, qkv, keys, values)
    }

    fn swiglu_forward<T: Element>(&self, width: usize, gate_up: &[T], out: &mut [T]) -> Result<()> {
        swiglu::cpu::forward(width, gate_up, out)
    }

    fn swiglu_backward<T: Element>(
        &self,
        width: usize,
        gate_up: &mut [T],
        out: &mut [T],
    ) -> Result<()> {
        swiglu::cpu::backward(width, gate_up, out)
    }

    fn cross_entropy_scratch(&self, shape: &HeadShape) -> usize {
        cross_entropy::cpu::scratch(shape)
    }

    fn cross_entropy_sums(&self, shape: &HeadShape, ranks: usize) -> usize {
        cross_entropy::cpu::sums(shape, ranks)
    }

    fn cross_entropy<T: Element, G: Element>(
        &self,
        shape: &HeadShape,
        x: &[T],
        weight: &[T],
        targets: &[u32],
        scratch: &mut [f32],
        loss: &mut [f64],
        gradients: Option<HeadGradients<'_, Self, T, G>>,
        ranks: Option<HeadRanks<'_, Self>>,
    ) -> Result<()> {
        let into = (scratch, loss, gradients);
        cross_entropy::cpu::cross_entropy(shape, x, weight, targets, into, ranks)
    }

    fn squared_norms<G: Element>(&self, xs: &[&[G]], out: &mut [f64]) -> Result<()> {
        adamw::cpu::squared_norms(xs, out)
    }

    fn adamw<T: Element, G: Element, M: Element>(
        &self,
        step: &AdamW,
        squared_norm: &[f64],
        gradients: &[G],
        weights: &mut [T],
        remainder: Option<&mut [i16]>,
        first_moment: &mut [M],
        second_moment: &mut [M],
    ) -> Result<()> {
        adamw::cpu::adamw(
            step,
            squared_norm,
            gradients,
            weights,
            remainder,
            first_moment,
            second_moment,
        )
    }
}
