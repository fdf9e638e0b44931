//! Routers that score heads by the norms of their queries before RoPE, without a parameter. The
//! query-norm router is the router of MoH (arXiv 2410.11842, section 3.3 and appendix):
//!
//! ```text
//! n_i = ||q_i||           gate = softmax(n / std(n))     std unbiased, over the routed heads
//! selected = the top-k norms (sums of squares in f64; a tie selects the lower head)
//! ```
//!
//! Another router selects whole key/value groups ([`Selects`]):
//!
//! ```text
//! n_i = sqrt(mean over the heads j of i's group of ||q_j||^2)     gate = softmax(n)
//! selected = the k / M groups with the largest sums of squares, M the heads of a group
//! ```
//!
//! With both routers the gates of a token sum to 1. The norms of groups are not divided by a standard
//! deviation: the division would make the gates of two groups constants.
//!
//! Backward, straight-through: the gradient of a selected head's weight, `<dO, O>`, is used as
//! its gate's gradient. Heads that were not selected have no gradient, since their outputs are not computed
//! (equation 10 of the paper would give them a gradient). The balance loss adds `f_i / N` to every gate's gradient.
//! If all norms of a token are equal, its gates are uniform and pass no gradient. A query of
//! norm 0 also passes no gradient.
//!
//! Ranks that share a layer's heads all-reduce the squared norms before the selection, which is
//! therefore the same on every rank. They also all-reduce the gradients of the weights before the gradients of the
//! norms are computed.
//!
//! Shared heads have no norm, whatever their place: their squares and norms are -1, and are skipped.
//! Each rank writes -1 for its own heads, so the sum over the ranks keeps this value.
//!
//! RoPE preserves norms, so a GPU routes and rotates in one pass over the queries
//! ([`QueryNormForward::rope`]) if no other operator is between the two, as in a Llama.

mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use super::{RouterGradient, Routers, Routing, RoutingShape, SharedHeads};
use crate::ranks::AllReduce;
use crate::rope::{Rope, RopeTable};
use crate::{Element, Heads, Memory, QkvShape, Result, View, ViewMut, check_len, ensure};

/// The shared heads, and the number of routed heads that a token selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueryNormRouter {
    /// Heads that every token computes.
    pub shared: SharedHeads,
    /// Routed heads that a token selects.
    pub top_k: usize,
    /// Which routed heads a token may select together.
    pub selects: Selects,
}

/// Which routed heads a token may select together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selects {
    /// Any heads (the query-norm router).
    Heads,
    /// Only whole key/value groups. The shared heads are whole groups too.
    Groups,
}

impl QueryNormRouter {
    /// Returns the sizes of the routing of `tokens` tokens in a layer of `heads`: norms and 1 / std are saved.
    ///
    /// # Errors
    /// Fails if the router does not fit the heads.
    pub fn routing_shape(&self, tokens: usize, heads: Heads) -> Result<RoutingShape> {
        self.check("routing", heads)?;
        let columns = heads.count - self.shared.leading();
        // The norms, and 1 / std.
        let saved_per_token = columns + 1;
        let (weighted, logits) = (false, 0);
        Ok(RoutingShape { tokens, heads, columns, saved_per_token, weighted, logits })
    }

    /// Rejects heads that do not fit a layer's query heads.
    fn check(&self, operator: &'static str, heads: Heads) -> Result<()> {
        let &QueryNormRouter { shared, top_k, selects } = self;
        shared.check(operator, heads.count)?;
        let routed = heads.count - shared.len();
        ensure(operator, top_k <= routed, || format!("top {top_k} of {routed} routed heads"))?;
        let size = heads.group_size;
        let mut shared_of_groups = (0..heads.count / size)
            .map(|group| (0..size).filter(|head| shared.contains(group * size + head)).count());
        match selects {
            Selects::Heads => ensure(operator, routed != 1, || {
                "one routed head has no standard deviation: route none or at least two".into()
            }),
            Selects::Groups => {
                let whole = shared_of_groups.all(|count| count == 0 || count == size);
                ensure(operator, whole, || format!("the shared heads are no groups of {size}"))?;
                ensure(operator, top_k.is_multiple_of(size), || {
                    format!("top {top_k} is no multiple of the {size} heads of a group")
                })
            }
        }
    }
}

/// Arguments of [`QueryNorm::query_norm_forward`].
pub struct QueryNormForward<'a, M: Memory, T: Element> {
    /// The router.
    pub router: QueryNormRouter,
    /// Shape of `qkv`, of local heads.
    pub shape: &'a QkvShape,
    /// Queries before RoPE, keys and values; `[B*T, (H + 2G) D]`. Changed only by the rotation.
    pub qkv: ViewMut<'a, M, T>,
    /// The rotation of `qkv` that follows; `None` without a rotation.
    pub rope: Option<RopeTable<'a, M>>,
    /// Overwritten.
    pub routing: &'a mut Routing<M>,
    /// The sum over the ranks that share the heads; required if several ranks share them. Each rank calls it the
    /// same number of times.
    pub all_reduce: Option<AllReduce<'a, M>>,
}

/// Arguments of [`QueryNorm::query_norm_backward`].
pub struct QueryNormBackward<'a, M: Memory, T: Element> {
    /// The router.
    pub router: QueryNormRouter,
    /// Shape of `qkv`.
    pub shape: &'a QkvShape,
    /// Queries, keys and values; `[B*T, (H + 2G) D]`. `qkv` and `d_qkv` are either both before RoPE or both
    /// after RoPE.
    pub qkv: View<'a, M, T>,
    /// Added to; `[B*T, (H + 2G) D]`.
    pub d_qkv: ViewMut<'a, M, T>,
    /// The rotation of the forward pass, if `d_qkv` is after the rotation and must be rotated back.
    pub rope: Option<RopeTable<'a, M>>,
    /// The router's other inputs.
    pub gradient: RouterGradient<'a, M>,
}

/// The query-norm router as operators of a device.
pub trait QueryNorm: Routers + Rope {
    /// Routes the tokens by their queries, then rotates queries and keys.
    fn query_norm_forward<T: Element>(&self, args: QueryNormForward<'_, Self, T>) -> Result<()>;

    /// Adds the router's gradient to the gradient of the queries, and replaces the gradients of rotated
    /// queries and keys by the gradients before the rotation.
    fn query_norm_backward<T: Element>(&self, args: QueryNormBackward<'_, Self, T>) -> Result<()>;
}

/// Checks a forward pass over `qkv` elements and starts its routing; returns the number of columns.
fn begin<M: Memory>(
    operator: &'static str,
    router: QueryNormRouter,
    shape: &QkvShape,
    qkv: usize,
    routing: &mut Routing<M>,
) -> Result<usize> {
    router.check(operator, routing.heads())?;
    check_shape(operator, shape, "qkv", qkv)?;
    routing.begin(shape.tokens(), router.shared)?;
    check_routing(operator, router, shape, routing)?;
    Ok(routing.columns())
}

/// Checks a backward pass, and the lengths of `qkv` and `d_qkv`.
fn check_backward<M: Memory>(
    operator: &'static str,
    router: QueryNormRouter,
    shape: &QkvShape,
    [qkv, d_qkv]: [usize; 2],
    gradient: &RouterGradient<'_, M>,
) -> Result<()> {
    check_shape(operator, shape, "d_qkv", d_qkv)?;
    check_len(operator, "qkv", qkv, d_qkv)?;
    gradient.routing.check(operator, shape.tokens(), shape.heads)?;
    gradient.check(operator, router.shared)?;
    check_routing(operator, router, shape, gradient.routing)
}

fn check_shape(
    operator: &'static str,
    shape: &QkvShape,
    what: &'static str,
    len: usize,
) -> Result<()> {
    shape.check(operator)?;
    check_len(operator, what, len, shape.tokens() * shape.row())
}

/// Rejects a routing of other heads or groups, or without room for norms and 1 / std.
fn check_routing<M: Memory>(
    operator: &'static str,
    router: QueryNormRouter,
    shape: &QkvShape,
    routing: &Routing<M>,
) -> Result<()> {
    routing.check_heads(operator, shape.heads)?;
    let (made_for, size) = (routing.heads().group_size, shape.heads / shape.kv_heads.max(1));
    ensure(operator, router.selects == Selects::Heads || made_for == size, || {
        format!("the routing was made for groups of {made_for} heads, not {size}")
    })?;
    routing.check_saved(operator, routing.columns() + 1)
}
