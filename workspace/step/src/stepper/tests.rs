//! A step that is not applied changes nothing, on every layout of ranks.

use std::sync::Mutex;

use moh_comm::{RankLayout, World};
use moh_kernels::{Cpu, ElementType};
use moh_model::{ModelConfig, ModelParallel, MohConfig, Recompute, RouterKind, Shard};

use super::*;
use moh_testkit::ranks::on_ranks;
use moh_testkit::tiny_model;

mod groups;
mod masks;

/// Sequences of a step; each is a micro-batch.
const SEQUENCES: u64 = 4;
const LENGTH: usize = 8;

fn config(tied: bool) -> ModelConfig {
    let moh =
        MohConfig { router: RouterKind::QueryNorm, shared_heads: 1.into(), routed_top_k: 2.into() };
    ModelConfig {
        hidden_size: 16,
        intermediate_size: 24,
        num_attention_heads: 4,
        moh: Some(moh),
        ..tiny_model(2, 32, tied)
    }
}

fn step_config(reduce: ElementType) -> StepConfig {
    StepConfig {
        stage: "test".into(),
        sequence_length: LENGTH,
        micro_batch: 1,
        micro_batches: SEQUENCES,
        document_mask: false,
        recompute: Recompute::None,
        auxiliary_weights: AuxiliaryLosses::all(0.01),
        distillation: None,
        optimizer: Hyperparameters::default(),
        gradients: ElementType::F32,
        reduce,
    }
}

fn read_tokens(sample: u64, window: &mut [u32], _: Option<&mut [u32]>) -> Result<()> {
    (0..).zip(window).for_each(|(at, id)| *id = ((sample * 31 + at * 7) % 32) as u32);
    Ok(())
}

#[derive(Debug, Clone, Copy)]
struct Ranks {
    data: usize,
    tensor: usize,
    pipeline: usize,
    tied: bool,
    reduce: ElementType,
}

impl Ranks {
    fn run<R: Send>(self, work: impl Fn(&World) -> R + Sync) -> Vec<R> {
        on_ranks(self.data * self.tensor * self.pipeline, work)
    }
}

struct Rank {
    model: Model<Cpu>,
    optimizer: OptimizerState<Cpu>,
    stepper: Stepper<Cpu>,
}

impl Rank {
    fn new(world: &World, element: ElementType, ranks: Ranks) -> Self {
        let all = world.group().clone();
        let layout = RankLayout::new(all.size(), ranks.tensor, ranks.pipeline).unwrap();
        let groups = layout.groups(&all).unwrap();
        let config = config(ranks.tied);
        let part = ModelParallel::new(&config, groups.pipeline, 1, groups.tensor).unwrap();
        let fill = |segment: &moh_model::layout::Segment, values: &mut [f32]| {
            moh_model::initial::initialize(7, 0.1, &segment.name, segment.shape(), values);
            Ok::<_, moh_model::Error>(())
        };
        let data = groups.data.clone();
        let model = Model::of_part(Cpu, element, config, LENGTH, part, data.size(), fill).unwrap();
        let moments = ElementType::F32;
        let optimizer = OptimizerState::new(&model, moments, Shard::from_group(&data)).unwrap();
        let stepper =
            Stepper::new(&model, step_config(ranks.reduce), StepGroups { all, data }).unwrap();
        Rank { model, optimizer, stepper }
    }

    /// Takes the step from sample `first` on. In one micro-batch the balance loss has a weight that is not finite,
    /// which reaches the gradients of that micro-batch's ranks, but not the loss.
    fn faulty_step(&mut self, first: u64, micro_batch: usize, weight: f64) -> StepResult {
        let weights = self.stepper.config.auxiliary_weights;
        if self.stepper.own.contains(&micro_batch) {
            self.stepper.config.auxiliary_weights = AuxiliaryLosses::all(weight);
        }
        let result = self.step(first, 2, Limits::FINITE);
        self.stepper.config.auxiliary_weights = weights;
        result
    }

    fn step(&mut self, first: u64, number: u64, limits: Limits) -> StepResult {
        let update = Update { number, learning_rate: 1e-2, limits };
        self.take(read_tokens, first, update)
    }

    fn take(&mut self, read: impl ReadSample + Send, first: u64, update: Update) -> StepResult {
        self.stepper.step(&mut self.model, &mut self.optimizer, read, first, update).unwrap()
    }

    /// Returns the bits of the exact weights and of both moments.
    fn state(&mut self) -> Vec<u32> {
        self.stepper.wait_for_weights(&mut self.model).unwrap();
        let mut bits = Vec::new();
        for flat in 0..self.model.layout().flats.len() {
            let range = self.optimizer.first_moment.local_range(flat);
            let exact = self.optimizer.exact_weights(&self.model, flat, range.clone()).unwrap();
            let whole = 0..self.model.layout().flats[flat].len;
            let stored = self.model.weights().read_range(&Cpu, flat, whole).unwrap();
            let first = self.optimizer.first_moment.read_range(&Cpu, flat, range.clone()).unwrap();
            let second = self.optimizer.second_moment.read_range(&Cpu, flat, range).unwrap();
            for values in [exact, stored, first, second] {
                bits.extend(values.iter().map(|value| value.to_bits()));
            }
        }
        bits
    }
}

/// Compares a run with steps that are not applied with a run without these steps.
fn leaves_nothing_behind(world: &World, element: ElementType, ranks: Ranks) {
    let [mut guarded, mut control] = [(); 2].map(|()| Rank::new(world, element, ranks));
    let free = Limits::FINITE;
    assert_eq!(guarded.step(0, 1, free), control.step(0, 1, free));
    let before = guarded.state();
    assert!(before == control.state());
    let result = guarded.faulty_step(SEQUENCES, SEQUENCES as usize - 1, f64::NAN);
    assert_eq!(result.skipped, Some(SkipReason::GradNormNotFinite), "{ranks:?}");
    assert!(
        result.loss.is_finite()
            && result.auxiliary[AuxiliaryLoss::Balance].is_some_and(f64::is_finite)
    );
    assert!(guarded.state() == before, "{ranks:?}: a step with NaN changed the state");
    let loss_limit = Limits { loss: 0.1, ..free };
    let result = guarded.step(2 * SEQUENCES, 2, loss_limit);
    assert_eq!(result.skipped, Some(SkipReason::LossTooLarge));
    assert!(guarded.faulty_step(3 * SEQUENCES, 0, f64::INFINITY).skipped.is_some());
    assert!(guarded.state() == before, "{ranks:?}");
    for (sample, number) in [(16, 2), (20, 3)] {
        let (found, expected) =
            (guarded.step(sample, number, free), control.step(sample, number, free));
        assert_eq!(found, expected, "{ranks:?}");
        assert_eq!(found.skipped, None);
        assert!(guarded.state() == control.state(), "{ranks:?}: update {number}");
    }
    assert!(guarded.state() != before);
}

#[test]
fn a_step_that_is_not_applied_leaves_nothing_behind() {
    for (data, tensor, pipeline) in
        [(1, 1, 1), (2, 1, 1), (6, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)]
    {
        for (tied, reduce) in [(true, ElementType::F32), (false, ElementType::BF16)] {
            let ranks = Ranks { data, tensor, pipeline, tied, reduce };
            ranks.run(|world| {
                leaves_nothing_behind(world, ElementType::F32, ranks);
                leaves_nothing_behind(world, ElementType::BF16, ranks);
            });
        }
    }
}

/// Records the samples that are read ahead, and the samples that are read.
#[derive(Default)]
struct Recording {
    ahead: Mutex<Vec<Range<u64>>>,
    read: Mutex<Vec<u64>>,
}

impl ReadSample for &Recording {
    fn read_sample(&self, number: u64, window: &mut [u32], _: Option<&mut [u32]>) -> Result<()> {
        self.read.lock().unwrap().push(number);
        window.fill(3);
        Ok(())
    }

    fn read_ahead(&self, samples: Range<u64>) {
        self.ahead.lock().unwrap().push(samples);
    }
}

#[test]
fn each_rank_reads_its_samples_of_the_next_step_ahead() {
    let ranks = Ranks { data: 2, tensor: 1, pipeline: 1, tied: false, reduce: ElementType::F32 };
    ranks.run(|world| {
        let Rank { mut model, mut optimizer, mut stepper } =
            Rank::new(world, ElementType::F32, ranks);
        let recording = Recording::default();
        let own = 2 * world.rank() as u64;
        // The third step follows a return that skips samples.
        for (number, first) in (1..).zip([0, 4, 20]) {
            let update = Update { number, learning_rate: 1e-2, limits: Limits::FINITE };
            stepper.step(&mut model, &mut optimizer, &recording, first, update).unwrap();
        }
        let starts = |starts: &[u64]| -> Vec<_> {
            starts.iter().map(|start| start + own..start + own + 2).collect()
        };
        assert_eq!(*recording.ahead.lock().unwrap(), starts(&[0, 4, 8, 20, 24]));
        let read: Vec<u64> = starts(&[0, 4, 20]).into_iter().flatten().collect();
        assert_eq!(*recording.read.lock().unwrap(), read);
    });
}
