//! Which heads tokens compute, for any set of shared heads: the query-norm router's rule on scores that
//! do not depend on the set. A router that selects no head has the same rule for none.

use moh_model::LayerHeads;

/// The scores of the heads of tokens, by which a router ranks them; `[tokens, heads]`.
#[derive(Debug, Clone)]
pub(crate) struct Scores {
    scores: Vec<f64>,
    heads: usize,
}

impl Scores {
    /// No tokens yet.
    pub fn new(heads: usize) -> Self {
        Scores { scores: Vec::new(), heads }
    }

    /// Adds tokens with these queries before RoPE, `[tokens, heads, head_dim]`.
    pub fn add(&mut self, queries: &[f32], head_dim: usize) {
        let squares =
            |query: &[f32]| query.iter().map(|&q| f64::from(q) * f64::from(q)).sum::<f64>();
        self.scores.extend(queries.chunks_exact(head_dim).map(squares));
    }

    /// The scores of each token, in order.
    pub fn tokens(&self) -> impl Iterator<Item = &[f64]> + Clone {
        self.scores.chunks_exact(self.heads)
    }

    /// Sets `active`, one entry for each head, to whether a token with these scores computes it.
    pub fn select(&self, scores: &[f64], heads: LayerHeads, active: &mut [bool]) {
        for (head, active) in active.iter_mut().enumerate() {
            *active = heads.shared.contains(head);
        }
        for _ in 0..heads.top_k {
            // The first of equal scores.
            let rest = (0..self.heads).filter(|&head| !active[head]);
            let best = rest.reduce(|a, b| if scores[b] > scores[a] { b } else { a });
            let Some(best) = best else { return };
            active[best] = true;
        }
    }
}
