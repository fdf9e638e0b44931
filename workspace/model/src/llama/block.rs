//! A block: `middle = x + O attention(norm(x))`, `y = middle + down(SwiGLU(gate_up(norm(middle))))`, and
//! its backward pass, the same in reverse. Training and generation take the same path: `tokens` may be fewer
//! than the buffers hold.

use moh_kernels::rope::QkvShape;
use moh_kernels::{Backend, Element};

use crate::Error;
use crate::activations::{Backward, BlockBuffers, Recompute};
use crate::model::Model;
use crate::parameters::FlatBuffers;

/// Keys and values of one block's past tokens, `[capacity, G D]` each.
pub(crate) struct LayerCache<B: Backend, T: Element> {
    pub keys: B::Buffer<T>,
    pub values: B::Buffer<T>,
}

/// Which tokens a block works on.
pub(crate) struct Tokens<'a, B: Backend> {
    pub shape: QkvShape,
    /// Position of each sequence's first token.
    pub first_position: usize,
    /// Start of each token's document; `[N]`.
    pub document_start: Option<&'a B::Buffer<u32>>,
}

/// What steers a block's backward pass beside the gradient from above.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RouterScale {
    /// Gradient of the total loss with respect to one block's balance loss.
    pub balance_weight: f32,
    /// Whether the loss reaches the gates through the selection.
    pub straight_through: bool,
}

impl<B: Backend, T: Element> Model<B, T> {
    /// From the residual stream before the block, `input`, to that after it, `output`.
    pub(crate) fn block_forward(
        &self,
        tokens: &Tokens<'_, B>,
        input: &B::Buffer<T>,
        block: &mut BlockBuffers<'_, B, T>,
        cache: Option<&mut LayerCache<B, T>>,
        output: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        self.attention_forward(tokens, input, block, cache)?;
        self.mlp_forward(tokens.shape.tokens(), block, output)
    }

    /// Turns `backward.d_stream` from the gradient of the block's output into that of its input,
    /// and adds the gradients of its weights to `gradients`, or overwrites what is stale there.
    pub(crate) fn block_backward<G: Element>(
        &self,
        tokens: &Tokens<'_, B>,
        input: &B::Buffer<T>,
        mut block: BlockBuffers<'_, B, T>,
        backward: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
        router: RouterScale,
    ) -> Result<(), Error> {
        let flat = self.layout.block_index(block.layer);
        self.mlp_backward(tokens.shape.tokens(), &mut block, backward, gradients)?;
        self.attention_backward(tokens, input, &mut block, backward, gradients, router)?;
        gradients.mark_written(flat);
        Ok(())
    }

    /// Computes again what the forward pass did not save for the backward pass.
    pub(crate) fn recompute_block(
        &self,
        recompute: Recompute,
        tokens: &Tokens<'_, B>,
        input: &B::Buffer<T>,
        block: &mut BlockBuffers<'_, B, T>,
    ) -> Result<(), Error> {
        match recompute {
            Recompute::None => Ok(()),
            Recompute::Cheap => self.recompute_norms(tokens, input, block),
            Recompute::Block => {
                self.attention_forward(tokens, input, block, None)?;
                self.project_up(tokens.shape.tokens(), block)
            }
        }
    }
}
