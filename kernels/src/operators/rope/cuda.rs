//! Rotary position embedding on a GPU.

use super::{Rope, RopeArgs, RopeTable, check};
use crate::cuda::parameters::rope::Parameters;
use crate::cuda::{Cuda, name};
use crate::{Element, Result};

impl Parameters {
    /// Checks the arguments and returns their addresses.
    pub(crate) fn new<T: Element>(
        operator: &'static str,
        args: &RopeArgs<'_, Cuda, T>,
    ) -> Result<Self> {
        let RopeArgs { shape, table: RopeTable { cos, sin, first_position }, qkv } = args;
        check(operator, shape, *first_position, [qkv.len, cos.len, sin.len])?;
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
