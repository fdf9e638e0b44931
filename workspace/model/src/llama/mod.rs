//! The Llama architecture: its tensors and its passes, which similar architectures share. Each file
//! has a handwritten backward pass directly below its forward pass. [`crate::sequence`] shards
//! tensors and tokens.

mod attention;
mod block;
mod embedding;
mod head;
mod linear;
mod mlp;
mod norm;
mod routing;
pub(crate) mod tensors;

pub(crate) use block::{LayerCache, RouterScale, Tokens};
