//! The Llama architecture: its tensors, and its passes over them, which architectures that differ little from
//! it share. Each file has a forward pass directly
//! above its backward pass, written by hand. How ranks share tensors and tokens is [`crate::sequence`]'s.

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
