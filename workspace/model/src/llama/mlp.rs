//! The MLP half of a block, `y = residual + down(SwiGLU(gate_up(norm(residual))))`, forward and
//! backward.

use moh_kernels::linear::LinearForward;
use moh_kernels::{Backend, Element, span};

use super::linear::Linear;
use crate::Error;
use crate::activations::{Backward, BlockBuffers};
use crate::model::Model;
use crate::parameters::FlatBuffers;
use crate::sequence::Projection;

impl<B: Backend, T: Element> Model<B, T> {
    /// `output = residual + down(SwiGLU(gate_up(norm(residual))))`.
    pub(super) fn mlp_forward(
        &self,
        tokens: usize,
        block: &mut BlockBuffers<'_, B, T>,
        output: &mut B::Buffer<T>,
    ) -> Result<(), Error> {
        let _span = span::enter("mlp");
        self.project_up(tokens, block)?;
        let inner = self.mlp_width();
        self.backend.swiglu_forward(
            inner,
            B::view(&block.saved.gate_up, 0..tokens * 2 * inner),
            B::view_mut(block.scratch, 0..tokens * inner),
        )?;
        let flat = self.layout.block_index(block.layer);
        let projection = Projection {
            tokens,
            inputs: inner,
            x: B::view(block.scratch, 0..tokens * inner),
            weight: self.weights.view(flat, self.layout.block.down.clone()),
        };
        self.project_to_stream(projection, &block.saved.residual, output, block.gathered)
    }

    /// The backward pass of [`Model::mlp_forward`]: replaces the gradient of the block's output in
    /// `backward.d_stream` by the gradient of `residual`, and adds the weights' to `gradients`. The
    /// gradient of gate and up overwrites their values.
    pub(super) fn mlp_backward<G: Element>(
        &self,
        n: usize,
        block: &mut BlockBuffers<'_, B, T>,
        backward: &mut Backward<B, T>,
        gradients: &mut FlatBuffers<B, G>,
    ) -> Result<(), Error> {
        let _span = span::enter("mlp");
        let BlockBuffers { layer, saved, recomputable, scratch, gathered } = block;
        let (flat, ranges) = (self.layout.block_index(*layer), &self.layout.block);
        let (width, inner) = (self.config.hidden_size, self.mlp_width());
        let linear = |range, inputs| Linear { flat, range, tokens: n, inputs };
        let down = linear(&ranges.down, inner);
        let d_output = self.gather(n, &backward.d_stream, gathered)?;
        self.linear_backward_input(down, d_output, scratch)?;
        self.backend.swiglu_backward(
            inner,
            B::whole_mut(&mut saved.gate_up),
            B::view_mut(scratch, 0..n * inner),
        )?;
        self.linear_backward_weight(down, B::view(scratch, 0..n * inner), d_output, gradients)?;
        let gate_up = linear(&ranges.gate_up, width);
        let d_gate_up = B::whole(&saved.gate_up);
        let normed = self.gather(n, &recomputable.post_normed, gathered)?;
        self.linear_backward_weight(gate_up, normed, d_gate_up, gradients)?;
        self.linear_backward_input(gate_up, d_gate_up, &mut backward.d_branch)?;
        let (residual, inv_rms) = (&saved.residual, &recomputable.post_inv_rms);
        self.norm_backward((flat, &ranges.post_norm, n), residual, inv_rms, backward, gradients)
    }

    /// The MLP's norm and its gate and up projections.
    pub(super) fn project_up(
        &self,
        tokens: usize,
        block: &mut BlockBuffers<'_, B, T>,
    ) -> Result<(), Error> {
        let BlockBuffers { layer, saved, recomputable, gathered, .. } = block;
        self.normalize_residual(*layer, tokens, saved, recomputable)?;
        let flat = self.layout.block_index(*layer);
        self.backend.linear_forward(LinearForward {
            inputs: self.config.hidden_size,
            x: self.gather(tokens, &recomputable.post_normed, gathered)?,
            weight: self.weights.view(flat, self.layout.block.gate_up.clone()),
            residual: None,
            y: B::view_mut(&mut saved.gate_up, 0..tokens * 2 * self.mlp_width()),
        })?;
        Ok(())
    }

    /// Number of the MLP's local columns.
    fn mlp_width(&self) -> usize {
        self.parallel.part().tensor.mlp_width(&self.config)
    }
}
