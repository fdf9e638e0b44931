//! Qwen3 (arXiv 2505.09388): a Llama whose queries and keys are normed before RoPE.

use crate::ModelConfig;
use crate::layers::{Attention, Block, Mlp, QkNorm, RmsNorm, Rotation};
use crate::tensors::TensorList;

/// The layers of a block, in the order of its tensors.
pub(super) fn block(list: &mut TensorList<'_>, config: &ModelConfig) -> Block {
    let (width, eps) = (config.hidden_size, config.rms_norm_eps);
    let attention_norm = RmsNorm::new(list, "input_layernorm.weight", width, eps);
    let attention = Attention::new(list, config);
    let norm = QkNorm::new(list, config.head_dim, eps);
    Block {
        attention_norm,
        attention: Attention { rotation: Rotation::NormedRope(norm), ..attention },
        mlp_norm: RmsNorm::new(list, "post_attention_layernorm.weight", width, eps),
        mlp: Mlp::new(list, config),
    }
}
