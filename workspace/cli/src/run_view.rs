//! The view of a running run: a progress bar on a terminal, lines otherwise, on standard error.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressStyle};
use moh_kernels::MemoryInfo;
use moh_train::{Event, Recipe, StepMetrics};

/// Recent steps from which the remaining time is estimated.
const WINDOW: usize = 50;

/// The view of one run.
pub struct RunView {
    /// Steps of all stages, which the bar and the lines count.
    steps: u64,
    bar: Option<ProgressBar>,
    recent: std::collections::VecDeque<Instant>,
}

impl RunView {
    /// Creates the view of a run of `recipe` on `ranks` ranks.
    pub fn new(recipe: &Recipe, ranks: usize) -> Self {
        if ranks > 1 {
            eprintln!("{ranks} ranks share each step's micro-batches");
        }
        let steps = recipe.num_steps();
        let bar = stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len}  {msg}");
            ProgressBar::new(steps).with_style(
                // An invalid template would leave indicatif's default style.
                style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "),
            )
        });
        RunView { steps, bar, recent: std::collections::VecDeque::new() }
    }

    /// Shows an event.
    pub fn show(&mut self, event: Event<'_>) {
        match event {
            Event::DamagedCheckpoint { path, error } => {
                self.line(&format!("moved a damaged checkpoint to {}: {error}", path.display()));
            }
            Event::Warning { text } => self.line(&format!("warning: {text}")),
            Event::Resumed { step } => {
                self.line(&format!("continuing after step {step} of {}", self.steps));
            }
            Event::Stage { stage, done, memory } => {
                self.recent.clear();
                self.recent.push_back(Instant::now());
                if let Some(bar) = &self.bar {
                    bar.set_prefix(stage.name.clone());
                }
                if done == 0 {
                    let attention = format!("{:?}", stage.attention).to_lowercase();
                    let steps = stage.num_steps();
                    self.line(&format!(
                        "stage {}: {attention} attention, {steps} steps",
                        stage.name
                    ));
                }
                if let Some(MemoryInfo { used, total }) = memory {
                    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
                    self.line(&format!("{:.1} of {:.1} GiB in use", gib(used), gib(total)));
                }
            }
            Event::UnevenHeads { stage, shared_heads } => self.line(&format!(
                "stage {}: the tensor-parallel ranks have {shared_heads:?} shared heads of a layer: the \
                 key/value heads do not divide them equally, and some ranks wait for others",
                stage.name
            )),
            Event::Step { metrics, step, due } => self.step(metrics, step, due),
            Event::Evaluating { done, total } => {
                if let Some(bar) = &self.bar {
                    bar.set_message(format!("evaluating {done}/{total}"));
                }
            }
            Event::Evaluated(evaluation) => {
                self.line(&format!("validation loss {:.4}", evaluation.loss));
            }
            Event::Checkpoint { .. } => {}
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn step(&mut self, metrics: &StepMetrics, step: u64, due: bool) {
        self.recent.push_back(Instant::now());
        if self.recent.len() > WINDOW {
            self.recent.pop_front();
        }
        let shown = format!("{}, {} left", describe(metrics), HumanDuration(self.left(step)));
        match &self.bar {
            Some(bar) => {
                bar.set_position(step);
                bar.set_message(shown);
            }
            None if due => eprintln!("{} {step}/{}: {shown}", metrics.stage, self.steps),
            None => {}
        }
    }

    /// The time of the remaining steps at the speed of the recent ones.
    fn left(&self, step: u64) -> Duration {
        let (Some(first), Some(last)) = (self.recent.front(), self.recent.back()) else {
            return Duration::ZERO;
        };
        let per_step = (*last - *first).as_secs_f64() / (self.recent.len() - 1).max(1) as f64;
        Duration::from_secs_f64(per_step * self.steps.saturating_sub(step) as f64)
    }

    /// Prints a line above the bar.
    fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => eprintln!("{text}"),
        }
    }
}

fn describe(metrics: &StepMetrics) -> String {
    let mut shown = format!("loss {:.4}", metrics.loss);
    if let Some(balance) = metrics.balance_loss {
        shown += &format!(", balance {balance:.4}");
    }
    if let Some(validation) = metrics.validation {
        shown += &format!(", validation {:.4}", validation.loss);
    }
    // Whole tokens are precise enough for a rate.
    let rate = HumanCount(metrics.tokens_per_second as u64);
    shown
        + &format!(
            ", gradient {:.3}, learning rate {:.2e}, {rate} tokens/s",
            metrics.grad_norm, metrics.learning_rate
        )
}
