//! The tensors of a Llama block.

use crate::ModelConfig;
use crate::tensors::Division::{Heads, Mlp};
use crate::tensors::{Operand, Table};

/// Adds the tensors of a block.
pub(crate) fn block(config: &ModelConfig, table: &mut Table) {
    table.norm(Operand::InputNorm, "input_layernorm", config.hidden_size);
    attention(config, table);
    mlp(config, table);
}

/// Adds the projections of attention.
pub(crate) fn attention(config: &ModelConfig, table: &mut Table) {
    let hidden = config.hidden_size;
    let (queries, keys) = (config.query_width(), config.key_value_width());
    table.matrix(Operand::Qkv, "self_attn.q_proj", [queries, hidden], Heads(0));
    table.matrix(Operand::Qkv, "self_attn.k_proj", [keys, hidden], Heads(0));
    table.matrix(Operand::Qkv, "self_attn.v_proj", [keys, hidden], Heads(0));
    table.matrix(Operand::Output, "self_attn.o_proj", [hidden, queries], Heads(1));
}

/// Adds the MLP with the norm before it.
pub(crate) fn mlp(config: &ModelConfig, table: &mut Table) {
    let (hidden, width) = (config.hidden_size, config.intermediate_size);
    table.norm(Operand::PostNorm, "post_attention_layernorm", hidden);
    table.matrix(Operand::GateUp, "mlp.gate_proj", [width, hidden], Mlp(0));
    table.matrix(Operand::GateUp, "mlp.up_proj", [width, hidden], Mlp(0));
    table.matrix(Operand::Down, "mlp.down_proj", [hidden, width], Mlp(1));
}
