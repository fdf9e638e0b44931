//! The learning rate of each step: linear warm-up, then a decay.
//!
//! With steps s = 1..=n and w warm-up steps, lr(s) = max s / w for s <= w. In the last d steps, by default all steps
//! after the warm-up, the rate falls: lr(s) = min + (max - min) g((s - (n - d)) / d), where g(f) is (1 + cos(pi f)) /
//! 2, 1 - f or 1 - sqrt(f). So the last step's rate is `min`. Between the warm-up and these steps the rate is `max`.
//! The inverse square root, max sqrt(max(w, 1) / s) and at least `min` (Megatron-LM's), lasts as long as the stage. The
//! rate depends only on the recipe and the stage's own step: no optimiser stores it.

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

    /// Returns the learning rate of `step`, counted from 1 within the stage. Later steps have the last step's rate.
    pub fn learning_rate(&self, step: u64) -> f64 {
        let LearningRateOptions { max, min, warmup_steps, decay, decay_steps } = self.rates;
        let step = step.min(self.steps);
        if step <= warmup_steps {
            // A stage without steps and warm-up has no last step, so its rate is max.
            return if warmup_steps == 0 { max } else { max * step as f64 / warmup_steps as f64 };
        }
        let decay_steps = decay_steps.unwrap_or(self.steps - warmup_steps);
        let done = step.saturating_sub(self.steps.saturating_sub(decay_steps)) as f64;
        let all = decay_steps as f64;
        let above_min = |part: f64| min + (max - min) * part;
        match decay {
            Decay::Constant => max,
            Decay::InverseSquareRoot => {
                min.max(max * (warmup_steps.max(1) as f64 / step as f64).sqrt())
            }
            _ if done == 0.0 => max,
            Decay::Cosine => above_min((1.0 + (PI * done / all).cos()) / 2.0),
            Decay::Linear => above_min(1.0 - done / all),
            Decay::Sqrt => above_min(1.0 - (done / all).sqrt()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn schedule(max: f64, min: f64, warmup_steps: u64, steps: u64) -> Schedule {
        let (decay, decay_steps) = (Decay::Cosine, None);
        Schedule::new(LearningRateOptions { max, min, warmup_steps, decay, decay_steps }, steps)
    }

    fn rates(decay: Decay, warmup_steps: u64, decay_steps: Option<u64>, steps: u64) -> Vec<f64> {
        let rates = LearningRateOptions { max: 1.0, min: 0.5, warmup_steps, decay, decay_steps };
        let schedule = Schedule::new(rates, steps);
        (1..=steps).map(|step| schedule.learning_rate(step)).collect()
    }

    #[test]
    fn lines_and_roots_pass_their_exact_points() {
        assert_eq!(rates(Decay::Linear, 2, None, 6), [0.5, 1.0, 0.875, 0.75, 0.625, 0.5]);
        // 1 - 0.5 * sqrt(i / 4)
        let expected = [1.0, 0.75, 1.0 - 0.5 * 0.5f64.sqrt(), 1.0 - 0.5 * 0.75f64.sqrt(), 0.5];
        assert_eq!(rates(Decay::Sqrt, 1, None, 5), expected);
        // Down to min: 2 / sqrt(1..) after four steps of warm-up.
        let rates = rates(Decay::InverseSquareRoot, 4, None, 100);
        assert_eq!((rates[1], rates[3], rates[4]), (0.5, 1.0, 0.8f64.sqrt()));
        assert_eq!((rates[8], rates[15], rates[99]), (2.0 / 3.0, 0.5, 0.5));
    }

    #[test]
    fn a_constant_rate_stays_at_the_maximum() {
        assert_eq!(rates(Decay::Constant, 2, None, 4), [0.5, 1.0, 1.0, 1.0]);
        assert_eq!(rates(Decay::Constant, 0, None, 2), [1.0, 1.0]);
    }

    #[test]
    fn the_rate_is_stable_before_the_last_steps() {
        let linear = rates(Decay::Linear, 2, Some(2), 6);
        assert_eq!(linear, [0.5, 1.0, 1.0, 1.0, 0.75, 0.5]);
        // A longer stage has the same steps before.
        assert_eq!(rates(Decay::Linear, 2, Some(2), 9)[..4], linear[..4]);
        // The decay of all steps after the warm-up is the default.
        for decay in [Decay::Cosine, Decay::Linear, Decay::Sqrt] {
            assert_eq!(rates(decay, 3, Some(7), 10), rates(decay, 3, None, 10));
            assert_eq!(rates(decay, 3, Some(1), 10)[8..], [1.0, 0.5]);
        }
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
            max in 1e-8..1.0f64, share in 0.0..=1.0f64, warmup_steps in 0..100u64, rest in 1..300u64,
            decay in proptest::sample::select(vec![
                Decay::Cosine, Decay::Linear, Decay::Sqrt, Decay::InverseSquareRoot, Decay::Constant,
            ]),
            decayed in proptest::option::of(0.0..=1.0f64),
        ) {
            let decay_steps = decayed.map(|share| 1 + (share * (rest - 1) as f64) as u64);
            let rates = LearningRateOptions { max, min: max * share, warmup_steps, decay, decay_steps };
            let (schedule, warmup) = (Schedule::new(rates, warmup_steps + rest), warmup_steps);
            let mut last = max;
            for step in warmup + 1..=warmup + rest {
                let rate = schedule.learning_rate(step);
                prop_assert!(rate <= last && rate >= max * share);
                last = rate;
            }
        }
    }
}
