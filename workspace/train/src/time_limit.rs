//! The time after which a run must have ended, and the reserve for its last checkpoint.

use std::time::{Duration, Instant};

/// The reserve for the end of a run is a limit's length divided by this number.
const SHARE: u32 = 20;
/// The largest reserve once a checkpoint has been measured.
const MEASURED: Duration = Duration::from_secs(60);
/// The largest reserve before the first checkpoint is measured.
const UNMEASURED: Duration = Duration::from_secs(600);

/// A time limit of a run, which stops with a checkpoint before the limit ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimeLimit {
    start: Instant,
    length: Duration,
}

impl TimeLimit {
    /// Creates a limit of `length` from `start` on.
    pub fn new(start: Instant, length: Duration) -> Self {
        TimeLimit { start, length }
    }

    /// Returns the limit that ends first.
    pub fn earlier(self, other: Self) -> Self {
        let from = self.start.max(other.start);
        if other.left(from) < self.left(from) { other } else { self }
    }

    fn left(&self, now: Instant) -> Duration {
        self.length.saturating_sub(now.saturating_duration_since(self.start))
    }

    /// Returns whether the run must stop. The time left must cover another step with a checkpoint in flight, and one
    /// more checkpoint, each as long as the longest so far. It must also exceed the reserve: 5% of the limit, at most
    /// one minute (ten before the first checkpoint).
    pub fn is_up(
        &self,
        now: Instant,
        longest_step: Duration,
        longest_save: Option<Duration>,
    ) -> bool {
        let reserve = longest_save.map_or(UNMEASURED, |_| MEASURED).min(self.length / SHARE);
        let save = longest_save.unwrap_or_default();
        let needed = longest_step.max(save).saturating_add(save);
        self.left(now) <= needed.max(reserve)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn the_longest_step_and_checkpoint_are_left() {
        let start = Instant::now();
        let limit = TimeLimit::new(start, 60 * MINUTE);
        let is_up =
            |minute: u32| limit.is_up(start + minute * MINUTE, 3 * MINUTE, Some(2 * MINUTE));
        assert!(!is_up(54) && is_up(55) && is_up(100));
        // A checkpoint in flight takes longer than the step during it.
        let is_up = |minute: u32| limit.is_up(start + minute * MINUTE, MINUTE, Some(3 * MINUTE));
        assert!(!is_up(53) && is_up(54));
    }

    #[test]
    fn short_steps_and_checkpoints_leave_a_minute_or_a_twentieth() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let is_up = |length: Duration, left: Duration, save: Option<Duration>| {
            TimeLimit::new(start, length).is_up(start + length - left, second, save)
        };
        for (length, save, least) in [
            (600 * MINUTE, Some(second), MINUTE),
            (600 * MINUTE, None, 10 * MINUTE),
            (60 * MINUTE, None, 3 * MINUTE),
            (10 * MINUTE, Some(second), MINUTE / 2),
        ] {
            assert!(is_up(length, least, save), "{length:?}");
            assert!(!is_up(length, least + second, save), "{length:?}");
        }
    }

    #[test]
    fn the_earlier_end_counts() {
        let start = Instant::now();
        let early = TimeLimit::new(start, 5 * MINUTE);
        let late = TimeLimit::new(start + 3 * MINUTE, 3 * MINUTE);
        assert_eq!((early.earlier(late), late.earlier(early)), (early, early));
    }
}
