//! The view of a running run: a progress bar on a terminal, lines otherwise, on standard error.

use std::path::Path;
use std::time::{Duration, Instant};

use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressStyle};
use moh_checkpoint::StageExtension;
use moh_checkpoint::run_log::{
    CalibratedLayer, Evaluation, EvaluationPoint, SkippedStep, Speed, StageCalibration, StepMetrics,
};
use moh_kernels::MemoryInfo;
use moh_model::{AuxiliaryLosses, ModelConfig};
use moh_plan::SourceEpochs;
use moh_recipe::{Recipe, Stage};
use moh_train::Event;

use moh_program::exit::stderr_line;
use moh_program::progress::{LINE_EVERY, draws_bars, rate_of_items, time_left};

/// The most layers with heads in a line.
const SHOWN_LAYERS: usize = 8;
/// The number of recent steps from which the remaining time is estimated.
const WINDOW: usize = 50;

/// From this number of tokens on, a line says that a file is read to check its ids.
const SHOWN_CHECK: u64 = 100_000_000;

pub(crate) struct RunView {
    /// Steps of all stages, for the bar and the lines.
    steps: u64,
    ranks: usize,
    bar: Option<ProgressBar>,
    recent: std::collections::VecDeque<Instant>,
    /// The start of a calibration, and the time of the last line about it.
    measuring: [Instant; 2],
}

impl RunView {
    pub(crate) fn new(recipe: &Recipe, ranks: usize) -> Self {
        let steps = recipe.num_steps();
        let bar = draws_bars().then(|| {
            let style = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len}  {msg}");
            ProgressBar::new(steps).with_style(
                // An invalid template would leave indicatif's default style.
                style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "),
            )
        });
        let recent = std::collections::VecDeque::new();
        RunView { steps, ranks, bar, recent, measuring: [Instant::now(); 2] }
    }

    pub(crate) fn show(&mut self, event: Event<'_>) {
        match event {
            Event::DamagedCheckpoint { path, error } => {
                self.line(&format!("moved a damaged checkpoint to {}: {error}", path.display()));
            }
            Event::LaterCheckpoint { path } => {
                self.line(&format!("moved a later checkpoint to {}", path.display()));
            }
            Event::StageExtended { extension: StageExtension { stage, step, before, tokens } } => {
                let (before, tokens) = (HumanCount(*before), HumanCount(*tokens));
                self.line(&format!(
                    "stage {stage} has {tokens} tokens instead of {before} from step {step} on"
                ));
            }
            Event::Warning { text } => self.line(&format!("warning: {text}")),
            Event::Resumed { step } => {
                self.line(&format!("continuing after step {step} of {}", self.steps));
            }
            Event::Sources(sources) => self.sources(sources),
            Event::CheckingIds { path, done, total } => self.checking(path, done, total),
            Event::Stage { stage, model, done, memory } => {
                self.reset_message();
                self.recent.clear();
                self.recent.push_back(Instant::now());
                if let Some(bar) = &self.bar {
                    bar.set_prefix(stage.name.clone());
                }
                if done == 0 {
                    self.line(&describe_stage(stage, model, self.ranks));
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
            Event::Skipped { step, metrics, skipped } => {
                self.line(&describe_skipped(step, metrics, skipped));
            }
            Event::Calibrating { done, total } => self.calibrating(done, total),
            Event::Calibrated(calibration) => {
                self.reset_message();
                self.line(&describe_calibration(calibration));
            }
            Event::Evaluating { done, total } => {
                if let Some(bar) = &self.bar {
                    bar.set_message(format!("evaluating {done}/{total}"));
                }
            }
            Event::Evaluated { evaluation, heads } => {
                self.reset_message();
                self.line(&describe_evaluation(evaluation, heads));
            }
            Event::Checkpoint { step, seconds, .. } => {
                self.line(&format!("checkpoint of step {step} complete after {seconds:.1} s"));
            }
        }
    }

    fn checking(&self, path: &Path, done: u64, total: u64) {
        let shown = path.display();
        if done == 0 && total >= SHOWN_CHECK {
            let tokens = HumanCount(total);
            self.line(&format!("reading the {tokens} tokens of {shown} once to check their ids"));
        }
        if let Some(bar) = &self.bar {
            // In f64, as products of token counts may exceed u64.
            let percent = 100.0 * done as f64 / total.max(1) as f64;
            bar.set_message(format!("checking {shown}: {percent:.0}%"));
        }
    }

    fn calibrating(&mut self, done: u64, total: u64) {
        let now = Instant::now();
        if done == 0 {
            self.measuring = [now; 2];
            self.line(&format!("measuring the heads of {total} layers"));
        }
        let [start, printed] = self.measuring;
        let shown = describe_layers(done, total, now - start);
        match &self.bar {
            Some(bar) => bar.set_message(shown),
            None if now - printed >= LINE_EVERY => {
                self.measuring[1] = now;
                stderr_line(format_args!("{shown}"));
            }
            None => {}
        }
    }

    fn sources(&self, sources: &[SourceEpochs]) {
        for source in sources {
            let SourceEpochs { path, tokens_drawn, tokens, epochs } = source;
            let (drawn, tokens) = (HumanCount(*tokens_drawn), HumanCount(*tokens));
            let path = path.display();
            self.line(&format!("data {path}: {epochs:.2} epochs, {drawn} tokens of {tokens}"));
            if source.repeats() {
                self.line(&format!("warning: {}", source.warning()));
            }
        }
    }

    /// Clears the message beside the bar, until the next step sets it.
    fn reset_message(&self) {
        if let Some(bar) = &self.bar {
            bar.set_message("");
        }
    }

    /// Returns a function that prints a line above the bar from another thread.
    pub(crate) fn printer(&self) -> impl Fn(&str) + Send + use<> {
        let bar = self.bar.clone();
        move |text| print(bar.as_ref(), text)
    }

    pub(crate) fn finish(&self) {
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
            None if due => {
                stderr_line(format_args!("{} {step}/{}: {shown}", metrics.stage, self.steps))
            }
            None => {}
        }
    }

    /// Returns the time of the remaining steps at the speed of recent steps.
    fn left(&self, step: u64) -> Duration {
        let (Some(first), Some(last)) = (self.recent.front(), self.recent.back()) else {
            return Duration::ZERO;
        };
        let per_step = (*last - *first).as_secs_f64() / (self.recent.len() - 1).max(1) as f64;
        Duration::from_secs_f64(per_step * self.steps.saturating_sub(step) as f64)
    }

    fn line(&self, text: &str) {
        print(self.bar.as_ref(), text);
    }
}

/// Prints a line, above the bar if there is one.
fn print(bar: Option<&ProgressBar>, text: &str) {
    match bar {
        Some(bar) => bar.println(text),
        None => stderr_line(format_args!("{text}")),
    }
}

/// Describes the start of a stage: its attention, steps and, with several ranks, their layout.
fn describe_stage(stage: &Stage, model: &ModelConfig, ranks: usize) -> String {
    let heads = model.num_attention_heads;
    let attention = match &model.moh {
        Some(_) => format!("Mixture-of-Head, {} of {heads} heads", model.active_heads()),
        None => format!("dense attention, {heads} heads"),
    };
    let steps = match stage.num_steps() {
        1 => "1 step".to_owned(),
        steps => format!("{} steps", HumanCount(steps)),
    };
    let shown = format!("stage {}: {attention}, {steps}", stage.name);
    match stage.parallel.data_ranks(ranks).filter(|_| ranks > 1) {
        Some(data) => {
            let (tensor, pipeline) = (stage.parallel.tensor, stage.parallel.pipeline);
            format!("{shown}, {ranks} ranks: {tensor} tensor x {data} data x {pipeline} pipeline")
        }
        None => shown,
    }
}

/// Describes an evaluation with its moment; `heads` is the model's number of heads.
fn describe_evaluation(evaluation: &Evaluation, heads: usize) -> String {
    let moment = match &evaluation.moment {
        EvaluationPoint::Loaded => "before training".to_owned(),
        EvaluationPoint::Trained { stage } => format!("after stage {stage}"),
        EvaluationPoint::Converted { active_heads, .. } => {
            format!("after conversion, {active_heads} of {heads} heads")
        }
    };
    let others = evaluation.other_sets.iter();
    let others = others.map(|(name, set)| format!(", {name} {:.4}", set.loss));
    format!("validation {moment}: loss {:.4}{}", evaluation.loss, others.collect::<String>())
}

/// Describes the progress of a calibration after `elapsed`.
fn describe_layers(done: u64, total: u64, elapsed: Duration) -> String {
    let shown = format!("measuring layers {done}/{total}");
    if done == 0 {
        return shown;
    }
    let per_second = done as f64 / elapsed.as_secs_f64();
    let left = time_left(total.saturating_sub(done), per_second);
    format!("{shown}, {}{left}", rate_of_items(per_second))
}

/// Describes the heads that a calibration has chosen, and its losses.
fn describe_calibration(calibration: &StageCalibration) -> String {
    let StageCalibration { stage, tokens, loss_dense, loss, refit, layers, .. } = calibration;
    let heads = |layer: &CalibratedLayer| {
        let heads: Vec<String> = layer.shared_heads.iter().map(usize::to_string).collect();
        heads.join(",")
    };
    let mut shown: Vec<String> = layers.iter().take(SHOWN_LAYERS).map(heads).collect();
    if layers.len() > SHOWN_LAYERS {
        shown.push("..".to_owned());
    }
    let refitted = if *refit { ", output projections refitted" } else { "" };
    let fitted = if calibration.has_fitted_router() { ", router fitted" } else { "" };
    format!(
        "stage {stage} calibrated on {} tokens: held-out loss {loss:.4}, {loss_dense:.4} dense; shared heads \
         {}{refitted}{fitted}",
        HumanCount(*tokens),
        shown.join("; ")
    )
}

/// Describes a step that was not applied.
fn describe_skipped(step: u64, metrics: &StepMetrics, skipped: &SkippedStep) -> String {
    let [first, last] = skipped.samples;
    format!(
        "step {step} was not applied: {} (loss {:.4}, gradient norm {:.3}, samples {first} to {last})",
        skipped.reason, metrics.loss, metrics.grad_norm
    )
}

/// Returns the auxiliary losses of a step that has any, after a comma.
pub(crate) fn auxiliary_losses(losses: AuxiliaryLosses<Option<f64>>) -> String {
    let of_step = losses.iter().filter_map(|(loss, value)| Some((loss, value?)));
    let shown = of_step.map(|(loss, value)| {
        let name = loss.name();
        let name = name.strip_suffix("_loss").unwrap_or(name).replace('_', " ");
        format!(", {name} {value:.4}")
    });
    shown.collect()
}

fn describe(metrics: &StepMetrics) -> String {
    let mut shown = format!("loss {:.4}", metrics.loss);
    shown += &auxiliary_losses(metrics.auxiliary);
    if let Some(validation) = metrics.validation {
        shown += &format!(", validation {:.4}", validation.loss);
    }
    // Whole tokens are precise enough for a rate.
    let rate = HumanCount(metrics.tokens_per_second as u64);
    shown += &format!(
        ", gradient norm {:.3}, learning rate {:.2e}, {rate} tokens/s",
        metrics.grad_norm, metrics.learning_rate
    );
    if let Some(speed) = &metrics.speed {
        shown += &format!(", {}", describe_rate(speed));
    }
    shown
}

/// Returns the utilization of the device, or its rate if the peak is not known.
fn describe_rate(speed: &Speed) -> String {
    match speed.mfu {
        Some(mfu) => format!("{:.1}% MFU", 100.0 * mfu),
        None if speed.tflops < 1.0 => format!("{:.0} GFLOP/s", 1000.0 * speed.tflops),
        None => format!("{:.1} TFLOP/s", speed.tflops),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use moh_checkpoint::run_log::Validation;

    use super::*;

    #[test]
    fn the_rate_is_the_utilization_where_the_peak_is_known() {
        let speed = |tflops, mfu| Speed { tflops, mfu, ..Speed::default() };
        assert_eq!(describe_rate(&speed(412.3, Some(0.4169))), "41.7% MFU");
        assert_eq!(describe_rate(&speed(412.34, None)), "412.3 TFLOP/s");
        assert_eq!(describe_rate(&speed(0.2142, None)), "214 GFLOP/s");
    }

    #[test]
    fn an_evaluation_leaves_no_message_beside_the_bar() {
        let bar = ProgressBar::hidden();
        let (recent, measuring) = (std::collections::VecDeque::new(), [Instant::now(); 2]);
        let mut view = RunView { steps: 9, ranks: 1, bar: Some(bar.clone()), recent, measuring };
        view.show(Event::Evaluating { done: 12, total: 16 });
        assert_eq!(bar.message(), "evaluating 12/16");
        let evaluation = Evaluation::new(EvaluationPoint::Loaded, 0, 2.5);
        view.show(Event::Evaluated { evaluation: &evaluation, heads: 4 });
        assert_eq!(bar.message(), "");
    }

    #[test]
    fn a_calibration_shows_its_rate_and_the_time_left() {
        let shown = |done| describe_layers(done, 32, Duration::from_secs(60));
        assert_eq!(shown(0), "measuring layers 0/32");
        assert_eq!(shown(8), "measuring layers 8/32, 7.5 s each, 3m left");
    }

    #[test]
    fn a_calibration_shows_its_losses_and_the_first_layers_heads() {
        let layer = CalibratedLayer {
            shared_heads: vec![0, 3],
            routed_top_k: 1,
            error_before: 0.5,
            error: Some(0.25),
            ridge: Some(0.1),
            router_explained: None,
        };
        let mut calibration = StageCalibration {
            stage: "moh".to_owned(),
            step: 5,
            tokens: 65_536,
            held_out_tokens: 8192,
            loss_dense: 2.0,
            loss: 2.125,
            refit: true,
            layers: vec![layer.clone(); 2],
        };
        assert_eq!(
            describe_calibration(&calibration),
            "stage moh calibrated on 65,536 tokens: held-out loss 2.1250, 2.0000 dense; shared heads 0,3; 0,3, output \
             projections refitted"
        );
        calibration.layers[1].router_explained = Some(0.5);
        assert!(describe_calibration(&calibration).ends_with("refitted, router fitted"));
        calibration.layers = vec![layer; 9];
        calibration.refit = false;
        assert!(describe_calibration(&calibration).ends_with("; 0,3; .."));
    }

    #[test]
    fn an_evaluation_shows_every_set() {
        let code = Validation { loss: 1.25, bits_per_byte: None };
        let mut evaluation = Evaluation::new(EvaluationPoint::Loaded, 0, 2.5);
        evaluation.other_sets.insert("code".to_owned(), code);
        let shown = describe_evaluation(&evaluation, 8);
        assert_eq!(shown, "validation before training: loss 2.5000, code 1.2500");
        evaluation.other_sets.clear();
        let shown = describe_evaluation(&evaluation, 8);
        assert_eq!(shown, "validation before training: loss 2.5000");
    }

    #[test]
    fn a_stage_shows_the_layout_of_its_ranks() {
        let text = "[run]\ndir = \"run\"\nseed = 1\ndevice = \"cpu\"\ndtype = \"f32\"\n\
            [model.new]\nvocab_size = 8\nhidden_size = 32\nintermediate_size = 8\n\
            num_hidden_layers = 4\nnum_attention_heads = 8\n\
            [data]\nsequence_length = 8\nsources = [{ path = \"text\" }]\n\
            [[stage]]\nname = \"one\"\nattention = \"dense\"\ntokens = 8\nbatch_tokens = 8\n\
            micro_batch = 1\nlearning_rate = { max = 1, min = 0, warmup_steps = 0 }\n\
            parallel = { tensor = 2, pipeline = 2 }\n";
        let path = Path::new("recipe.toml");
        let recipe = Recipe::parse(text, path, &[]).unwrap();
        let model = recipe.model_config(path).unwrap().unwrap();
        let shown = |ranks| describe_stage(&recipe.stages[0], &model, ranks);
        assert_eq!(shown(1), "stage one: dense attention, 8 heads, 1 step");
        let layout = "stage one: dense attention, 8 heads, 1 step, 12 ranks: 2 tensor x 3 data x 2 \
                      pipeline";
        assert_eq!(shown(12), layout);
    }
}
