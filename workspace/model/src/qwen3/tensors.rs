//! The tensors of a Qwen3 block: a Llama's, and the weights of query and key norms.

use crate::ModelConfig;
use crate::llama::tensors::{attention, mlp};
use crate::tensors::{Operand, Table};

/// Adds the tensors of a block.
pub(crate) fn block(config: &ModelConfig, table: &mut Table) {
    table.norm(Operand::InputNorm, "input_layernorm", config.hidden_size);
    attention(config, table);
    table.norm(Operand::QkNorm, "self_attn.q_norm", config.head_dim);
    table.norm(Operand::QkNorm, "self_attn.k_norm", config.head_dim);
    mlp(config, table);
}
