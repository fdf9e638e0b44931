//! `moh-bench step`: measures tokens and FLOPs per second, and memory, of training steps.

use anyhow::Context as _;
use moh_comm::World;
use moh_kernels::gpu_activity::Recording;
use moh_kernels::{Backend, span};
use moh_model::{Model, ModelConfig, Segment, Shard, Teacher, initial};
use moh_step::guard::Limits;
use moh_step::{OptimizerState, StepGroups, StepResult, Stepper, Update};
use serde_json::{Value, json};

use crate::device::{Bench, Measurement};
use crate::kernels::KernelTimes;
use crate::limits::{self, MachineLimits, gflops};
use crate::step_job::{StepArguments, StepJob};
use crate::timing::Times;

/// Seconds of all measured steps together, if their number is not given.
const SECONDS: f64 = 5.0;
const MIN_STEPS: usize = 3;
/// Seed of the weights and of the tokens.
const SEED: u64 = 0;

pub struct StepMeasurement {
    times: Times,
    first: StepResult,
    last: StepResult,
    /// Bytes in use before the model, and at the peak.
    memory: Option<(u64, u64)>,
    /// Times of one more step, if requested.
    kernels: Option<KernelTimes>,
}

pub fn run(arguments: &StepArguments) -> anyhow::Result<()> {
    span::connect_profiler()?;
    let job = StepJob::new(arguments)?;
    let (measured, machine) = arguments.device.measure((&job, arguments))?;
    crate::print(
        arguments.json,
        &as_json(&job, &measured, &machine, arguments.warmup),
        &as_text(&job, &measured, &machine),
    )
}

impl Measurement for (&StepJob, &StepArguments) {
    type Output = StepMeasurement;

    fn on<B: Backend + Clone>(self, bench: &Bench<B>) -> anyhow::Result<Self::Output> {
        let (job, arguments) = self;
        let backend = &bench.backend;
        let before = limits::memory(backend);
        let (config, step) = (job.config.clone(), job.step.clone());
        let (vocabulary, deviation) = (config.vocab_size as u64, config.initializer_range);
        let model = |config: ModelConfig| {
            let fill = |segment: &Segment, values: &mut [f32]| {
                fresh(segment, deviation, values);
                Ok::<_, moh_model::Error>(())
            };
            Model::new(backend.clone(), job.dtype, config, step.sequence_length, fill)
        };
        // Any teacher of the same shape takes as much time as the stage's teacher.
        let teacher = step.distillation.map(|distillation| {
            let (rows, temperature) = (config.vocab_size, distillation.temperature);
            Teacher::new(model(job.teacher())?, step.pass_shape(), rows, temperature)
        });
        let mut model = model(config)?;
        model.set_teacher(teacher.transpose()?)?;
        let mut optimizer = OptimizerState::new(&model, job.precision.moments, Shard::WHOLE)?;
        let group = World::single().group().clone();
        let groups = StepGroups { all: group.clone(), data: group };
        let mut stepper = Stepper::new(&model, step, groups)?;
        let sequences = job.step.batch_sequences();
        let mut number = 0;
        let mut step = || {
            number += 1;
            let _step = span::enter_numbered("step", number);
            stepper.step(
                &mut model,
                &mut optimizer,
                |sample: u64, window: &mut [u32], document_start: Option<&mut [u32]>| {
                    synthetic(sample, vocabulary, window);
                    if let Some(document_start) = document_start {
                        // A single document, which began before the window.
                        document_start.fill(0);
                    }
                    Ok(())
                },
                (number - 1) * sequences,
                Update { number, learning_rate: job.learning_rate, limits: Limits::FINITE },
            )
        };
        let mut first = None;
        for _ in 0..arguments.warmup {
            first.get_or_insert(step()?);
        }
        let mut times = Times::default();
        let mut last = times.time(1, &mut step)?;
        let first = first.unwrap_or(last);
        let enough = |times: &Times| match arguments.steps {
            Some(steps) => times.len() >= steps as usize,
            None => times.len() >= MIN_STEPS && times.total() >= SECONDS,
        };
        while !enough(&times) {
            last = times.time(1, &mut step)?;
        }
        if let Some(reason) = last.skipped {
            anyhow::bail!("the step was not applied: {reason}");
        }
        let memory = before.zip(limits::memory(backend)).map(|((now, _), (_, most))| (now, most));
        let kernels = arguments.kernels.then(|| kernel_times(backend, &mut step)).transpose()?;
        Ok(StepMeasurement { times, first, last, memory, kernels })
    }
}

/// Measures the GPU's time in one more step.
fn kernel_times<B: Backend>(
    backend: &B,
    step: &mut impl FnMut() -> Result<StepResult, moh_step::Error>,
) -> anyhow::Result<KernelTimes> {
    // Waits for the update of the previous step, which is not part of this step.
    backend.synchronize()?;
    let recording = Recording::start().context("--kernels")?;
    step()?;
    backend.synchronize()?;
    Ok(KernelTimes::new(&recording.finish().context("--kernels")?))
}

/// Fills a tensor with random elements. In large tensors they repeat, because billions of random numbers would take
/// longer than the measurement.
pub fn fresh(segment: &Segment, deviation: f64, values: &mut [f32]) {
    const PERIOD: usize = (1 << 20) + 1;
    let period = values.len().min(PERIOD);
    let (first, rest) = values.split_at_mut(period);
    initial::initialize(SEED, deviation, &segment.name, segment.shape(), first);
    for part in rest.chunks_mut(PERIOD) {
        part.copy_from_slice(&first[..part.len()]);
    }
}

/// Writes a sample's tokens: uniformly distributed, and the same in every run.
pub fn synthetic(sample: u64, vocabulary: u64, window: &mut [u32]) {
    let mut state = (sample ^ SEED).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for id in window {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // Below the vocabulary size, which `ModelConfig` limits far below 2^32.
        *id = ((state >> 33) % vocabulary) as u32;
    }
}

impl StepJob {
    fn tokens(&self) -> f64 {
        self.step.batch_sequences() as f64 * self.step.sequence_length as f64
    }

    fn teacher(&self) -> ModelConfig {
        ModelConfig { moh: None, ..self.config.clone() }
    }

    /// Returns the FLOPs per step, by the convention of [`moh_model::flops`]. A teacher's forward pass counts.
    fn flops(&self) -> f64 {
        let length = self.step.sequence_length;
        let teacher = match self.step.distillation {
            Some(_) => self.teacher().flops_per_token(length).forward(),
            None => 0.0,
        };
        (self.config.flops_per_token(length).training() + teacher) * self.tokens()
    }
}

fn as_json(
    job: &StepJob,
    measured: &StepMeasurement,
    machine: &MachineLimits,
    warmup: u32,
) -> Value {
    let StepJob { config, step, .. } = job;
    let StepMeasurement { times, first, last, memory, kernels } = measured;
    let flops = times.rates(job.flops());
    json!({
        "machine": machine.json(),
        "model": {
            "parameters": config.num_parameters(),
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "active_heads": config.active_heads(),
            "shared_heads": config.moh.as_ref().map(|moh| moh.shared_heads.counts()),
            "routed_top_k": config.moh.as_ref().map(|moh| &moh.routed_top_k),
            "vocab_size": config.vocab_size,
        },
        "step": {
            "sequence_length": step.sequence_length,
            "micro_batch": step.micro_batch,
            "micro_batches": step.micro_batches,
            "tokens": job.tokens(),
            "dtype": job.dtype.name(),
            "gradients": job.precision.gradients.name(),
            "moments": job.precision.moments.name(),
            "recompute": step.recompute,
        },
        "steps": times.len(),
        "warmup": warmup,
        "seconds": times.json(),
        "tokens_per_second": times.rates(job.tokens()).json(),
        "flops": job.flops(),
        "flops_per_second": flops.json(),
        "share_of_f32_matmul": flops.median / machine.f32_matmul,
        "share_of_bf16_matmul": flops.median / machine.bf16_matmul,
        "memory": memory.map(|(before, peak)| json!({
            "before_bytes": before, "peak_bytes": peak,
        })),
        "loss": {"first": first.loss, "last": last.loss},
        "gpu_time": kernels.as_ref().map(KernelTimes::json),
    })
}

fn as_text(job: &StepJob, measured: &StepMeasurement, machine: &MachineLimits) -> String {
    let StepMeasurement { times, first, last, memory, kernels } = measured;
    let (tokens, flops) = (times.rates(job.tokens()), times.rates(job.flops()));
    let step = &job.step;
    let memory = memory.map_or("-".to_owned(), |(before, peak)| {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        format!("{:.0} MiB at most, {:.0} MiB before the model", mib(peak), mib(before))
    });
    let lines = [
        ("model", describe(&job.config)),
        (
            "step",
            format!(
                "{} x {} sequences of {} tokens, {}, gradients {}, moments {}",
                step.micro_batches,
                step.micro_batch,
                step.sequence_length,
                job.dtype.name(),
                job.precision.gradients.name(),
                job.precision.moments.name()
            ),
        ),
        ("machine", machine.line()),
        ("steps", format!("{} measured", times.len())),
        ("tokens/s", format!("{:.0} (best {:.0})", tokens.median, tokens.best)),
        ("ms/step", format!("{:.2} (best {:.2})", times.median() * 1e3, times.best() * 1e3)),
        ("FLOP/s", format!("{} (best {})", gflops(flops.median), gflops(flops.best))),
        (
            "share",
            format!(
                "{:.1}% of the f32 matmul, {:.1}% of the bf16 matmul",
                100.0 * flops.median / machine.f32_matmul,
                100.0 * flops.median / machine.bf16_matmul
            ),
        ),
        ("memory", memory),
        ("loss", format!("{:.4} first, {:.4} last", first.loss, last.loss)),
    ];
    let mut text: String =
        lines.iter().map(|(name, value)| format!("{name:<9} {value}\n")).collect();
    if let Some(kernels) = kernels {
        text += &format!("\n{}", kernels.text());
    }
    text
}

pub fn describe(config: &ModelConfig) -> String {
    let attention = match &config.moh {
        None => "dense".to_owned(),
        Some(moh) => format!("{} shared heads and {} routed", moh.shared_heads, moh.routed_top_k),
    };
    format!(
        "{} layers of {}, MLP {}, {}/{} heads, {} words, {:.1} M parameters, {attention}",
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.vocab_size,
        config.num_parameters() as f64 / 1e6
    )
}
