//! The tokens that a head serves most: the largest share of their occurrences computes the head.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The fewest occurrences of a token that counts: the shares of rarer tokens say little.
const FEWEST: u64 = 16;
/// The most tokens of a head in a report.
const MOST: usize = 8;

/// A token that a head serves.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServedToken {
    /// Its id.
    pub id: u32,
    /// Its text, if a tokenizer is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The number of its occurrences.
    pub occurrences: u64,
    /// The share of its occurrences that compute the head.
    pub share: f64,
}

/// Occurrences of tokens, and occurrences that compute each head.
#[derive(Debug, Clone)]
pub(super) struct ServedTokens {
    heads: usize,
    /// By id: the number of occurrences, and of occurrences that compute each head.
    tokens: BTreeMap<u32, (u64, Vec<u64>)>,
}

impl ServedToken {
    /// Returns its text, or its id if no tokenizer was known.
    pub fn shown(&self) -> String {
        self.text.clone().unwrap_or_else(|| self.id.to_string())
    }
}

impl ServedTokens {
    pub fn new(heads: usize) -> Self {
        ServedTokens { heads, tokens: BTreeMap::new() }
    }

    /// Adds a token that computes the heads with 1 in `active`.
    pub fn add(&mut self, id: u32, active: &[u8]) {
        let (occurrences, computed) =
            self.tokens.entry(id).or_insert_with(|| (0, vec![0; self.heads]));
        *occurrences += 1;
        computed.iter_mut().zip(active).for_each(|(sum, &active)| *sum += u64::from(active));
    }

    /// Returns the tokens that compute a head most often, by falling share. Of equal shares, the more frequent token is
    /// first.
    pub fn most(&self, head: usize) -> Vec<ServedToken> {
        let frequent = self.tokens.iter().filter(|(_, (occurrences, _))| *occurrences >= FEWEST);
        let token = |(&id, (occurrences, computed)): (&u32, &(u64, Vec<u64>))| ServedToken {
            id,
            text: None,
            occurrences: *occurrences,
            share: computed[head] as f64 / *occurrences as f64,
        };
        let mut all: Vec<ServedToken> =
            frequent.map(token).filter(|token| token.share > 0.0).collect();
        // The sort is stable: of equal tokens, the lower id is first.
        all.sort_by(|a, b| b.share.total_cmp(&a.share).then(b.occurrences.cmp(&a.occurrences)));
        all.truncate(MOST);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_ranked_by_share_then_by_frequency() {
        let mut served = ServedTokens::new(2);
        for (id, occurrences, computed) in
            [(5, 20, 10), (6, 32, 32), (7, 16, 16), (8, 15, 15), (9, 40, 0)]
        {
            for occurrence in 0..occurrences {
                served.add(id, &[u8::from(occurrence < computed), 1]);
            }
        }
        let ids = |head| served.most(head).iter().map(|token| token.id).collect::<Vec<_>>();
        // The token 8 is rare, and the token 9 never computes the first head.
        assert_eq!(ids(0), [6, 7, 5]);
        assert_eq!(ids(1), [9, 6, 5, 7]);
        assert_eq!(
            served.most(0)[2],
            ServedToken { id: 5, text: None, occurrences: 20, share: 0.5 }
        );
    }
}
