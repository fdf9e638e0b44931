//! The loss by which a head learns the distribution of another model, its teacher (knowledge distillation, Hinton et
//! al., arXiv 1503.02531, section 2).
//!
//! With s and t the logits of the two heads, T the temperature, p = softmax(s / T) and q = softmax(t / T) over the rows
//! that both models have: loss = T^2 KL(q || p) = T^2 sum_v `q_v (log q_v - log p_v)`, d_s = scale T (p - q) on these
//! rows. The KL is T^2 larger than without the factor, so that gradients do not shrink as 1 / T^2.
//!
//! With Z_s and Z_t the logarithms of the sums of exponentials of s / T and t / T, KL = sum_v `q_v (t_v - s_v) / T` +
//! Z_s - Z_t: one pass over the logits computes all three sums. Ranks with shards of the rows exchange their sums in
//! additional columns of their table.

use crate::{Element, Memory, Result, View, check_len, ensure};

use super::HeadShape;

/// The teacher of a head: the teacher's own head and its inputs.
pub struct HeadTeacher<'a, M: Memory, T: Element> {
    /// Width of the teacher's residual stream, C'.
    pub width: usize,
    /// `[N, C']`.
    pub x: View<'a, M, T>,
    /// `[V, C']`: rows of the same tokens as in the trained head.
    pub weight: View<'a, M, T>,
    /// The distributions are over this number of first rows of the whole vocabulary: fewer than all
    /// if the vocabulary has grown since the teacher was trained.
    pub rows: usize,
    /// The temperature, T.
    pub temperature: f32,
    /// Gradient of the total loss with respect to each token's distillation loss.
    pub scale: f32,
}

/// Checks that the teacher exists if the shape has one, and that it fits the head.
pub(super) fn check<M: Memory, T: Element>(
    operator: &'static str,
    shape: &HeadShape,
    teacher: Option<&HeadTeacher<'_, M, T>>,
) -> Result<()> {
    ensure(operator, shape.has_teacher == teacher.is_some(), || {
        "a shape with a teacher needs one, and one without has none".into()
    })?;
    let Some(&HeadTeacher { width, x, weight, rows, temperature, .. }) = teacher else {
        return Ok(());
    };
    ensure(operator, width > 0 && rows > 0, || "the teacher's head is empty".into())?;
    ensure(operator, temperature > 0.0 && temperature.is_finite(), || {
        format!("a temperature of {temperature}, expected a positive number")
    })?;
    check_len(operator, "the teacher's x", M::view_len::<T>(x), shape.tokens * width)?;
    let weight = M::view_len::<T>(weight);
    check_len(operator, "the teacher's weight", weight, shape.vocab_size * width)
}
