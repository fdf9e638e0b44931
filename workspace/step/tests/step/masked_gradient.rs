//! The gradient of a whole step with masks that leave targets out, with and without a teacher, against the formulas of
//! docs/design.md in f64. Candle's autograd computes the reference's gradients.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use moh_comm::World;
use moh_kernels::cross_entropy::IGNORED;
use moh_kernels::{Cpu, ElementType};
use moh_model::{
    Architecture, AuxiliaryLoss, Distillation, Model, ModelConfig, Recompute, Shard, Teacher,
};
use moh_step::guard::Limits;
use moh_step::{
    Hyperparameters, OptimizerState, ReadSample, Result, StepConfig, StepGroups, StepResult,
    Stepper, Update,
};
use moh_testkit::models::{MOH, RECOMPUTE, SCALE, SHAPE, VOCABULARY, config, model};
use moh_testkit::reference::{Pass, Reference, close, counted};

const MICRO_BATCHES: u64 = 2;

/// Samples of the pseudorandom tokens of [`token`].
#[derive(Clone, Copy)]
struct Masked;

fn token(sample: u64, at: u64) -> u32 {
    let number = sample * 41 + at;
    ((number * 37 + number * number) % u64::from(VOCABULARY)) as u32
}

/// Selects all tokens of a sequence, no token, a few and most. The micro-batches, of two sequences each, have different
/// numbers of targets.
fn trains(sample: u64, at: u64) -> bool {
    match sample {
        0 => true,
        1 => false,
        2 => at.is_multiple_of(13),
        _ => !(at * at).is_multiple_of(5),
    }
}

impl ReadSample for Masked {
    fn read_sample(&self, number: u64, window: &mut [u32], _: Option<&mut [u32]>) -> Result<()> {
        (0..).zip(window).for_each(|(at, id)| *id = token(number, at));
        Ok(())
    }

    fn read_mask(&self, number: u64, mask: &mut [u8]) -> Result<bool> {
        (0..).zip(mask).for_each(|(at, byte)| *byte = u8::from(trains(number, at)));
        Ok(true)
    }

    fn trained_targets(&self, samples: Range<u64>) -> Result<Option<u64>> {
        Ok(Some(samples.map(|sample| targets(sample).filter(is_counted).count() as u64).sum()))
    }
}

/// Returns for each token of a sequence the next token, if it is trained on.
fn targets(sample: u64) -> impl Iterator<Item = u32> {
    let after = 1..=SHAPE.length as u64;
    after.map(move |at| if trains(sample, at) { token(sample, at) } else { IGNORED })
}

fn is_counted(target: &u32) -> bool {
    *target != IGNORED
}

/// The settings of distillation. The teacher's vocabulary has fewer rows.
const DISTILLATION: Distillation =
    Distillation { weight: 0.75, cross_entropy: 0.25, temperature: 2.0 };
const TEACHERS_ROWS: usize = VOCABULARY as usize - 7;

/// Returns T^2 KL(teacher || student) over the teacher's rows, summed over the tokens.
fn divergence(students: &Tensor, teachers: &Tensor) -> candle_core::Result<Tensor> {
    let temperature = DISTILLATION.temperature;
    let log_softmax = |logits: &Tensor| {
        candle_nn::ops::log_softmax(&(logits.narrow(1, 0, TEACHERS_ROWS)? / temperature)?, 1)
    };
    let (own, other) = (log_softmax(students)?, log_softmax(teachers)?);
    (other.exp()? * (other - own)?)?.sum_all()? * (temperature * temperature)
}

/// The losses of a step, each a mean over its targets or micro-batches.
struct Losses {
    cross_entropy: Tensor,
    balance: Tensor,
    distillation: Option<Tensor>,
    targets: usize,
}

/// Returns the losses of the step: the means over all of its targets, and the mean of its micro-batches' balance
/// losses.
fn step_of(reference: &Reference, teacher: Option<&Reference>) -> candle_core::Result<Losses> {
    let mut cross_entropy = Tensor::zeros((), DType::F64, &Device::Cpu)?;
    let (mut balance, mut count) = (cross_entropy.clone(), 0);
    let mut distillation = cross_entropy.clone();
    for number in 0..MICRO_BATCHES {
        let samples = number * SHAPE.batch as u64..(number + 1) * SHAPE.batch as u64;
        let positions = 0..SHAPE.length as u64;
        let ids = samples.clone().flat_map(|n| positions.clone().map(move |at| token(n, at)));
        let (ids, targets): (Vec<_>, Vec<_>) = (ids.collect(), samples.flat_map(targets).collect());
        let pass = reference.forward(&ids, &targets, SHAPE.batch)?;
        let rows = Tensor::new(counted(&targets).0, &Device::Cpu)?;
        if let Some(teacher) = teacher {
            let of = |model: &Reference| model.logits(&ids, SHAPE.batch)?.0.index_select(&rows, 0);
            distillation = (distillation + divergence(&of(reference)?, &of(teacher)?)?)?;
        }
        let trained = targets.iter().filter(|target| is_counted(target)).count();
        cross_entropy = (cross_entropy + (pass.cross_entropy * trained as f64)?)?;
        balance = (balance + pass.balance)?;
        count += trained;
    }
    let mean = (distillation / count as f64)?;
    Ok(Losses {
        cross_entropy: (cross_entropy / count as f64)?,
        balance: (balance / MICRO_BATCHES as f64)?,
        distillation: teacher.map(|_| mean),
        targets: count,
    })
}

/// Returns a dense model with other sizes.
fn teacher() -> Model<Cpu> {
    let sizes = config(12, false, None);
    let config =
        ModelConfig { hidden_size: 32, intermediate_size: 56, num_hidden_layers: 3, ..sizes };
    model(Cpu, ElementType::F32, config)
}

fn is_the_reference(architecture: Architecture, recompute: Recompute, has_teacher: bool) {
    let config = ModelConfig { architecture, ..config(10, false, Some(MOH)) };
    let mut model = model(Cpu, ElementType::F32, config);
    let reference = Reference::of(&model);
    let teacher = has_teacher.then(teacher);
    let other = teacher.as_ref().map(Reference::of);
    let expected = step_of(&reference, other.as_ref()).unwrap();
    let distillation = has_teacher.then_some(DISTILLATION);

    let all = World::single().group().clone();
    let mut optimizer =
        OptimizerState::new(&model, ElementType::F32, Shard::from_group(&all)).unwrap();
    let config = StepConfig {
        stage: "test".into(),
        sequence_length: SHAPE.length,
        micro_batch: SHAPE.batch,
        micro_batches: MICRO_BATCHES,
        document_mask: false,
        recompute,
        auxiliary_weights: SCALE.auxiliary.map(f64::from),
        distillation,
        // Without decay the first moment is the gradient.
        optimizer: Hyperparameters { beta1: 0.0, clip_norm: 1e30, ..Hyperparameters::default() },
        gradients: ElementType::F32,
        reduce: ElementType::F32,
    };
    let teacher = teacher.map(|teacher| {
        let temperature = DISTILLATION.temperature;
        Teacher::new(teacher, config.pass_shape(), TEACHERS_ROWS, temperature).unwrap()
    });
    model.set_teacher(teacher).unwrap();
    let groups = StepGroups { data: all.clone(), all };
    let mut stepper = Stepper::new(&model, config, groups).unwrap();
    let update = Update { number: 1, learning_rate: 1e-3, limits: Limits::FINITE };
    let found = stepper.step(&mut model, &mut optimizer, Masked, 0, update).unwrap();

    let StepResult { loss, targets, auxiliary, skipped, .. } = found;
    let Losses { cross_entropy, balance, distillation, targets: count } = expected;
    assert_eq!((targets, skipped), (Some(count as u64), None));
    let number = |tensor: &Tensor| tensor.to_scalar::<f64>().unwrap();
    close(loss, number(&cross_entropy), "cross-entropy");
    close(auxiliary[AuxiliaryLoss::Balance].unwrap(), number(&balance), "balance loss");
    let found = auxiliary[AuxiliaryLoss::Distillation];
    assert_eq!(found.is_some(), has_teacher);
    let mut total = cross_entropy;
    if let Some((found, expected)) = found.zip(distillation) {
        close(found, number(&expected), "distillation loss");
        let Distillation { weight, cross_entropy, .. } = DISTILLATION;
        total = ((total * cross_entropy).unwrap() + (expected * weight).unwrap()).unwrap();
    }
    let expected = Pass { cross_entropy: total, balance, masks: Vec::new() };
    reference.check_gradients(&model, &optimizer.first_moment, &expected);
}

#[test]
fn ignored_targets_have_no_part_in_the_loss_and_gradient_of_a_step() {
    for architecture in Architecture::ALL {
        for recompute in RECOMPUTE {
            for has_teacher in [false, true] {
                is_the_reference(architecture, recompute, has_teacher);
            }
        }
    }
}
