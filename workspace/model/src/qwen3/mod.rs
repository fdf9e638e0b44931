//! The Qwen3 architecture (arXiv 2505.09388): a Llama whose queries and keys are normed before RoPE. Its
//! block takes a Llama's passes; what it adds to attention's is here.

mod qk_norm;
pub(crate) mod tensors;
