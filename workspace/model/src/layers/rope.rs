//! Rotary position embedding (arXiv 2104.09864) of queries and keys, in place.

use moh_kernels::rope::{RopeArgs, RopeTable};
use moh_kernels::{Backend, Element, Memory, ViewMut};

use super::Context;
use crate::rope::table;
use crate::{Error, RopeConfig};

/// Cosines and sines of the angles on a device, which all layers share.
pub(crate) struct RopeTables<M: Memory> {
    /// `[positions, head_dim / 2]`.
    pub cos: M::Buffer<f32>,
    /// `[positions, head_dim / 2]`.
    pub sin: M::Buffer<f32>,
}

impl<M: Memory> RopeTables<M> {
    /// Allocates zeros for this many positions.
    pub fn zeros(memory: &M, head_dim: usize, positions: usize) -> Result<Self, Error> {
        let len = positions * (head_dim / 2);
        Ok(RopeTables { cos: memory.allocate(len)?, sin: memory.allocate(len)? })
    }

    /// Writes the tables.
    pub fn fill(&mut self, memory: &M, rope: &RopeConfig, head_dim: usize) -> Result<(), Error> {
        let positions = M::len(&self.cos) / (head_dim / 2).max(1);
        let (cos, sin) = table(rope, head_dim, positions);
        memory.upload(&cos, M::whole_mut(&mut self.cos))?;
        Ok(memory.upload(&sin, M::whole_mut(&mut self.sin))?)
    }
}

/// The rotation of queries and keys by their positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rope;

impl Rope {
    /// The operator's arguments for the queries and keys of `qkv`, or for their gradients.
    pub fn args<'v, B: Backend, T: Element>(
        self,
        cx: &'v Context<'_, B, T>,
        qkv: ViewMut<'v, B, T>,
    ) -> RopeArgs<'v, B, T> {
        let RopeTables { cos, sin } = cx.rope;
        let first_position = cx.tokens.first_position;
        let table = RopeTable { cos: B::whole(cos), sin: B::whole(sin), first_position };
        RopeArgs { shape: &cx.tokens.shape, table, qkv }
    }

    /// Rotates queries and keys.
    pub fn forward<B: Backend, T: Element>(
        self,
        cx: &Context<'_, B, T>,
        mut qkv: ViewMut<'_, B, T>,
    ) -> Result<(), Error> {
        Ok(cx.backend.rope_forward(self.args(cx, B::reborrow_mut(&mut qkv)))?)
    }

    /// Replaces the gradients of rotated queries and keys by those of unrotated ones.
    pub fn backward<B: Backend, T: Element>(
        self,
        cx: &Context<'_, B, T>,
        mut d_qkv: ViewMut<'_, B, T>,
    ) -> Result<(), Error> {
        Ok(cx.backend.rope_backward(self.args(cx, B::reborrow_mut(&mut d_qkv)))?)
    }
}
