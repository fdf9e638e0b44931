//! The layers of a model. Each file has one layer: its tensors, the buffers that its forward pass
//! saves, and a handwritten backward pass directly below the forward pass.
//!
//! A layer is plain data: sizes, and the ranges of its parameters. Its [`Context`] has the device, the parameters and
//! the tokens of a pass. Layers that tensor-parallel ranks divide gather their inputs and reduce their outputs
//! themselves. All other layers see the rank's own rows of the residual stream.

pub(crate) mod attention;
mod block;
mod context;
mod embedding;
mod head;
mod linear;
mod mlp;
mod qk_norm;
mod rms_norm;
mod rope;
mod rotation;
mod router;

pub(crate) use attention::{Attention, CachedTokens, LayerCache};
pub(crate) use block::{Block, BlockBuffers, RecomputableBlock, SavedBlock};
pub(crate) use context::{ActivationGradients, BackwardContext, Context, Scratch, Tokens};
pub(crate) use embedding::Embedding;
pub(crate) use head::{Head, HeadBuffers, HeadPass};
pub(crate) use linear::{Linear, ResidualSum};
pub(crate) use mlp::Mlp;
pub(crate) use qk_norm::QkNorm;
pub(crate) use rms_norm::{Normed, RmsNorm};
pub(crate) use rope::RopeTables;
pub(crate) use rotation::Rotation;
pub(crate) use router::{RouterLayer, RouterSpec};
