//! Rotary position embedding (arXiv 2104.09864) of queries and keys, in place.

use moh_kernels::rope::{RopeArgs, RopeTable};
use moh_kernels::{AnyViewMut, Backend, Memory, for_element};

use super::Context;
use crate::rope::table;
use crate::{Result, RopeConfig};

/// Cosines and sines of the angles on a device, which all layers share.
pub(crate) struct RopeTables<M: Memory> {
    /// `[positions, head_dim / 2]`.
    pub cos: M::Buffer<f32>,
    /// `[positions, head_dim / 2]`.
    pub sin: M::Buffer<f32>,
}

impl<M: Memory> RopeTables<M> {
    /// Allocates tables of zeros for `positions` positions.
    pub fn zeros(memory: &M, head_dim: usize, positions: usize) -> Result<Self> {
        let len = positions * (head_dim / 2);
        Ok(RopeTables { cos: memory.allocate(len)?, sin: memory.allocate(len)? })
    }

    pub fn fill(&mut self, memory: &M, rope: &RopeConfig, head_dim: usize) -> Result<()> {
        let positions = M::len(&self.cos) / (head_dim / 2).max(1);
        let (cos, sin) = table(rope, head_dim, positions);
        memory.upload(&cos, M::whole_mut(&mut self.cos))?;
        Ok(memory.upload(&sin, M::whole_mut(&mut self.sin))?)
    }
}

impl<B: Backend> Context<'_, B> {
    /// Returns the angles of the tokens' positions.
    pub fn rope_table(&self) -> RopeTable<'_, B> {
        let RopeTables { cos, sin } = self.rope;
        let first_position = self.tokens.first_position;
        RopeTable { cos: B::whole(cos), sin: B::whole(sin), first_position }
    }

    /// Rotates the queries and keys of `qkv` by their positions.
    pub fn rotate(&self, mut qkv: AnyViewMut<'_, B>) -> Result<()> {
        let (shape, table) = (&self.tokens.shape, self.rope_table());
        Ok(for_element!(T: qkv.element() => {
            let qkv = qkv.reborrow().typed();
            self.backend.rope_forward::<T>(RopeArgs { shape, table, qkv })
        })?)
    }

    /// Replaces the gradients of rotated queries and keys in `d_qkv` by the gradients of unrotated queries and keys.
    pub fn rotate_back(&self, mut d_qkv: AnyViewMut<'_, B>) -> Result<()> {
        let (shape, table) = (&self.tokens.shape, self.rope_table());
        Ok(for_element!(T: d_qkv.element() => {
            let qkv = d_qkv.reborrow().typed();
            self.backend.rope_backward::<T>(RopeArgs { shape, table, qkv })
        })?)
    }
}
