//! Routers by logits on a GPU (logits.cu).

use bytemuck::Zeroable;

use super::{LogitRouter, Logits, LogitsBackward, LogitsForward, begin, check_backward, exchanged};
use crate::cuda::parameters::logits::Parameters;
use crate::cuda::parameters::router;
use crate::cuda::{Cuda, address_or_null, blocks, name};
use crate::router::{RouterGradient, RouterRanks, Routers, Routing, exchange};
use crate::{Element, Memory, Result, check_len};

/// Tokens of a block, one for each warp, as in logits.cu.
const TOKENS: usize = 8;

impl Parameters {
    fn new(router: LogitRouter, routing: &Routing<Cuda>) -> Self {
        let heads = routing.heads().count;
        Parameters {
            saved: routing.saved.address(),
            weights: if router.weighs() { routing.weights.address() } else { 0 },
            heads: heads as u32,
            width: router.logits(heads) as u32,
            top_k: router.top_k as u32,
            shared_heads: router.shared.len() as u32,
            exchanged: exchanged(router, routing) as u32,
            routing: router::Routing::new(routing),
            shared: routing.shared().column_bits(),
            ..Self::zeroed()
        }
    }
}

impl Logits for Cuda {
    fn logits_forward<T: Element>(&self, args: LogitsForward<'_, Self, T>) -> Result<()> {
        const OPERATOR: &str = "logits_forward";
        let LogitsForward { router, logits, tokens, routing, all_reduce } = args;
        begin(OPERATOR, router, tokens, logits.len, routing)?;
        let all_reduce = exchange(OPERATOR, routing.heads(), all_reduce)?;
        if routing.columns() == 0 || tokens == 0 {
            return Ok(());
        }
        if router.weighs() {
            // From now on attention applies the weights.
            let _ = routing.weights_mut();
        }
        let parameters = Parameters { logits: logits.address, ..Parameters::new(router, routing) };
        let saved = tokens * parameters.width as usize;
        self.launch(&name::<T>("logits_save"), [blocks(saved), 1], 0, &parameters)?;
        if let Some(all_reduce) = all_reduce {
            all_reduce(routing.saved.view_mut(0..saved))?;
        }
        self.launch("logits_forward", [tokens.div_ceil(TOKENS), 1], 0, &parameters)?;
        self.complete_routing(routing)
    }

    fn logits_backward<T: Element>(&self, args: LogitsBackward<'_, Self, T>) -> Result<()> {
        const OPERATOR: &str = "logits_backward";
        let LogitsBackward { router, tokens, d_logits, gradient } = args;
        check_backward(OPERATOR, router, &tokens, d_logits.len, &gradient)?;
        let RouterGradient { routing, delta, balance_weight, ranks } = gradient;
        let ranks = delta.map_or(Ok(None), |_| exchange(OPERATOR, routing.heads(), ranks))?;
        if routing.columns() == 0 {
            return self.zero(d_logits);
        }
        let mut parameters = Parameters {
            logits: d_logits.address,
            delta: address_or_null(delta),
            first: tokens.start as u64,
            count: tokens.len() as u64,
            balance_weight,
            ..Parameters::new(router, routing)
        };
        if let Some(RouterRanks { mut table, all_reduce }) = ranks {
            let elements = routing.tokens() * exchanged(router, routing);
            check_len(OPERATOR, "table", table.len, elements)?;
            parameters.deltas = table.address;
            self.zero(table.part(0..table.len))?;
            self.launch("logits_spread", [routing.tokens(), 1], 0, &parameters)?;
            all_reduce(table)?;
        }
        let count = [tokens.len().div_ceil(TOKENS), 1];
        self.launch(&name::<T>("logits_backward"), count, 0, &parameters)
    }
}
