//! A block: `residual = x + O attention(norm(x))`, `y = residual +
//! down(SwiGLU(gate_up(norm(residual))))`, and its backward pass in reverse order. Training and
//! generation use the same code: `tokens` may be fewer than the buffers' capacity.

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

/// The tokens that a block computes.
pub(crate) struct Tokens<'a, B: Backend> {
    pub shape: QkvShape,
    /// Position of each sequence's first token.
    pub first_position: usize,
    /// Start of each token's document; `[N]`.
    pub document_start: Option<&'a B::Buffer<u32>>,
}

/// The parameters of a block's backward pass beside the incoming gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RouterScale {
    /// Gradient of the total loss with respect to one block's balance loss.
    pub balance_weight: f32,
    /// Whether the loss reaches the gates through the selection (straight-through).
    pub straight_through: bool,
}

impl<B: Backend, T: Element> Model<B, T> {
    /// Computes the residual stream after the block, `output`, from the one before it, `input`.
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

    /// Replaces the gradient of the block's output in `backward.d_stream` by the gradient of its
    /// input, and adds the gradients of its weights to `gradients`, or overwrites stale ones.
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

    /// Recomputes the activations that the forward pass did not save.
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
