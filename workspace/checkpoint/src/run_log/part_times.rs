//! The times of the parts of steps, from their spans ([`moh_kernels::span`]). They are always measured, so
//! the measurement does not wait for the device.
//!
//! Parts exclude each other: the time of a collective within a pass counts only as exchange. Within an
//! evaluation or a checkpoint, all time counts as evaluation or checkpoint.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use moh_kernels::span::{Label, Sink};

use crate::run_log::speed::Speed;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StepPart {
    Data,
    Forward,
    Backward,
    Exchange,
    GradientNorm,
    Optimizer,
    Evaluation,
    Checkpoint,
}

const PARTS: usize = StepPart::Checkpoint as usize + 1;

impl StepPart {
    /// Returns the part of a span within a span of part `outer`.
    fn within(outer: Option<StepPart>, name: &str) -> Option<StepPart> {
        if matches!(outer, Some(StepPart::Evaluation | StepPart::Checkpoint)) {
            return outer;
        }
        match name {
            "data" => Some(StepPart::Data),
            "forward" => Some(StepPart::Forward),
            "backward" => Some(StepPart::Backward),
            "all_reduce" | "reduce_scatter" | "all_gather" | "broadcast" | "send" | "recv" => {
                Some(StepPart::Exchange)
            }
            "gradient norm" | "block norms" => Some(StepPart::GradientNorm),
            "optimizer" => Some(StepPart::Optimizer),
            "evaluation" => Some(StepPart::Evaluation),
            "checkpoint" => Some(StepPart::Checkpoint),
            _ => outer,
        }
    }
}

/// Measures the parts of the steps of the thread that it listens to.
#[derive(Debug, Default)]
pub struct PartTimes(Mutex<State>);

#[derive(Debug)]
struct State {
    /// The part of each open span, innermost last.
    open: Vec<Option<StepPart>>,
    /// The time up to which the counts are complete.
    until: Instant,
    times: [Duration; PARTS],
}

impl Default for State {
    fn default() -> Self {
        State { open: Vec::new(), until: Instant::now(), times: [Duration::ZERO; PARTS] }
    }
}

impl State {
    fn part(&self) -> Option<StepPart> {
        self.open.last().copied().flatten()
    }

    /// Counts the time since the last change for the part `before`.
    fn count(&mut self, before: Option<StepPart>) {
        let now = Instant::now();
        if let Some(part) = before {
            self.times[part as usize] += now.saturating_duration_since(self.until);
        }
        self.until = now;
    }
}

impl PartTimes {
    /// Locks the state. A poisoned lock is used, since every change is complete.
    fn locked(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the times of the parts since the last call. The other fields are 0.
    pub fn take(&self) -> Speed {
        let mut state = self.locked();
        let part = state.part();
        state.count(part);
        let times = std::mem::replace(&mut state.times, [Duration::ZERO; PARTS]);
        let seconds = |part: StepPart| times[part as usize].as_secs_f64();
        Speed {
            data: seconds(StepPart::Data),
            forward: seconds(StepPart::Forward),
            backward: seconds(StepPart::Backward),
            exchange: seconds(StepPart::Exchange),
            gradient_norm: seconds(StepPart::GradientNorm),
            optimizer: seconds(StepPart::Optimizer),
            evaluation: seconds(StepPart::Evaluation),
            checkpoint: seconds(StepPart::Checkpoint),
            ..Speed::default()
        }
    }
}

impl Sink for PartTimes {
    fn enter(&self, label: Label) {
        let mut state = self.locked();
        let outer = state.part();
        let part = StepPart::within(outer, label.name);
        // Most spans do not change the part, and need no time of the clock.
        if part != outer {
            state.count(outer);
        }
        state.open.push(part);
    }

    fn exit(&self) {
        let mut state = self.locked();
        let ended = state.open.pop().flatten();
        if ended != state.part() {
            state.count(ended);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use moh_kernels::span;

    use super::*;

    /// Returns the parts with any time.
    fn heard(times: &PartTimes) -> Vec<&'static str> {
        times.take().parts().into_iter().filter(|part| part.1 > 0.0).map(|part| part.0).collect()
    }

    /// Enters nested spans. The innermost span takes some time.
    fn nested(names: &[&'static str]) {
        match names {
            [name, inner @ ..] => {
                let _span = span::enter(name);
                nested(inner);
            }
            [] => {
                let before = Instant::now();
                while before.elapsed() < Duration::from_micros(50) {}
            }
        }
    }

    #[test]
    fn a_span_without_a_part_of_its_own_counts_for_the_part_around_it() {
        let times = Arc::new(PartTimes::default());
        let _listening = span::listen(times.clone());
        for (spans, expected) in [
            (&["step", "data"][..], &["data"][..]),
            (&["step", "forward", "block", "mlp"], &["forward"]),
            (&["step", "backward", "block", "recompute", "attention"], &["backward"]),
            (&["step", "gradient norm"], &["gradient_norm"]),
            (&["step", "optimizer"], &["optimizer"]),
            (&["step", "reduce_scatter"], &["exchange"]),
            (&["checkpoint"], &["checkpoint"]),
            (&["step"], &[]),
        ] {
            nested(spans);
            assert_eq!(heard(&times), expected, "{spans:?}");
        }
    }

    #[test]
    fn exchange_counts_apart_from_its_pass_and_as_part_of_an_evaluation() {
        let times = Arc::new(PartTimes::default());
        let _listening = span::listen(times.clone());
        let (begun, pause) = (Instant::now(), Duration::from_millis(5));
        {
            let _pass = span::enter("forward");
            let _exchange = span::enter("recv");
            std::thread::sleep(pause);
        }
        let speed = times.take();
        let all = begun.elapsed().as_secs_f64();
        assert!(speed.exchange >= pause.as_secs_f64());
        assert!(speed.forward + speed.exchange <= all);
        nested(&["evaluation", "forward", "all_reduce"]);
        assert_eq!(heard(&times), ["evaluation"]);
    }
}
