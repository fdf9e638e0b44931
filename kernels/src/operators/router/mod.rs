//! Routers choose, for every token, the heads that attention computes in addition to the shared heads.
//!
//! Each way of scoring heads has one folder: [`query_norm`] by the norms of queries, like the
//! paper's router for pretrained models, and [`logits`] by learned matrices. A router fills a
//! [`Routing`]: the routed heads that each token selected, the gates, and, if it scales outputs, a
//! weight for every (token, head). Attention's argument is the [`Selection`] of a routing, which
//! does not depend on the router. All routers share the operations that need only the tables: the balance
//! loss and the columns of the heads that are local to a rank.
//!
//! The shared heads are a set ([`SharedHeads`]). The tables have a column for each head from the
//! first routed head on. Every token selects a shared head with a column, with a gate of 0:
//! attention computes the head, and it adds nothing to the balance loss.

mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;
pub mod logits;
pub mod query_norm;
mod shared_heads;

use crate::attention::Selection;
use crate::ranks::AllReduce;
use crate::{Error, Heads, Memory, Result, View, ViewMut, check_len, ensure};

pub use shared_heads::SharedHeads;

/// Sizes of a [`Routing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoutingShape {
    /// Maximum tokens.
    pub tokens: usize,
    /// The layer's heads.
    pub heads: Heads,
    /// Maximum columns: the layer's heads minus the leading shared heads.
    pub columns: usize,
    /// f64 elements that the router saves for each token.
    pub saved_per_token: usize,
    /// Whether the router scales heads' outputs.
    pub weighted: bool,
    /// Logits that a token's router computes. The routing itself has no room for them.
    pub logits: usize,
}

/// The decisions of a router for the tokens of one micro-batch in one layer, and the values that
/// its backward pass needs. R is the number of columns: the heads of all ranks from the first routed head
/// on. The router marks a shared head among them as selected by every token, with a gate of 0.
pub struct Routing<M: Memory> {
    shape: RoutingShape,
    /// Shared heads of the last routed layer.
    shared: SharedHeads,
    /// Tokens of the last routed micro-batch.
    tokens: usize,
    /// Whether the outputs of the layer's heads are scaled.
    weighted: bool,
    /// 1 if a token selected a head; `[tokens, R]`.
    pub(crate) selected: M::Buffer<u8>,
    /// The columns of `selected` of local heads, if ranks share the heads.
    pub(crate) local_selected: M::Buffer<u8>,
    /// `[tokens, R]`.
    pub(crate) gates: M::Buffer<f32>,
    /// Tokens that selected each column's head; `[R]`.
    pub(crate) counts: M::Buffer<u32>,
    /// Saved by the router, `saved_per_token` elements per token.
    pub(crate) saved: M::Buffer<f64>,
    /// Factors of the outputs; `[tokens, local heads]`, or empty.
    pub(crate) weights: M::Buffer<f32>,
}

impl<M: Memory> Routing<M> {
    /// Allocates buffers for up to `shape.tokens` tokens.
    ///
    /// # Errors
    /// Fails if the heads do not divide among the ranks, or if the device is out of memory.
    pub fn new(memory: &M, shape: RoutingShape) -> Result<Self> {
        const OPERATOR: &str = "routing";
        let RoutingShape { tokens, heads, columns, saved_per_token, weighted, .. } = shape;
        ensure(OPERATOR, heads.are_sound(), || {
            let Heads { count, group_size, ranks, .. } = heads;
            format!("{count} heads in groups of {group_size} cannot be divided among {ranks} ranks")
        })?;
        ensure(OPERATOR, columns <= heads.count, || {
            format!("{columns} columns of {} heads", heads.count)
        })?;
        let leading = heads.count - columns;
        let local_columns = heads.local() - heads.local_below(leading);
        let when = |needed: bool, len: usize| if needed { len } else { 0 };
        Ok(Routing {
            shape,
            shared: SharedHeads::first(leading),
            tokens: 0,
            weighted: false,
            selected: memory.allocate(tokens * columns)?,
            local_selected: memory.allocate(when(heads.ranks > 1, tokens * local_columns))?,
            gates: memory.allocate(tokens * columns)?,
            counts: memory.allocate(columns)?,
            saved: memory.allocate(tokens * saved_per_token)?,
            weights: memory.allocate(when(weighted, tokens * heads.local()))?,
        })
    }

    /// Starts to route `tokens` tokens in a layer with these shared heads.
    ///
    /// # Errors
    /// Fails if the tokens or columns exceed the routing's shape, or if a shared head is not in the
    /// layer.
    pub fn begin(&mut self, tokens: usize, shared: SharedHeads) -> Result<()> {
        const OPERATOR: &str = "routing";
        let RoutingShape { tokens: most, heads, columns: most_columns, .. } = self.shape;
        ensure(OPERATOR, tokens <= most, || {
            format!("the routing has room for {most} tokens, not {tokens}")
        })?;
        shared.check(OPERATOR, heads.count)?;
        let columns = heads.count - shared.leading();
        ensure(OPERATOR, columns <= most_columns, || {
            format!("the routing has room for {most_columns} columns, not {columns}")
        })?;
        (self.tokens, self.shared, self.weighted) = (tokens, shared, false);
        Ok(())
    }

    /// Rejects counts of tokens or local heads that differ from the routing's.
    pub(crate) fn check(&self, operator: &'static str, tokens: usize, heads: usize) -> Result<()> {
        check_len(operator, "routing", self.tokens, tokens)?;
        self.check_heads(operator, heads)
    }

    pub(crate) fn check_heads(&self, operator: &'static str, heads: usize) -> Result<()> {
        let local = self.heads().local();
        ensure(operator, heads == local, || {
            format!("the routing was made for {local} heads, not {heads}")
        })
    }

    /// Rejects a routing that cannot save this many elements per token.
    fn check_saved(&self, operator: &'static str, per_token: usize) -> Result<()> {
        let (saved, least) = (M::len(&self.saved), self.tokens * per_token);
        ensure(operator, saved >= least, || {
            format!("the routing saves {saved} elements, expected {least}")
        })
    }

    /// Returns the layer's heads.
    pub fn heads(&self) -> Heads {
        self.shape.heads
    }

    /// Returns the number of routed tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the columns of the tables, R: column i belongs to head `shared().leading() + i`.
    pub fn columns(&self) -> usize {
        self.heads().count - self.shared.leading()
    }

    /// Returns the number of routed heads of all ranks: the columns except the columns of shared heads.
    pub fn routed(&self) -> usize {
        self.heads().count - self.shared.len()
    }

    /// Returns the shared heads of all ranks.
    pub fn shared(&self) -> SharedHeads {
        self.shared
    }

    /// Returns the number of local heads without a column, which are the first local heads and shared.
    pub fn local_leading(&self) -> usize {
        self.heads().local_below(self.shared.leading())
    }

    /// Returns whether the router scales heads' outputs.
    pub fn is_weighted(&self) -> bool {
        self.weighted
    }

    pub(crate) fn local_columns(&self) -> Vec<usize> {
        let (heads, leading) = (self.heads(), self.shared.leading());
        (self.local_leading()..heads.local()).map(|at| heads.index(at) - leading).collect()
    }

    /// Returns the selection `[tokens, R]` of all ranks' heads: 1 if a token selected a column's head, and in the
    /// columns of shared heads.
    pub fn selected(&self) -> View<'_, M, u8> {
        M::view(&self.selected, 0..self.tokens * self.columns())
    }

    /// Returns write access to [`Routing::selected`], for the router.
    pub fn selected_mut(&mut self) -> ViewMut<'_, M, u8> {
        let len = self.tokens * self.columns();
        M::view_mut(&mut self.selected, 0..len)
    }

    /// Returns the gates, `[tokens, R]`, of all ranks' heads; 0 in the columns of shared heads.
    pub fn gates(&self) -> View<'_, M, f32> {
        M::view(&self.gates, 0..self.tokens * self.columns())
    }

    /// Returns write access to [`Routing::gates`], for the router.
    pub fn gates_mut(&mut self) -> ViewMut<'_, M, f32> {
        let len = self.tokens * self.columns();
        M::view_mut(&mut self.gates, 0..len)
    }

    /// Returns the factors of the outputs, `[tokens, local heads]`, 0 for heads that a token did not select; empty if
    /// the router does not scale them.
    pub fn weights(&self) -> View<'_, M, f32> {
        let len = if self.weighted { self.tokens * self.heads().local() } else { 0 };
        M::view(&self.weights, 0..len)
    }

    /// Returns write access to the factors of the outputs, `[tokens, local heads]`, for a router that
    /// scales them. Attention applies them from now on, until the next [`Routing::begin`]. Empty if
    /// the routing's shape is not weighted.
    pub fn weights_mut(&mut self) -> ViewMut<'_, M, f32> {
        self.weighted = self.shape.weighted;
        let len = if self.weighted { self.tokens * self.heads().local() } else { 0 };
        M::view_mut(&mut self.weights, 0..len)
    }

    /// Returns the selection, an argument of attention.
    pub fn selection(&self) -> Selection<'_, M> {
        let heads = self.heads();
        let routed = match heads.ranks {
            1 => self.selected(),
            _ => {
                let local = heads.local() - self.local_leading();
                M::view(&self.local_selected, 0..self.tokens * local)
            }
        };
        let weights =
            (self.weighted).then(|| M::view(&self.weights, 0..self.tokens * self.heads().local()));
        Selection { shared_heads: self.local_leading(), routed, weights }
    }
}

/// The operators that all routers share.
pub trait Routers: Memory {
    /// Completes the tables after `selected` has been written: counts the tokens that selected
    /// each column's head, and copies the columns of local heads.
    fn complete_routing(&self, routing: &mut Routing<Self>) -> Result<()>;

    /// Routes all tokens only to the shared heads, without gates: no routed head is selected.
    ///
    /// # Errors
    /// Fails like [`Routing::begin`].
    fn route_to_shared(
        &self,
        tokens: usize,
        shared: SharedHeads,
        routing: &mut Routing<Self>,
    ) -> Result<()>;

    /// Computes `out[0] += scale * sum_i f_i P_i`, the balance loss of one layer and micro-batch. f_i is the share
    /// of tokens that selected the head of column i, P_i is its mean gate.
    fn balance_loss(
        &self,
        routing: &Routing<Self>,
        scale: f64,
        out: ViewMut<'_, Self, f64>,
    ) -> Result<()>;
}

/// The inputs of a router's backward pass.
pub struct RouterGradient<'a, M: Memory> {
    /// The result of the forward pass.
    pub routing: &'a Routing<M>,
    /// `<dO, O>` of every local head, `[N, H]`; if `None`, the selection is treated as a constant.
    pub delta: Option<View<'a, M, f32>>,
    /// Gradient of the total loss with respect to this layer's `sum_i f_i P_i`.
    pub balance_weight: f32,
    /// Required if ranks share the heads and `delta` is given.
    pub ranks: Option<RouterRanks<'a, M>>,
}

impl<M: Memory> RouterGradient<'_, M> {
    /// Rejects a routing with other shared heads, and a delta of other pairs.
    fn check(&self, operator: &'static str, shared: SharedHeads) -> Result<()> {
        ensure(operator, self.routing.shared == shared, || {
            "the routing was made with other shared heads".into()
        })?;
        let Some(delta) = self.delta else { return Ok(()) };
        let pairs = self.routing.tokens * self.routing.heads().local();
        check_len(operator, "delta", M::view_len::<f32>(delta), pairs)
    }
}

/// Arguments of a router's backward pass if ranks share the heads.
pub struct RouterRanks<'a, M: Memory> {
    /// Scratch with one element per token and column of the routing.
    pub table: ViewMut<'a, M, f64>,
    /// The sum over the ranks, called once.
    pub all_reduce: AllReduce<'a, M>,
}

/// Returns the exchange between ranks for a routing of `heads`; `None` if all heads are local.
pub(crate) fn exchange<E>(
    operator: &'static str,
    heads: Heads,
    given: Option<E>,
) -> Result<Option<E>> {
    match given {
        _ if heads.ranks == 1 => Ok(None),
        Some(given) => Ok(Some(given)),
        None => {
            let reason =
                format!("the heads are divided among {} ranks: pass `all_reduce`", heads.ranks);
            Err(Error::shape(operator, reason))
        }
    }
}
