//! The decision to apply a step: a step is skipped if its loss or gradient norm is not finite, or is far above its
//! running median. The decision depends only on the recipe and the steps before, so that all ranks and a resumed run
//! decide alike.

use std::collections::VecDeque;
use std::fmt;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

/// Number of applied steps in the median. A spike of some steps does not move the median of so many steps. When the
/// median matters, the losses of a warm-up have left the window.
pub const WINDOW: usize = 128;

/// Number of applied steps from which on there are limits. The first steps of a stage vary the most: until there are so
/// many steps, only values that are not finite are rejected.
pub const MINIMUM: usize = 32;

/// The reason why a step was not applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SkipReason {
    /// The loss is NaN or infinite.
    #[serde(rename = "loss is not finite")]
    LossNotFinite,
    /// The gradient norm is NaN or infinite.
    #[serde(rename = "gradient norm is not finite")]
    GradNormNotFinite,
    /// The loss is above its limit.
    #[serde(rename = "loss is above guard.factor times its median")]
    LossTooLarge,
    /// The gradient norm is above its limit.
    #[serde(rename = "gradient norm is above guard.factor times its median")]
    GradNormTooLarge,
    /// The masks leave out all targets.
    #[serde(rename = "no target is trained on")]
    NoTargets,
}

/// Shows the reason as in files.
impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The largest loss and gradient norm of a step that is applied.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Limit of the mean cross-entropy, in nats.
    pub loss: f64,
    /// Limit of the global gradient norm before clipping.
    pub grad_norm: f64,
}

impl Limits {
    /// Applies every step with finite values.
    pub const FINITE: Limits = Limits { loss: f64::INFINITY, grad_norm: f64::INFINITY };

    /// Returns the reason to skip a step with these values; `None` if it is applied.
    pub fn check(&self, loss: f64, grad_norm: f64) -> Option<SkipReason> {
        if !loss.is_finite() {
            Some(SkipReason::LossNotFinite)
        } else if !grad_norm.is_finite() {
            Some(SkipReason::GradNormNotFinite)
        } else if loss > self.loss {
            Some(SkipReason::LossTooLarge)
        } else if grad_norm > self.grad_norm {
            Some(SkipReason::GradNormTooLarge)
        } else {
            None
        }
    }
}

/// A run's record of its steps, which decides about the next step.
///
/// ```
/// use moh_step::guard::{GuardState, SkipReason};
///
/// let mut guard = GuardState::default();
/// (0..100).for_each(|_| guard.count(false, 2.0, 0.5, 3.0));
/// // Three times the medians of loss and gradient norm.
/// let limits = guard.limits(3.0);
/// assert_eq!(limits.check(2.1, 0.6), None);
/// assert_eq!(limits.check(2.1, 1.7), Some(SkipReason::GradNormTooLarge));
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuardState {
    /// Steps of the current stage that were not applied.
    pub skipped: u64,
    /// Number of steps in a row, up to the last step, that were not applied.
    pub in_a_row: u64,
    /// Losses of the last applied steps of the stage, oldest first; at most [`WINDOW`]. Empty without a
    /// factor.
    pub losses: VecDeque<f64>,
    /// Gradient norms of the same steps.
    pub grad_norms: VecDeque<f64>,
    /// The number of returns to an earlier step, which earlier versions recorded.
    #[serde(default, skip_serializing)]
    rewinds: IgnoredAny,
}

impl GuardState {
    /// Returns the limits of the next step, at `factor` times the medians. There are no limits with fewer than
    /// [`MINIMUM`] steps, and with a factor of 0.
    pub fn limits(&self, factor: f64) -> Limits {
        let limit = |values: &VecDeque<f64>| match median(values) {
            Some(median) if factor > 0.0 && values.len() >= MINIMUM => factor * median,
            _ => f64::INFINITY,
        };
        Limits { loss: limit(&self.losses), grad_norm: limit(&self.grad_norms) }
    }

    /// Counts a step. The medians need its values only if `factor` is above 0.
    pub fn count(&mut self, skipped: bool, loss: f64, grad_norm: f64, factor: f64) {
        if skipped {
            self.skipped += 1;
            self.in_a_row += 1;
            return;
        }
        self.in_a_row = 0;
        if factor > 0.0 {
            push(&mut self.losses, loss);
            push(&mut self.grad_norms, grad_norm);
        }
    }

    /// Forgets the steps of a stage that has ended, except the number of skipped steps in a row.
    pub fn end_stage(&mut self) {
        *self = GuardState { in_a_row: self.in_a_row, ..GuardState::default() };
    }
}

/// Adds the newest value, and drops the oldest values beyond the window.
fn push(values: &mut VecDeque<f64>, value: f64) {
    values.push_back(value);
    while values.len() > WINDOW {
        values.pop_front();
    }
}

/// Returns the middle value, or the mean of the two middle values.
fn median(values: &VecDeque<f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().collect();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = sorted[(sorted.len() - 1) / 2];
    Some(lower + (upper - lower) / 2.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn after(values: &[f64]) -> GuardState {
        let mut state = GuardState::default();
        values.iter().for_each(|&value| state.count(false, value, 2.0 * value, 3.0));
        state
    }

    proptest! {
        #[test]
        fn the_median_has_as_many_values_above_as_below(
            values in prop::collection::vec(0.0..1e6f64, 1..300),
        ) {
            let state = after(&values);
            let window = &values[values.len().saturating_sub(WINDOW)..];
            prop_assert_eq!(&state.losses, &window.to_vec());
            let found = median(&state.losses).unwrap();
            let below = window.iter().filter(|&&value| value < found).count();
            let above = window.iter().filter(|&&value| value > found).count();
            prop_assert!(2 * below <= window.len() && 2 * above <= window.len());
            let (least, most) = window.iter().fold((f64::MAX, f64::MIN), |(least, most), &value| {
                (least.min(value), most.max(value))
            });
            prop_assert!((least..=most).contains(&found));
            // The order of the steps within the window does not matter.
            let mut reversed = window.to_vec();
            reversed.reverse();
            prop_assert_eq!(median(&reversed.into()), Some(found));
        }

        #[test]
        fn a_state_reads_back_exactly(values in prop::collection::vec(0.0..1e6f64, 0..200)) {
            let state = after(&values);
            let text = serde_json::to_string(&state).unwrap();
            prop_assert_eq!(serde_json::from_str::<GuardState>(&text).unwrap(), state);
        }
    }

    #[test]
    fn a_state_of_an_earlier_version_is_read() {
        let text = r#"{"skipped":2,"in_a_row":1,"rewinds":3,"losses":[],"grad_norms":[]}"#;
        let state: GuardState = serde_json::from_str(text).unwrap();
        assert_eq!(state, GuardState { skipped: 2, in_a_row: 1, ..GuardState::default() });
        assert_eq!(serde_json::to_string(&state).unwrap(), text.replace(r#""rewinds":3,"#, ""));
    }

    #[test]
    fn limits_begin_with_the_minimum_of_steps() {
        let few = after(&[1.0; MINIMUM - 1]);
        assert_eq!(few.limits(3.0), Limits::FINITE);
        let enough = after(&[1.0; MINIMUM]);
        assert_eq!(enough.limits(3.0), Limits { loss: 3.0, grad_norm: 6.0 });
        assert_eq!(enough.limits(0.0), Limits::FINITE);
    }

    #[test]
    fn every_reason_is_found() {
        let limits = Limits { loss: 3.0, grad_norm: 6.0 };
        assert_eq!(limits.check(3.0, 6.0), None);
        assert_eq!(limits.check(f64::NAN, 1.0), Some(SkipReason::LossNotFinite));
        assert_eq!(limits.check(f64::INFINITY, 1.0), Some(SkipReason::LossNotFinite));
        assert_eq!(limits.check(1.0, f64::NAN), Some(SkipReason::GradNormNotFinite));
        assert_eq!(limits.check(3.5, 1.0), Some(SkipReason::LossTooLarge));
        assert_eq!(limits.check(1.0, 6.5), Some(SkipReason::GradNormTooLarge));
        assert_eq!(Limits::FINITE.check(f64::MAX, f64::MAX), None);
    }

    #[test]
    fn a_reason_is_shown_as_it_is_written() {
        assert_eq!(SkipReason::NoTargets.to_string(), "no target is trained on");
    }

    #[test]
    fn skipped_steps_are_counted_and_leave_the_medians() {
        let mut state = after(&[1.0; MINIMUM]);
        let before = state.limits(3.0);
        state.count(true, f64::NAN, f64::NAN, 3.0);
        state.count(true, 1e9, 1e9, 3.0);
        assert_eq!((state.skipped, state.in_a_row, state.limits(3.0)), (2, 2, before));
        state.end_stage();
        assert_eq!((state.skipped, state.in_a_row), (0, 2));
        assert_eq!(state.limits(3.0), Limits::FINITE);
        state.count(false, 1.0, 1.0, 0.0);
        assert_eq!(state, GuardState::default());
    }
}
