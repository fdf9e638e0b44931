//! Times of repeated runs. The median is the typical time, the best the lowest possible time.

use std::time::Instant;

use serde_json::{Value, json};

/// Seconds of repeated runs.
#[derive(Debug, Clone, Default)]
pub struct Times {
    runs: Vec<f64>,
    /// Seconds of all timings together.
    spent: f64,
}

impl Times {
    /// Calls `run`, which makes `count` repetitions, and records the time of a single repetition.
    pub fn time<R>(&mut self, count: usize, run: impl FnOnce() -> R) -> R {
        let started = Instant::now();
        let result = run();
        let seconds = started.elapsed().as_secs_f64();
        self.spent += seconds;
        self.runs.push(seconds / count as f64);
        result
    }

    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Returns the seconds of all timings together.
    pub fn total(&self) -> f64 {
        self.spent
    }

    /// Returns the median time; 0 without a run.
    pub fn median(&self) -> f64 {
        let mut sorted = self.runs.clone();
        sorted.sort_by(f64::total_cmp);
        let upper = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
        let lower = sorted.get(sorted.len().saturating_sub(1) / 2).copied().unwrap_or(0.0);
        (lower + upper) / 2.0
    }

    /// Returns the shortest time; 0 without a run.
    pub fn best(&self) -> f64 {
        self.runs.iter().copied().reduce(f64::min).unwrap_or(0.0)
    }

    /// Returns the median and the best, in seconds.
    pub fn json(&self) -> Value {
        json!({"median": self.median(), "best": self.best()})
    }

    /// Returns the rates of runs with this much work, in units per second.
    pub fn rates(&self, work: f64) -> Rates {
        Rates { median: work / self.median().max(1e-9), best: work / self.best().max(1e-9) }
    }
}

/// Rates in units per second.
#[derive(Debug, Clone, Copy)]
pub struct Rates {
    pub median: f64,
    pub best: f64,
}

impl Rates {
    pub fn json(self) -> Value {
        json!({"median": self.median, "best": self.best})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(runs: &[f64]) -> Times {
        Times { runs: runs.to_vec(), spent: runs.iter().sum() }
    }

    #[test]
    fn the_median_of_an_even_count_lies_between_the_middle_two() {
        assert_eq!(times(&[4.0, 1.0, 3.0]).median(), 3.0);
        assert_eq!(times(&[4.0, 1.0, 2.0, 3.0]).median(), 2.5);
        assert_eq!(times(&[4.0, 1.0]).best(), 1.0);
        assert_eq!(Times::default().median(), 0.0);
    }

    #[test]
    fn a_timing_of_several_runs_is_that_of_one() {
        let mut times = Times::default();
        times.time(4, || std::thread::sleep(std::time::Duration::from_millis(20)));
        assert_eq!(times.best(), times.total() / 4.0);
    }
}
