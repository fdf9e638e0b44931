//! Finds token ids outside the vocabulary before training starts. All ranks read the file together, in
//! short rounds, between which a run can be stopped.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use moh_data::TokenFile;
use moh_kernels::Backend;
use moh_step::Ranks;

use crate::Error;

/// Tokens that a rank reads in a round: a fraction of a second at a disk's speed, seconds at a slow network's.
const ROUND_TOKENS: u64 = 1 << 24;

/// The number of ids up to the largest in `file`, whose own limit is the vocabulary; `None` if `stop` was set on a
/// rank. `progress` hears the tokens that were read. Fails with the first id outside the vocabulary that the first rank
/// with one has found, and if another rank has failed.
pub(super) fn scan<B: Backend>(
    ranks: &mut Ranks<B>,
    file: &TokenFile,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(u64),
) -> Result<Option<u64>, Error> {
    let (rank, size) = (ranks.group().rank() as u64, ranks.group().size() as u64);
    let tokens = file.num_tokens();
    let (mut done, mut largest) = (0, 0.0);
    while done < tokens {
        progress(done);
        let own = share(done..tokens, rank);
        let found = ranks.agree(file.largest_id(own).map_err(Error::from))?;
        let stopping = f64::from(stop.load(Ordering::Relaxed));
        let [found, stopping] = ranks.largest([f64::from(found), stopping])?;
        if stopping > 0.0 {
            return Ok(None);
        }
        largest = f64::max(largest, found);
        done = tokens.min(done.saturating_add(ROUND_TOKENS.saturating_mul(size)));
    }
    // An id is a u32, which f64 represents exactly.
    Ok(Some(largest as u64 + 1))
}

/// What a rank reads of the rest of a file in this round.
fn share(rest: Range<u64>, rank: u64) -> Range<u64> {
    let start = rest.start.saturating_add(ROUND_TOKENS.saturating_mul(rank)).min(rest.end);
    start..start.saturating_add(ROUND_TOKENS).min(rest.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_shares_of_all_rounds_are_the_file() {
        let tokens = 5 * ROUND_TOKENS + 3;
        for size in [1, 2, 3, 8] {
            let (mut next, mut done) = (0, 0);
            while done < tokens {
                for rank in 0..size {
                    let share = share(done..tokens, rank);
                    assert!(share.is_empty() || share.start == next);
                    next = next.max(share.end);
                }
                done += ROUND_TOKENS * size;
            }
            assert_eq!(next, tokens);
        }
    }
}
