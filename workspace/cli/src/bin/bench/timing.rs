//! Times of repeated runs: the median says what to expect, the best what is possible.

use std::time::Instant;

use serde_json::{Value, json};

/// Seconds of repeated runs of one thing.
#[derive(Debug, Clone, Default)]
pub struct Times(Vec<f64>);

impl Times {
    /// Runs it once more and keeps the time.
    pub fn time<R>(&mut self, run: impl FnOnce() -> R) -> R {
        let started = Instant::now();
        let result = run();
        self.0.push(started.elapsed().as_secs_f64());
        result
    }

    /// Runs so far.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// All of them together.
    pub fn total(&self) -> f64 {
        self.0.iter().sum()
    }

    /// The middle one; 0 without a run.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let upper = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
        let lower = sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(0.0);
        (lower + upper) / 2.0
    }

    /// The shortest one; 0 without a run.
    pub fn best(&self) -> f64 {
        self.0.iter().copied().reduce(f64::min).unwrap_or(0.0)
    }

    /// Both, in seconds.
    pub fn json(&self) -> Value {
        json!({"median": self.median(), "best": self.best()})
    }

    /// `work` a run, in units a second.
    pub fn rates(&self, work: f64) -> Rates {
        Rates { median: work / self.median().max(1e-9), best: work / self.best().max(1e-9) }
    }
}

/// Work a second.
#[derive(Debug, Clone, Copy)]
pub struct Rates {
    /// That of the median run.
    pub median: f64,
    /// That of the best run.
    pub best: f64,
}

impl Rates {
    /// Both.
    pub fn json(self) -> Value {
        json!({"median": self.median, "best": self.best})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_lies_between_the_middle_two() {
        assert_eq!(Times(vec![4.0, 1.0, 3.0]).median(), 3.0);
        assert_eq!(Times(vec![4.0, 1.0, 2.0, 3.0]).median(), 2.5);
        assert_eq!(Times(vec![4.0, 1.0]).best(), 1.0);
        assert_eq!(Times::default().median(), 0.0);
    }
}
