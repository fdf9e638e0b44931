//! Checks between the batches of an evaluation whether a rank was asked to stop. All ranks call [`StopChecks::go_on`]
//! equally often. They exchange at the same calls, because the number of calls until the next exchange follows from
//! values that all ranks have.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moh_kernels::Backend;
use moh_step::Ranks;

use crate::Result;

/// The time between two exchanges. An exchange takes well below a thousandth of this time.
const EVERY: Duration = Duration::from_millis(500);
/// Rounds between two exchanges for each further stage of a pipeline. An exchange empties the pipeline, which
/// takes a round for each further stage: at most a quarter of the time of these rounds.
const ROUNDS_PER_STAGE: u64 = 4;

pub(super) struct StopChecks {
    fewest: u64,
    /// Rounds between the last exchange and the next, and the remaining rounds among them.
    rounds: u64,
    left: u64,
    last: Instant,
}

impl StopChecks {
    /// Returns the checks of ranks that form pipelines of `stages` stages.
    pub(super) fn new(stages: usize) -> Self {
        let fewest = (stages.saturating_sub(1) as u64 * ROUNDS_PER_STAGE).max(1);
        StopChecks { fewest, rounds: 0, left: 0, last: Instant::now() }
    }

    /// Returns whether the ranks continue with the next round of batches, the same on all ranks. A single rank is asked
    /// before each round.
    pub(super) fn go_on<B: Backend>(
        &mut self,
        ranks: &mut Ranks<B>,
        stop: &AtomicBool,
    ) -> Result<ControlFlow<()>> {
        if ranks.group().size() > 1 && self.left > 0 {
            self.left -= 1;
            return Ok(ControlFlow::Continue(()));
        }
        let seconds = self.last.elapsed().as_secs_f64();
        let asked = f64::from(stop.load(Ordering::Relaxed));
        let [asked, seconds] = ranks.largest([asked, seconds])?;
        self.rounds = next(self.rounds, self.fewest, seconds);
        (self.left, self.last) = (self.rounds - 1, Instant::now());
        Ok(if asked > 0.0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }
}

/// Returns the rounds until the next exchange, after `rounds` rounds that took `seconds`. The number at most doubles,
/// because the first rounds may be unusually short.
fn next(rounds: u64, fewest: u64, seconds: f64) -> u64 {
    let fitting = rounds as f64 * EVERY.as_secs_f64() / seconds.max(1e-9);
    // A number of rounds needs no precision, and a float beyond u64 becomes its maximum.
    (fitting as u64).min(rounds.saturating_mul(2)).max(fewest)
}

#[cfg(test)]
mod tests {

    use super::*;
    use moh_testkit::ranks::ranks_on_threads;

    #[test]
    fn exchanges_are_half_a_second_apart_and_a_pipeline_is_seldom_emptied() {
        assert_eq!(next(0, 1, 0.0), 1);
        // Short rounds: twice as many each time, until they take half a second.
        assert_eq!(
            [1, 2, 4, 64].map(|rounds| next(rounds, 1, rounds as f64 * 1e-3)),
            [2, 4, 8, 128]
        );
        assert_eq!(next(400, 1, 0.4), 500);
        assert_eq!(next(500, 1, 5.0), 50);
        assert_eq!(next(1, 1, 20.0), 1);
        // Eight stages of a second each: after 28 rounds, which the exchange lengthens by 7.
        assert_eq!(StopChecks::new(8).fewest, 28);
        assert_eq!(next(28, 28, 28.0), 28);
        assert_eq!(StopChecks::new(1).fewest, 1);
    }

    #[test]
    fn all_ranks_stop_in_the_same_round() {
        let found = ranks_on_threads(3, |ranks| {
            let stop = AtomicBool::new(false);
            let mut checks = StopChecks::new(2);
            let mut rounds = 0;
            while checks.go_on(ranks, &stop).unwrap().is_continue() {
                rounds += 1;
                // Only the middle rank is asked to stop, at a time of its own.
                stop.store(ranks.group().rank() == 1 && rounds == 3, Ordering::Relaxed);
                if ranks.group().rank() == 1 && rounds >= 3 {
                    stop.store(true, Ordering::Relaxed);
                }
            }
            rounds
        });
        assert!(found[0] >= 3 && found.iter().all(|rounds| *rounds == found[0]), "{found:?}");
    }

    #[test]
    fn one_rank_stops_before_the_next_round() {
        let found = ranks_on_threads(1, |ranks| {
            let stop = AtomicBool::new(false);
            let mut checks = StopChecks::new(1);
            assert!((0..9).all(|_| checks.go_on(ranks, &stop).unwrap().is_continue()));
            stop.store(true, Ordering::Relaxed);
            checks.go_on(ranks, &stop).unwrap().is_break()
        });
        assert_eq!(found, [true]);
    }
}
