//! Routers choose, for every token, the heads that attention computes beside the shared ones.
//!
//! A router is a folder of its own ([`query_norm`] is the paper's for pretrained models). It fills a
//! [`Routing`]: which of the routed heads each token selected, the gates, and, if it scales outputs, a
//! weight for every (token, head). Attention takes the [`Selection`] of a routing and knows no router.
//! What follows from the tables alone is shared by all routers: the balance loss and the columns of the
//! heads that are local to a rank.

mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;
pub mod query_norm;

use crate::attention::Selection;
use crate::error::{Error, Result, ensure};
use crate::memory::{Memory, View, ViewMut};
use crate::ranks::{AllReduce, Heads};
use crate::rope::{QkvShape, RopeArgs};
use crate::scalar::Element;

/// Sizes of a [`Routing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoutingShape {
    /// The most tokens.
    pub tokens: usize,
    /// The layer's heads.
    pub heads: Heads,
    /// The fewest shared heads; all others are routed.
    pub shared_heads: usize,
    /// f64 elements that the router saves for each token.
    pub saved_per_token: usize,
    /// Whether the router scales heads' outputs.
    pub weighted: bool,
}

/// What a router decided for the tokens of one micro-batch in one layer, and what its backward pass
/// needs. R is the number of routed heads, of all ranks.
pub struct Routing<M: Memory> {
    shape: RoutingShape,
    /// Shared heads of the layer that was routed last.
    shared_heads: usize,
    /// Tokens that were routed last.
    tokens: usize,
    /// 1 where a token selected a head; `[tokens, R]`.
    pub(crate) selected: M::Buffer<u8>,
    /// The columns of `selected` of local heads, where ranks share the heads.
    pub(crate) local_selected: M::Buffer<u8>,
    /// `[tokens, R]`.
    pub(crate) gates: M::Buffer<f32>,
    /// Tokens that selected each routed head; `[R]`.
    pub(crate) counts: M::Buffer<u32>,
    /// The router's own, `saved_per_token` for each token.
    pub(crate) saved: M::Buffer<f64>,
    /// What outputs are multiplied by; `[tokens, local heads]`, or empty.
    pub(crate) weights: M::Buffer<f32>,
}

impl<M: Memory> Routing<M> {
    /// Buffers for up to `shape.tokens` tokens.
    ///
    /// # Errors
    /// Heads that do not divide among the ranks, and when the device has no room.
    pub fn new(memory: &M, shape: RoutingShape) -> Result<Self> {
        const OPERATOR: &str = "routing";
        let RoutingShape { tokens, heads, shared_heads, saved_per_token, weighted } = shape;
        ensure(OPERATOR, heads.are_sound(), || format!("{heads:?} do not divide"))?;
        ensure(OPERATOR, shared_heads <= heads.count, || {
            format!("{shared_heads} shared heads of {} heads", heads.count)
        })?;
        let routed = heads.count - shared_heads;
        let local_routed = heads.local() - heads.local_below(shared_heads);
        let when = |needed: bool, len: usize| if needed { len } else { 0 };
        Ok(Routing {
            shape,
            shared_heads,
            tokens: 0,
            selected: memory.allocate(tokens * routed)?,
            local_selected: memory.allocate(when(heads.ranks > 1, tokens * local_routed))?,
            gates: memory.allocate(tokens * routed)?,
            counts: memory.allocate(routed)?,
            saved: memory.allocate(tokens * saved_per_token)?,
            weights: memory.allocate(when(weighted, tokens * heads.local()))?,
        })
    }

    /// Starts to route `tokens` tokens in a layer with `shared_heads` shared heads.
    ///
    /// # Errors
    /// More tokens or routed heads than the routing was made for.
    pub fn begin(&mut self, tokens: usize, shared_heads: usize) -> Result<()> {
        const OPERATOR: &str = "routing";
        let RoutingShape { tokens: most, heads, shared_heads: fewest, .. } = self.shape;
        ensure(OPERATOR, tokens <= most, || {
            format!("the routing has room for {most} tokens, not {tokens}")
        })?;
        ensure(OPERATOR, (fewest..=heads.count).contains(&shared_heads), || {
            format!("{shared_heads} shared heads of {}, at least {fewest} expected", heads.count)
        })?;
        (self.tokens, self.shared_heads) = (tokens, shared_heads);
        Ok(())
    }

    /// Refuses tokens or local heads other than those that were routed.
    pub(crate) fn check(&self, operator: &'static str, tokens: usize, heads: usize) -> Result<()> {
        crate::error::check_len(operator, "routing", self.tokens, tokens)?;
        self.check_heads(operator, heads)
    }

    pub(crate) fn check_heads(&self, operator: &'static str, heads: usize) -> Result<()> {
        let local = self.heads().local();
        ensure(operator, heads == local, || {
            format!("the routing was made for {local} heads, not {heads}")
        })
    }

    /// The layer's heads.
    pub fn heads(&self) -> Heads {
        self.shape.heads
    }

    /// Tokens that were routed.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Routed heads, R, of all ranks.
    pub fn routed(&self) -> usize {
        self.heads().count - self.shared_heads
    }

    /// Shared heads of all ranks.
    pub fn shared_heads(&self) -> usize {
        self.shared_heads
    }

    /// Shared heads that are local.
    pub fn local_shared(&self) -> usize {
        self.heads().local_below(self.shared_heads)
    }

    /// The indices among the routed heads of those that are local.
    pub(crate) fn local_routed(&self) -> Vec<usize> {
        let heads = self.heads();
        (self.local_shared()..heads.local()).map(|at| heads.index(at) - self.shared_heads).collect()
    }

    /// 1 where a token selected a routed head; `[tokens, R]`, of all ranks' heads.
    pub fn selected(&self) -> View<'_, M, u8> {
        M::view(&self.selected, 0..self.tokens * self.routed())
    }

    /// As [`Routing::selected`], for the router to write.
    pub fn selected_mut(&mut self) -> ViewMut<'_, M, u8> {
        let len = self.tokens * self.routed();
        M::view_mut(&mut self.selected, 0..len)
    }

    /// The gates, `[tokens, R]`, of all ranks' heads.
    pub fn gates(&self) -> View<'_, M, f32> {
        M::view(&self.gates, 0..self.tokens * self.routed())
    }

    /// As [`Routing::gates`], for the router to write.
    pub fn gates_mut(&mut self) -> ViewMut<'_, M, f32> {
        let len = self.tokens * self.routed();
        M::view_mut(&mut self.gates, 0..len)
    }

    /// What outputs are multiplied by, `[tokens, local heads]`, for a router that scales them to write.
    pub fn weights_mut(&mut self) -> ViewMut<'_, M, f32> {
        let len = if self.shape.weighted { self.tokens * self.heads().local() } else { 0 };
        M::view_mut(&mut self.weights, 0..len)
    }

    /// What attention takes of it.
    pub fn selection(&self) -> Selection<'_, M> {
        let heads = self.heads();
        let routed = match heads.ranks {
            1 => self.selected(),
            _ => {
                let local = heads.local() - self.local_shared();
                M::view(&self.local_selected, 0..self.tokens * local)
            }
        };
        let weights = (self.shape.weighted)
            .then(|| M::view(&self.weights, 0..self.tokens * self.heads().local()));
        Selection { shared_heads: self.local_shared(), routed, weights }
    }
}

/// What every router needs of a device.
pub trait Routers: Memory {
    /// Completes the tables after `selected` has been written: how many tokens selected each routed head,
    /// and the columns of local heads.
    fn complete_routing(&self, routing: &mut Routing<Self>) -> Result<()>;

    /// `out[0] += scale * sum_i f_i P_i`, the balance loss of one layer and micro-batch: f_i is the share
    /// of tokens that selected routed head i, P_i its mean gate.
    fn balance_loss(
        &self,
        routing: &Routing<Self>,
        scale: f64,
        out: ViewMut<'_, Self, f64>,
    ) -> Result<()>;
}

/// What reaches a router in the backward pass.
pub struct RouterGradient<'a, M: Memory> {
    /// What the forward pass decided.
    pub routing: &'a Routing<M>,
    /// `<dO, O>` of every local head, `[N, H]`; without it the selection is taken as a constant.
    pub delta: Option<View<'a, M, f32>>,
    /// Gradient of the total loss with respect to this layer's `sum_i f_i P_i`.
    pub balance_weight: f32,
    /// Needed where ranks share the heads and there is a delta.
    pub ranks: Option<RouterRanks<'a, M>>,
}

/// What a router's backward pass needs where ranks share the heads.
pub struct RouterRanks<'a, M: Memory> {
    /// Scratch of an element for every token and routed head of the layer.
    pub table: ViewMut<'a, M, f64>,
    /// The sum over the ranks, called once.
    pub all_reduce: AllReduce<'a, M>,
}

impl<M: Memory> RouterGradient<'_, M> {
    /// The same with a shorter lifetime.
    pub fn reborrow(&mut self) -> RouterGradient<'_, M> {
        RouterGradient {
            routing: self.routing,
            delta: self.delta.map(|delta| M::reborrow(delta)),
            balance_weight: self.balance_weight,
            ranks: self.ranks.as_mut().map(|ranks| RouterRanks {
                table: M::reborrow_mut(&mut ranks.table),
                all_reduce: ranks.all_reduce,
            }),
        }
    }
}

/// Arguments of a router's forward pass.
pub struct RouterForward<'a, M: Memory, T: Element> {
    /// Shape of `qkv`, of local heads.
    pub shape: &'a QkvShape,
    /// Queries before RoPE, keys and values; `[B*T, (H + 2G) D]`.
    pub qkv: View<'a, M, T>,
    /// Overwritten.
    pub routing: &'a mut Routing<M>,
    /// The sum over the ranks that share the heads; needed where there are several. A router calls it
    /// equally often on each of them.
    pub all_reduce: Option<AllReduce<'a, M>>,
}

/// Arguments of a router's forward pass that also rotates queries and keys.
pub struct RouterRopeForward<'a, M: Memory, T: Element> {
    /// The rotation that follows.
    pub rope: RopeArgs<'a, M, T>,
    /// Overwritten.
    pub routing: &'a mut Routing<M>,
    /// As in [`RouterForward`].
    pub all_reduce: Option<AllReduce<'a, M>>,
}

/// Arguments of a router's backward pass.
pub struct RouterBackward<'a, M: Memory, T: Element> {
    /// Shape of `qkv`.
    pub shape: &'a QkvShape,
    /// Queries, keys and values, before RoPE or after it, as `d_qkv` is; `[B*T, (H + 2G) D]`.
    pub qkv: View<'a, M, T>,
    /// Added to; `[B*T, (H + 2G) D]`.
    pub d_qkv: ViewMut<'a, M, T>,
    /// What reaches the router.
    pub gradient: RouterGradient<'a, M>,
}

/// Arguments of a router's backward pass that also rotates the gradients back.
pub struct RouterRopeBackward<'a, M: Memory, T: Element> {
    /// What the forward pass left, rotated queries and keys; `[B*T, (H + 2G) D]`.
    pub qkv: View<'a, M, T>,
    /// The rotation of the gradients, which are those of rotated queries and keys before.
    pub rope: RopeArgs<'a, M, T>,
    /// What reaches the router.
    pub gradient: RouterGradient<'a, M>,
}

/// What ranks exchange for a routing of `heads`: nothing where all of them are local.
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
