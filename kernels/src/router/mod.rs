//! The query-norm router of MoH (arXiv 2410.11842, section 3.3 and appendix): a routed head is
//! scored by the norm of its query before RoPE, without a parameter.
//!
//! ```text
//! n_i = ||q_i||           gate = softmax(n / std(n))     std unbiased, over the routed heads
//! selected = the top-k norms (sums of squares in f64; a tie goes to the lower head)
//! ```
//!
//! Backward, straight-through: the gradient of a selected head's weight, `<dO, O>`, is taken as
//! its gate's; heads that were not selected get none, since their outputs are not computed
//! (equation 10 of the paper would give them one). The balance loss adds `f_i / N` to every gate.
//! A token whose norms are all equal has uniform gates and passes no gradient, and neither does a
//! query of norm 0.
//!
//! Ranks that share a layer's heads exchange what they know of their own: the squares before the
//! selection, which is made of the same numbers on every rank, and the gradients of the weights
//! before those of the norms.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use crate::backend::{Backend, View, ViewMut};
use crate::error::{Error, Result, ensure};
use crate::ranks::{AllReduce, Heads};

/// Which heads are shared and how many of the others a token selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryNormRouter {
    /// Heads 0.. that serve every token.
    pub shared_heads: usize,
    /// Routed heads that a token selects.
    pub top_k: usize,
}

impl QueryNormRouter {
    /// Refuses counts that do not fit the layer's query heads; returns the number of routed heads.
    pub(crate) fn check(&self, operator: &'static str, heads: Heads) -> Result<usize> {
        let &QueryNormRouter { shared_heads, top_k } = self;
        ensure(operator, heads.are_sound(), || format!("{heads:?} do not divide"))?;
        let heads = heads.count;
        ensure(operator, shared_heads <= heads, || {
            format!("{shared_heads} shared heads of {heads} heads")
        })?;
        let routed = heads - shared_heads;
        ensure(operator, routed != 1, || {
            "one routed head has no standard deviation: route none or at least two".into()
        })?;
        ensure(operator, top_k <= routed, || format!("top {top_k} of {routed} routed heads"))?;
        Ok(routed)
    }
}

/// What reaches the router in the backward pass.
pub struct RouterGradient<'a, B: Backend> {
    /// What the forward pass decided.
    pub routing: &'a B::Routing,
    /// `<dO, O>` of every head that is held here, `[N, H]`; without it the selection is taken as a
    /// constant.
    pub delta: Option<View<'a, B, f32>>,
    /// Gradient of the total loss with respect to this block's `sum_i f_i P_i`.
    pub balance_weight: f32,
    /// Needed where ranks share the heads and there is a delta.
    pub ranks: Option<RouterRanks<'a, B>>,
}

/// What the router's backward pass needs where ranks share the heads.
pub struct RouterRanks<'a, B: Backend> {
    /// Room for a number of every token and routed head of the layer.
    pub table: ViewMut<'a, B, f64>,
    /// The sum over the ranks, called once.
    pub all_reduce: AllReduce<'a, B>,
}

/// What ranks exchange for a routing of `heads`: nothing where all of them are held here.
pub(crate) fn exchange<E>(
    operator: &'static str,
    heads: Heads,
    given: Option<E>,
) -> Result<Option<E>> {
    match given {
        _ if heads.ranks == 1 => Ok(None),
        Some(given) => Ok(Some(given)),
        None => Err(Error::Shape {
            operator,
            reason: format!(
                "the heads are divided among {} ranks, which exchange nothing",
                heads.ranks
            ),
        }),
    }
}
