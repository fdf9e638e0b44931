//! The heads that tokens compute, for any set of shared heads: the routers' rules on scores that do not depend on the
//! set.

use moh_model::{LayerHeads, ModelConfig, RouterKind, SharedChoice};

/// Up to this many numbers of shared heads, all are compared.
const FEW: usize = 8;

/// A router's ranking of a layer's heads, and the sets that can be shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ranking {
    pub router: RouterKind,
    pub heads: usize,
    /// Heads that read one key/value head.
    pub group: usize,
}

impl Ranking {
    pub fn new(router: RouterKind, config: &ModelConfig) -> Self {
        Ranking { router, heads: config.num_attention_heads, group: config.group_size() }
    }

    /// Returns the number of heads that are only shared or selected together.
    pub fn unit(&self) -> usize {
        if self.router == RouterKind::Group { self.group } else { 1 }
    }

    /// Returns the number of heads, or of groups of heads that are shared or selected together.
    pub fn units(&self) -> usize {
        self.heads / self.unit()
    }

    /// Returns the numbers of shared heads to compare, less than `active`. These are all numbers that the router can
    /// share if there are at most [`FEW`], otherwise about four of them, evenly spaced.
    pub fn shared_numbers(&self, active: usize) -> impl Iterator<Item = usize> + use<> {
        let (unit, number) = (self.unit(), active / self.unit());
        let step = if number <= FEW { 1 } else { number.div_ceil(4) };
        (0..number).step_by(step).map(move |number| number * unit)
    }

    /// Returns the numbers of shared heads to compare, including `given`. With each number, tokens select at least one
    /// head, if the router selects heads.
    pub fn numbers(&self, shared: SharedChoice, given: usize, active: usize) -> Vec<usize> {
        if !self.router.selects() {
            return vec![active];
        }
        if shared == SharedChoice::Calibrated {
            return vec![given];
        }
        let mut numbers: Vec<usize> = self.shared_numbers(active).chain([given]).collect();
        numbers.retain(|&shared| shared < active && self.fits(shared, active - shared));
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// Returns whether a layer can share `shared` heads if tokens select `top_k` other heads.
    pub fn fits(&self, shared: usize, top_k: usize) -> bool {
        let divides = |count: usize| count.is_multiple_of(self.unit());
        let needs_two = self.router == RouterKind::QueryNorm;
        divides(shared) && divides(top_k) && !(needs_two && self.heads - shared == 1)
    }
}

/// The tokens' rankings of a layer's heads, for any shared set.
#[derive(Debug, Clone)]
pub(crate) struct Scores {
    /// The units of each token by falling score, the first of equal units first, `[tokens, units]`.
    order: Vec<u16>,
    ranking: Ranking,
}

impl Scores {
    pub fn new(ranking: Ranking) -> Self {
        Scores { order: Vec::new(), ranking }
    }

    /// Adds tokens with these queries before RoPE, `[tokens, heads, head_dim]`.
    pub fn add(&mut self, queries: &[f32], head_dim: usize) {
        let square = |queries: &[f32]| queries.iter().map(|&q| f64::from(q) * f64::from(q)).sum();
        let of_units = queries.chunks_exact(head_dim * self.ranking.unit()).map(square);
        let scores: Vec<f64> = of_units.collect();
        scores.chunks_exact(self.ranking.units()).for_each(|token| self.push(token));
    }

    /// Adds tokens with these logits of all heads, `[tokens, heads]`.
    pub fn add_logits(&mut self, logits: &[f32]) {
        for logits in logits.chunks_exact(self.ranking.heads) {
            let scores: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
            self.push(&scores);
        }
    }

    /// Adds a token with these scores of its units.
    fn push(&mut self, scores: &[f64]) {
        let mut order: Vec<u16> = (0..scores.len() as u16).collect();
        order.sort_by(|&a, &b| scores[usize::from(b)].total_cmp(&scores[usize::from(a)]));
        self.order.extend(order);
    }

    /// Returns the units of each token by falling score, in order.
    pub fn tokens(&self) -> impl Iterator<Item = &[u16]> + Clone {
        self.order.chunks_exact(self.ranking.units())
    }

    /// Returns the selector of tokens' heads with these shared heads.
    pub fn selector(&self, heads: LayerHeads) -> Selector {
        let Ranking { heads: all, .. } = self.ranking;
        let unit = self.ranking.unit();
        let shared = (0..all).map(|head| heads.shared.contains(head)).collect();
        Selector { shared, unit, selected: heads.top_k / unit }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Selector {
    shared: Vec<bool>,
    unit: usize,
    /// Units that a token selects.
    selected: usize,
}

impl Selector {
    /// Sets each head's entry of `active` to whether a token computes the head, if the token ranks its units in this
    /// order.
    pub fn select(&self, order: &[u16], active: &mut [bool]) {
        active.copy_from_slice(&self.shared);
        let heads = order.iter().map(|&unit| usize::from(unit) * self.unit);
        for head in heads.filter(|&head| !self.shared[head]).take(self.selected) {
            active[head..head + self.unit].fill(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use moh_kernels::Cpu;
    use moh_kernels::router::SharedHeads;
    use moh_model::{BlockPass, Error, MohConfig, SharedHeadSets, initial};

    use super::*;

    #[test]
    fn numbers_of_shared_heads_are_those_that_the_router_can_share() {
        // The heads of LLaMA-3-8B.
        let numbers = |router, active| {
            let ranking = Ranking { router, heads: 32, group: 4 };
            ranking.shared_numbers(active).collect::<Vec<usize>>()
        };
        assert_eq!(numbers(RouterKind::QueryNorm, 24), [0, 6, 12, 18]);
        assert_eq!(numbers(RouterKind::QueryNorm, 5), [0, 1, 2, 3, 4]);
        assert_eq!(numbers(RouterKind::Group, 24), [0, 4, 8, 12, 16, 20]);
        assert_eq!(numbers(RouterKind::Group, 20), [0, 4, 8, 12, 16]);
    }

    #[test]
    fn selections_are_those_of_the_routers() {
        let fields = serde_json::json!({
            "model_type": "llama", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 32,
            "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 6, "max_position_embeddings": 64,
        });
        let file = moh_hf::ConfigFile::from_value(fields, Path::new("config.json")).unwrap();
        let mut x = vec![0f32; 3 * 16 * 24];
        initial::initialize(5, 1.0, "x", &[48, 24], &mut x);
        for (router, shared, top_k) in [
            (RouterKind::QueryNorm, vec![5, 1, 2], 2),
            (RouterKind::QueryNorm, vec![], 5),
            (RouterKind::Group, vec![2, 3], 4),
            (RouterKind::Group, vec![6, 7, 0, 1], 2),
            (RouterKind::Static, vec![7, 4], 0),
        ] {
            let moh = MohConfig {
                router,
                shared_heads: SharedHeadSets::from_ids(std::slice::from_ref(&shared)).unwrap(),
                routed_top_k: top_k.into(),
            };
            let config = ModelConfig { moh: Some(moh.clone()), ..file.config.clone() };
            let mut block = BlockPass::new(Cpu, &config, 3, 16).unwrap();
            block
                .load::<Error>(0, |name, values| {
                    let shape = [values.len() / 24, 24];
                    initial::initialize(9, 0.3, name, &shape[..], values);
                    Ok(())
                })
                .unwrap();
            let ranking = Ranking::new(router, &config);
            assert!(ranking.fits(shared.len(), top_k));
            let mut scores = Scores::new(ranking);
            scores.add(&block.project(&x).unwrap(), 6);
            let expected = block.select(moh).unwrap();
            let heads = LayerHeads { shared: SharedHeads::from_heads(shared).unwrap(), top_k };
            let (selector, mut active) = (scores.selector(heads), vec![false; 8]);
            for (of_token, expected) in scores.tokens().zip(expected.chunks_exact(8)) {
                selector.select(of_token, &mut active);
                let found: Vec<u8> = active.iter().map(|&on| u8::from(on)).collect();
                assert_eq!(found, expected, "{router:?}");
            }
        }
    }
}
