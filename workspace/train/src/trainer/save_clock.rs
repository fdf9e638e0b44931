//! The first rank's clock: when a checkpoint is due by time, and when the run must stop.

use std::time::{Duration, Instant};

use moh_recipe::CheckpointOptions;

use crate::time_limit::TimeLimit;

/// The time after which a failed checkpoint is retried.
const RETRY: Duration = Duration::from_secs(60);

/// The decisions of the clock at the end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Due {
    pub checkpoint: bool,
    pub stop: bool,
}

/// Measures steps and checkpoints.
#[derive(Debug)]
pub(super) struct SaveClock {
    every: Option<Duration>,
    limit: Option<TimeLimit>,
    /// The start of the last checkpoint, or else of the run.
    last: Instant,
    /// The time at which a failed checkpoint is retried.
    retry: Option<Instant>,
    step_began: Instant,
    longest_step: Duration,
    longest_save: Option<Duration>,
}

impl SaveClock {
    pub(super) fn new(
        checkpoint: &CheckpointOptions,
        limit: Option<TimeLimit>,
        now: Instant,
    ) -> Self {
        let minutes = checkpoint.every_minutes;
        // Validated with the recipe: not negative, and not too long for a duration.
        let every = Duration::try_from_secs_f64(minutes * 60.0).ok().filter(|_| minutes > 0.0);
        let longest_step = Duration::ZERO;
        SaveClock {
            every,
            limit,
            last: now,
            retry: None,
            step_began: now,
            longest_step,
            longest_save: None,
        }
    }

    pub(super) fn step_begins(&mut self, now: Instant) {
        self.step_began = now;
    }

    pub(super) fn step_ends(&mut self, now: Instant) -> Due {
        self.longest_step = self.longest_step.max(now.saturating_duration_since(self.step_began));
        let since_last = now.saturating_duration_since(self.last);
        let by_interval = self.every.is_some_and(|every| since_last >= every);
        let again = self.retry.is_some_and(|retry| now >= retry);
        let is_up = |limit: TimeLimit| limit.is_up(now, self.longest_step, self.longest_save);
        Due { checkpoint: by_interval || again, stop: self.limit.is_some_and(is_up) }
    }

    pub(super) fn save_begins(&mut self, now: Instant) {
        (self.last, self.retry) = (now, None);
    }

    /// Records that a checkpoint is complete, and returns its duration.
    pub(super) fn save_completes(&mut self, now: Instant) -> Duration {
        let took = now.saturating_duration_since(self.last);
        self.longest_save = self.longest_save.max(Some(took));
        took
    }

    pub(super) fn save_fails(&mut self, now: Instant) {
        self.retry = Some(now + RETRY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn clock(every_minutes: f64, limit: Option<u32>) -> (SaveClock, Instant) {
        let start = Instant::now();
        let checkpoint = CheckpointOptions { every_minutes, ..CheckpointOptions::default() };
        let limit = limit.map(|seconds| TimeLimit::new(start, seconds * SECOND));
        (SaveClock::new(&checkpoint, limit, start), start)
    }

    fn is_due(clock: &mut SaveClock, now: Instant) -> bool {
        clock.step_ends(now).checkpoint
    }

    #[test]
    fn checkpoints_are_due_by_the_time_since_the_last_one() {
        let (mut clock, start) = clock(0.5, None);
        assert!(!is_due(&mut clock, start + 29 * SECOND));
        assert!(is_due(&mut clock, start + 30 * SECOND));
        // A checkpoint that was due by its step.
        clock.save_begins(start + 40 * SECOND);
        assert!(!is_due(&mut clock, start + 69 * SECOND));
        assert!(is_due(&mut clock, start + 70 * SECOND));
    }

    #[test]
    fn without_an_interval_no_checkpoint_is_due_by_time() {
        let (mut clock, start) = clock(0.0, None);
        assert_eq!(clock.step_ends(start + 100_000 * SECOND), Due::default());
    }

    #[test]
    fn a_failed_checkpoint_is_due_again_after_a_minute() {
        let (mut clock, start) = clock(0.0, None);
        clock.save_begins(start);
        clock.save_fails(start + 5 * SECOND);
        assert!(!is_due(&mut clock, start + 64 * SECOND));
        assert!(is_due(&mut clock, start + 65 * SECOND));
        clock.save_begins(start + 66 * SECOND);
        assert!(!is_due(&mut clock, start + 1000 * SECOND));
    }

    #[test]
    fn a_run_stops_when_a_step_and_a_checkpoint_no_longer_fit() {
        let (mut clock, start) = clock(0.0, Some(10_000));
        clock.step_begins(start);
        assert!(!clock.step_ends(start + 400 * SECOND).stop);
        clock.save_begins(start + 400 * SECOND);
        assert_eq!(clock.save_completes(start + 700 * SECOND), 300 * SECOND);
        // A short step and a short checkpoint leave the maxima unchanged.
        clock.step_begins(start + 700 * SECOND);
        clock.save_begins(start + 700 * SECOND);
        clock.save_completes(start + 701 * SECOND);
        clock.step_begins(start + 9299 * SECOND);
        assert!(!clock.step_ends(start + 9299 * SECOND).stop);
        assert!(clock.step_ends(start + 9300 * SECOND).stop);
    }
}
