//! [`Cuda`] as a [`Backend`]: memory here, operators in their own folders.

use std::ops::Range;

use super::{Cuda, CudaBuffer, CudaView, CudaViewMut};
use crate::adamw::{self, AdamW};
use crate::attention::{self, AttentionShape, KeyValues, Visibility};
use crate::backend::{Accumulation, Backend, DeviceMemory, WorkingSet};
use crate::cross_entropy::{self, HeadGradients, HeadShape};
use crate::error::{Result, check_len};
use crate::ranks::{AllReduce, HeadRanks, Heads, VocabularyRows};
use crate::region::{Memory, MemoryMut, Region, RegionMut};
use crate::rope::{self, QkvShape, RopeTable};
use crate::router::cuda::CudaRouting;
use crate::router::{QueryNormRouter, RouterGradient};
use crate::scalar::{Element, Scalar};
use crate::{add, convert, embedding, key_value_cache, linear, rms_norm, router, swiglu};

impl Backend for Cuda {
    type Buffer<S: Scalar> = CudaBuffer<S>;
    type View<'a, S: Scalar> = CudaView<'a, S>;
    type ViewMut<'a, S: Scalar> = CudaViewMut<'a, S>;
    type Routing = CudaRouting;

    fn name(&self) -> String {
        self.device.name()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        self.device.memory()
    }

    fn allocate<S: Scalar>(&self, len: usize) -> Result<CudaBuffer<S>> {
        CudaBuffer::zeros(&self.device, len)
    }

    fn len<S: Scalar>(buffer: &CudaBuffer<S>) -> usize {
        buffer.len()
    }

    fn view<S: Scalar>(buffer: &CudaBuffer<S>, range: Range<usize>) -> CudaView<'_, S> {
        buffer.view(range)
    }

    fn view_mut<S: Scalar>(buffer: &mut CudaBuffer<S>, range: Range<usize>) -> CudaViewMut<'_, S> {
        buffer.view_mut(range)
    }

    fn region<'a, S: Scalar>(view: Self::View<'a, S>) -> Region<'a> {
        Region { dtype: S::DTYPE, len: view.len, memory: Memory::Device(view.address) }
    }

    fn region_mut<'a, S: Scalar>(view: Self::ViewMut<'a, S>) -> RegionMut<'a> {
        RegionMut { dtype: S::DTYPE, len: view.len, memory: MemoryMut::Device(view.address) }
    }

    fn upload<S: Scalar>(&self, source: &[S], destination: CudaViewMut<'_, S>) -> Result<()> {
        check_len("upload", "destination", destination.len, source.len())?;
        self.device.upload(bytemuck::cast_slice(source), destination.address)
    }

    fn download<S: Scalar>(&self, source: CudaView<'_, S>, destination: &mut [S]) -> Result<()> {
        check_len("download", "destination", destination.len(), source.len)?;
        self.device.download(source.address, bytemuck::cast_slice_mut(destination))
    }

    fn on_host<S: Scalar>(
        &self,
        numbers: CudaViewMut<'_, S>,
        change: impl FnOnce(&mut [S]) -> Result<()>,
    ) -> Result<()> {
        let mut host = vec![S::zeroed(); numbers.len];
        self.device.download(numbers.address, bytemuck::cast_slice_mut(&mut host))?;
        change(&mut host)?;
        self.upload(&host, numbers)
    }

    fn copy<S: Scalar>(
        &self,
        source: CudaView<'_, S>,
        destination: CudaViewMut<'_, S>,
    ) -> Result<()> {
        check_len("copy", "destination", destination.len, source.len)?;
        self.device.copy(source.address, destination.address, source.len * size_of::<S>())
    }

    fn zero<S: Scalar>(&self, destination: CudaViewMut<'_, S>) -> Result<()> {
        self.device.zero(destination.address, destination.len * size_of::<S>())
    }

    fn convert<X: Element, Y: Element>(
        &self,
        x: CudaView<'_, X>,
        y: CudaViewMut<'_, Y>,
    ) -> Result<()> {
        convert::cuda::convert(self, x, y)
    }

    fn add<T: Element>(
        &self,
        x: CudaView<'_, T>,
        y: CudaView<'_, T>,
        out: CudaViewMut<'_, T>,
    ) -> Result<()> {
        add::cuda::add(self, x, y, out)
    }

    fn reserve<T: Element>(&self, passes: &WorkingSet) -> Result<()> {
        self.scratch(super::reserve::scratch_bytes::<T>(self, passes))?;
        self.counter()?;
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        self.device.synchronize()
    }

    fn embedding_forward<T: Element>(
        &self,
        width: usize,
        rows: VocabularyRows,
        ids: CudaView<'_, u32>,
        table: CudaView<'_, T>,
        out: CudaViewMut<'_, T>,
    ) -> Result<()> {
        embedding::cuda::forward(self, width, rows, ids, table, out)
    }

    fn embedding_backward<T: Element, G: Element>(
        &self,
        width: usize,
        rows: VocabularyRows,
        ids: CudaView<'_, u32>,
        d_out: CudaView<'_, T>,
        d_table: CudaViewMut<'_, G>,
    ) -> Result<()> {
        embedding::cuda::backward(self, width, rows, ids, d_out, d_table)
    }

    fn rms_norm_forward<T: Element>(
        &self,
        eps: f64,
        x: CudaView<'_, T>,
        weight: CudaView<'_, T>,
        y: CudaViewMut<'_, T>,
        inv_rms: CudaViewMut<'_, f32>,
    ) -> Result<()> {
        rms_norm::cuda::forward(self, eps, x, weight, y, inv_rms)
    }

    fn rms_norm_backward<T: Element, G: Element>(
        &self,
        x: CudaView<'_, T>,
        weight: CudaView<'_, T>,
        inv_rms: CudaView<'_, f32>,
        d_y: CudaView<'_, T>,
        d_x: CudaViewMut<'_, T>,
        d_weight: CudaViewMut<'_, G>,
    ) -> Result<()> {
        rms_norm::cuda::backward(self, x, weight, inv_rms, d_y, d_x, d_weight)
    }

    fn linear_forward<T: Element>(
        &self,
        inputs: usize,
        x: CudaView<'_, T>,
        weight: CudaView<'_, T>,
        residual: Option<CudaView<'_, T>>,
        y: CudaViewMut<'_, T>,
    ) -> Result<()> {
        linear::cuda::forward(self, inputs, x, weight, residual, y)
    }

    fn linear_backward_input<T: Element>(
        &self,
        inputs: usize,
        d_y: CudaView<'_, T>,
        weight: CudaView<'_, T>,
        d_x: CudaViewMut<'_, T>,
    ) -> Result<()> {
        linear::cuda::backward_input(self, inputs, d_y, weight, d_x)
    }

    fn linear_backward_weight<T: Element, G: Element>(
        &self,
        inputs: usize,
        x: CudaView<'_, T>,
        d_y: CudaView<'_, T>,
        d_weight: CudaViewMut<'_, G>,
        accumulation: Accumulation,
    ) -> Result<()> {
        linear::cuda::backward_weight(self, inputs, x, d_y, d_weight, accumulation)
    }

    fn routing(&self, tokens: usize, heads: Heads, router: QueryNormRouter) -> Result<CudaRouting> {
        CudaRouting::new(self, tokens, heads, router)
    }

    fn rope_route_forward<T: Element>(
        &self,
        shape: &QkvShape,
        table: RopeTable<'_, Self>,
        first_position: usize,
        qkv: CudaViewMut<'_, T>,
        routing: Option<&mut CudaRouting>,
        all_reduce: Option<AllReduce<'_, Self>>,
    ) -> Result<()> {
        rope::cuda::forward(self, shape, table, first_position, qkv, routing, all_reduce)
    }

    fn rope_route_backward<T: Element>(
        &self,
        shape: &QkvShape,
        table: RopeTable<'_, Self>,
        first_position: usize,
        qkv: CudaView<'_, T>,
        d_qkv: CudaViewMut<'_, T>,
        router: Option<RouterGradient<'_, Self>>,
    ) -> Result<()> {
        rope::cuda::backward(self, shape, table, first_position, qkv, d_qkv, router)
    }

    fn balance_loss(
        &self,
        routing: &CudaRouting,
        scale: f64,
        out: CudaViewMut<'_, f64>,
    ) -> Result<()> {
        router::cuda::balance_loss(self, routing, scale, out)
    }

    fn routed_mask(&self, routing: &CudaRouting, mask: &mut [u8]) -> Result<()> {
        self.download(routing.mask(), mask)
    }

    fn gates(&self, routing: &CudaRouting, gates: &mut [f32]) -> Result<()> {
        self.download(routing.gates(), gates)
    }

    fn attention_forward<T: Element>(
        &self,
        shape: &AttentionShape,
        queries: CudaView<'_, T>,
        key_values: KeyValues<'_, Self, T>,
        visibility: Visibility<'_, Self>,
        selection: Option<&CudaRouting>,
        weights: Option<CudaView<'_, f32>>,
        out: CudaViewMut<'_, T>,
        log_sum_exp: CudaViewMut<'_, f32>,
    ) -> Result<()> {
        let problem = attention::cuda::Problem::new(shape, visibility, selection, weights);
        attention::cuda::forward(self, &problem, queries, key_values, out, log_sum_exp)
    }

    fn attention_backward<T: Element>(
        &self,
        shape: &AttentionShape,
        qkv: CudaView<'_, T>,
        visibility: Visibility<'_, Self>,
        selection: Option<&CudaRouting>,
        weights: Option<CudaView<'_, f32>>,
        out: CudaView<'_, T>,
        log_sum_exp: CudaView<'_, f32>,
        d_out: CudaView<'_, T>,
        d_qkv: CudaViewMut<'_, T>,
        delta: Option<CudaViewMut<'_, f32>>,
    ) -> Result<()> {
        let problem = attention::cuda::Problem::new(shape, visibility, selection, weights);
        let saved = attention::cuda::Saved { qkv, out, log_sum_exp, d_out };
        attention::cuda::backward(self, &problem, saved, d_qkv, delta)
    }

    fn key_value_append<T: Element>(
        &self,
        shape: &QkvShape,
        first_position: usize,
        qkv: CudaView<'_, T>,
        keys: CudaViewMut<'_, T>,
        values: CudaViewMut<'_, T>,
    ) -> Result<()> {
        key_value_cache::cuda::append(self, shape, first_position, qkv, keys, values)
    }

    fn swiglu_forward<T: Element>(
        &self,
        width: usize,
        gate_up: CudaView<'_, T>,
        out: CudaViewMut<'_, T>,
    ) -> Result<()> {
        swiglu::cuda::forward(self, width, gate_up, out)
    }

    fn swiglu_backward<T: Element>(
        &self,
        width: usize,
        gate_up: CudaViewMut<'_, T>,
        out: CudaViewMut<'_, T>,
    ) -> Result<()> {
        swiglu::cuda::backward(self, width, gate_up, out)
    }

    fn cross_entropy_scratch(&self, shape: &HeadShape) -> usize {
        cross_entropy::cuda::scratch(shape)
    }

    fn cross_entropy_sums(&self, shape: &HeadShape, ranks: usize) -> usize {
        cross_entropy::cuda::sums(shape, ranks)
    }

    fn cross_entropy<T: Element, G: Element>(
        &self,
        shape: &HeadShape,
        x: CudaView<'_, T>,
        weight: CudaView<'_, T>,
        targets: CudaView<'_, u32>,
        scratch: CudaViewMut<'_, f32>,
        loss: CudaViewMut<'_, f64>,
        gradients: Option<HeadGradients<'_, Self, T, G>>,
        ranks: Option<HeadRanks<'_, Self>>,
    ) -> Result<()> {
        let into = (scratch, loss, gradients);
        cross_entropy::cuda::cross_entropy(self, shape, x, weight, targets, into, ranks)
    }

    fn squared_norms<G: Element>(
        &self,
        xs: &[CudaView<'_, G>],
        out: CudaViewMut<'_, f64>,
    ) -> Result<()> {
        adamw::cuda::squared_norms(self, xs, out)
    }

    fn adamw<T: Element, G: Element, M: Element>(
        &self,
        step: &AdamW,
        squared_norm: CudaView<'_, f64>,
        gradients: CudaView<'_, G>,
        weights: CudaViewMut<'_, T>,
        remainder: Option<CudaViewMut<'_, i16>>,
        first_moment: CudaViewMut<'_, M>,
        second_moment: CudaViewMut<'_, M>,
    ) -> Result<()> {
        adamw::cuda::adamw(
            self,
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
