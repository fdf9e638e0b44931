//! Llama 1 to 3 (arXiv 2302.13971, 2407.21783).

use crate::ModelConfig;
use crate::layers::{Attention, Block, Mlp, RmsNorm};
use crate::tensors::TensorList;

/// The layers of a block, in the order of its tensors.
pub(super) fn block(list: &mut TensorList<'_>, config: &ModelConfig) -> Block {
    let (width, eps) = (config.hidden_size, config.rms_norm_eps);
    Block {
        attention_norm: RmsNorm::new(list, "input_layernorm.weight", width, eps),
        attention: Attention::new(list, config),
        mlp_norm: RmsNorm::new(list, "post_attention_layernorm.weight", width, eps),
        mlp: Mlp::new(list, config),
    }
}
