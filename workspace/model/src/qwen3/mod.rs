//! The Qwen3 architecture (arXiv 2505.09388): a Llama whose queries and keys are normed before
//! RoPE. Its block uses the Llama's passes; this module adds the tensors and the norms.

mod qk_norm;
pub(crate) mod tensors;
