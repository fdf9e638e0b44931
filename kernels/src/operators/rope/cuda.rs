//! Rotary position embedding on a GPU.

use bytemuck::{Pod, Zeroable};

use super::{Lens, Rope, RopeArgs, RopeTable, check};
use crate::cuda::{Cuda, mirrored, name};
use crate::error::Result;
use crate::scalar::Element;

/// `Parameters` of rope.cuh.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
pub(crate) struct Parameters {
    qkv: u64,
    cos: u64,
    sin: u64,
    first_position: u64,
    length: u64,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    padding: u32,
}

mirrored!(
    Parameters, 56,
    qkv 0, cos 8, sin 16, first_position 24, length 32, heads 40, kv_heads 44, head_dim 48,
    padding 52,
);

impl Parameters {
    /// Checks the arguments and returns their addresses.
    pub(crate) fn new<T: Element>(
        operator: &'static str,
        args: &RopeArgs<'_, Cuda, T>,
    ) -> Result<Self> {
        let RopeArgs { shape, table: RopeTable { cos, sin, first_position }, qkv } = args;
        let lens = Lens { qkv: qkv.len, cos: cos.len, sin: sin.len };
        check(operator, shape, *first_position, &lens)?;
        Ok(Parameters {
            qkv: qkv.address,
            cos: cos.address,
            sin: sin.address,
            first_position: *first_position as u64,
            length: shape.length as u64,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            padding: 0,
        })
    }

    /// Address of the elements to rotate.
    pub(crate) fn address(&self) -> u64 {
        self.qkv
    }
}

impl Rope for Cuda {
    fn rope_forward<T: Element>(&self, args: RopeArgs<'_, Self, T>) -> Result<()> {
        let parameters = Parameters::new("rope_forward", &args)?;
        self.launch(&name::<T>("rope_forward"), [args.shape.tokens(), 1], 0, &parameters)
    }

    fn rope_backward<T: Element>(&self, args: RopeArgs<'_, Self, T>) -> Result<()> {
        let parameters = Parameters::new("rope_backward", &args)?;
        self.launch(&name::<T>("rope_backward"), [args.shape.tokens(), 1], 0, &parameters)
    }
}
