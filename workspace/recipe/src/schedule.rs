//! The learning rate of each step: linear warm-up, then a half cosine.
//!
//! With steps s = 1..=n and w warm-up steps, lr(s) = max s / w for s <= w, and after that
//! min + (max - min) (1 + cos(pi (s - w) / (n - w))) / 2, so the last step's rate is `min`. The
//! rate depends on the recipe and the stage's own step only; no optimiser stores it.

use std::f64::consts::PI;

use crate::{Decay, LearningRateOptions};

/// The learning-rate schedule of one stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    rates: LearningRateOptions,
    steps: u64,
}

impl Schedule {
    /// Creates the schedule of a stage of `steps` steps.
    pub fn new(rates: LearningRateOptions, steps: u64) -> Self {
        Schedule { rates, steps }
    }

    /// The learning rate of `step`, counted from 1 within the stage; later steps have the last
    /// step's rate.
    pub fn learning_rate(&self, step: u64) -> f64 {
        let LearningRateOptions { max, min, warmup_steps, decay } = self.rates;
        let step = step.min(self.steps);
        if step <= warmup_steps {
            // A stage without steps and warm-up has no last step; its rate is max.
            return if warmup_steps == 0 { max } else { max * step as f64 / warmup_steps as f64 };
        }
        match decay {
            Decay::Cosine => {
                let done = (step - warmup_steps) as f64;
                let all = (self.steps - warmup_steps) as f64;
                min + (max - min) * (1.0 + (PI * done / all).cos()) / 2.0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn schedule(max: f64, min: f64, warmup_steps: u64, steps: u64) -> Schedule {
        let rates = LearningRateOptions { max, min, warmup_steps, decay: Decay::Cosine };
        Schedule::new(rates, steps)
    }

    #[test]
    fn warm_up_rises_linearly_to_the_maximum() {
        let schedule = schedule(6e-5, 6e-6, 50, 17_882);
        assert_eq!(schedule.learning_rate(1), 6e-5 * 1.0 / 50.0);
        assert_eq!(schedule.learning_rate(25), 3e-5);
        assert_eq!(schedule.learning_rate(50), 6e-5);
        assert!(schedule.learning_rate(51) < 6e-5);
    }

    #[test]
    fn the_cosine_passes_its_exact_points() {
        let schedule = schedule(1.0, 0.5, 10, 14);
        // [0.5 + 0.5 * (1 + math.cos(math.pi * i / 4)) / 2 for i in (1, 2, 3, 4)]
        let expected = [0.926_776_695_296_636_9, 0.75, 0.573_223_304_703_363_1, 0.5];
        for (step, expected) in (11..=14).zip(expected) {
            assert_eq!(schedule.learning_rate(step), expected);
        }
    }

    #[test]
    fn the_last_step_has_exactly_the_minimum() {
        for steps in [2, 3, 51, 5_961, 17_882, 1_000_003] {
            assert_eq!(schedule(2e-5, 1e-6, 1, steps).learning_rate(steps), 1e-6);
            assert_eq!(schedule(2e-5, 0.0, 0, steps).learning_rate(steps), 0.0);
        }
    }

    #[test]
    fn a_single_step_is_its_own_last_or_its_own_warm_up() {
        assert_eq!(schedule(1e-3, 1e-4, 0, 1).learning_rate(1), 1e-4);
        assert_eq!(schedule(1e-3, 1e-4, 1, 1).learning_rate(1), 1e-3);
    }

    #[test]
    fn without_warm_up_the_first_step_is_below_the_maximum() {
        let schedule = schedule(1.0, 0.0, 0, 2);
        assert_eq!(schedule.learning_rate(1), 0.5);
        assert_eq!(schedule.learning_rate(2), 0.0);
        assert_eq!(schedule.learning_rate(3), 0.0);
    }

    proptest! {
        #[test]
        fn rates_stay_within_bounds_and_never_rise_after_the_warm_up(
            max in 1e-8..1.0f64, share in 0.0..=1.0f64, warmup in 0..100u64, rest in 1..300u64,
        ) {
            let schedule = schedule(max, max * share, warmup, warmup + rest);
            let mut last = max;
            for step in warmup + 1..=warmup + rest {
                let rate = schedule.learning_rate(step);
                prop_assert!(rate <= last && rate >= max * share);
                last = rate;
            }
        }
    }
}
