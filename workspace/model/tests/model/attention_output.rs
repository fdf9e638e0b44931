//! The attention-output loss against its formula in f64, whose gradients candle's autograd takes: its value, and the
//! gradients of every tensor, with routed, dense and static layers, and of several micro-batches.

use candle_core::Tensor;
use moh_kernels::Cpu;
use moh_model::{
    Activations, Architecture, AttentionOutputLoss, AuxiliaryLoss, Error, FlatBuffers, Model,
    ModelConfig, MohConfig, PassRole, PassShape, PassSlot, RouterKind, Slots, StepSums, Teacher,
};
use moh_testkit::models::{SHAPE, config, draw, model, moh, upload};
use moh_testkit::reference::{Reference, assert_gradient, micro_batch};

/// The loss's weight over layers and tokens.
const SCALE: f32 = 0.7 / (3.0 * 80.0);

/// A dense model with other weights than those of the student.
fn teacher(config: &ModelConfig) -> Model<Cpu, f32> {
    let config = ModelConfig { moh: None, ..config.clone() };
    Model::new::<Error>(Cpu, config, 64, |segment, values| {
        draw(4, 0.2, segment, values);
        Ok(())
    })
    .unwrap()
}

/// The error of the attention outputs, summed over layers and tokens.
fn expected(student: &Reference, teacher: &Reference, ids: &[u32]) -> Tensor {
    let mut x = teacher.embed(ids).unwrap();
    let mut errors = Vec::new();
    for layer in 0..teacher.config.num_hidden_layers {
        let (target, _) = teacher.attention(layer, &x, 2).unwrap();
        let (own, _) = student.attention(layer, &x.detach(), 2).unwrap();
        let target = target.detach();
        let squares = |x: &Tensor| x.sqr().unwrap().sum(1).unwrap();
        errors.push((squares(&(own - &target).unwrap()) / squares(&target)).unwrap());
        x = teacher.mlp(layer, &(x + target).unwrap()).unwrap();
    }
    Tensor::cat(&errors, 0).unwrap().sum_all().unwrap()
}

fn is_the_formula(architecture: Architecture, moh: MohConfig) {
    let config = ModelConfig { architecture, num_hidden_layers: 3, ..config(10, false, Some(moh)) };
    let shape = PassShape { document_mask: false, ..SHAPE };
    let mut student = model::<Cpu, f32>(Cpu, config.clone());
    let reference = Reference::of(&student);
    let teacher = teacher(&config);
    let of_teacher = Reference::of(&teacher);
    let rows = config.vocab_size;
    student.set_teacher(Some(Teacher::new(teacher, shape, rows, 1.0).unwrap())).unwrap();
    let role = PassRole::Student { attention_output: true };
    let sizes = student.pass_sizes(shape).unwrap().in_role(role);
    let mut activations = Activations::with_slots(&Cpu, &sizes, Slots::ONE).unwrap();
    upload(&Cpu, &mut activations, 0);
    let mut gradients = FlatBuffers::<Cpu, f32>::zeros(&Cpu, student.layout()).unwrap();
    let mut sums = StepSums::new(&Cpu).unwrap();
    // Two micro-batches alike; what a step before has left is overwritten.
    for step in 0..2 {
        gradients.mark_stale();
        sums.zero(&Cpu).unwrap();
        for _ in 0..=step {
            let loss = AttentionOutputLoss {
                gradients: &mut gradients,
                scale: SCALE,
                straight_through: true,
            };
            let (slot, loss) = (PassSlot::default(), Some(loss));
            let taught =
                student.teach_chunk(&mut activations, slot, loss, &mut sums, &mut |_, _| Ok(()));
            taught.unwrap();
        }
    }
    let (ids, _) = micro_batch();
    let expected = (expected(&reference, &of_teacher, &ids) * 2.0).unwrap();
    let found = sums.take(&Cpu).unwrap().auxiliary[AuxiliaryLoss::AttentionOutput];
    let value = expected.to_scalar::<f64>().unwrap();
    assert!((found / value - 1.0).abs() < 1e-5, "{found} instead of {value}");
    let all = (expected * f64::from(SCALE)).unwrap().backward().unwrap();
    for (flat, segment) in student.layout().segments() {
        if segment.name.contains(".layers.") {
            let found = gradients.read(&Cpu, flat, segment).unwrap();
            match all.get(&reference.weights[&segment.name]) {
                Some(expected) => assert_gradient(&segment.name, &found, expected),
                None => assert!(found.iter().all(|&value| value == 0.0), "{}", segment.name),
            }
        }
    }
    let attention = |name: &&String| name.contains("self_attn") || name.contains("input_layernorm");
    let attention = reference.weights.keys().filter(attention);
    assert!(attention.filter(|name| all.get(&reference.weights[*name]).is_some()).count() >= 12);
}

#[test]
fn losses_and_gradients_are_those_of_the_formula() {
    for architecture in Architecture::ALL {
        // One layer is dense.
        is_the_formula(architecture, moh(RouterKind::QueryNorm, &[3, 8, 1], &[2, 0, 4]));
        is_the_formula(architecture, moh(RouterKind::Static, &[4], &[0]));
        is_the_formula(architecture, moh(RouterKind::TwoStage, &[3], &[2]));
    }
}

#[test]
fn passes_without_a_teacher_or_a_plan_have_no_loss() {
    let config = config(10, false, None);
    let mut student = model::<Cpu, f32>(Cpu, config.clone());
    let mut gradients = FlatBuffers::<Cpu, f32>::zeros(&Cpu, student.layout()).unwrap();
    let mut sums = StepSums::new(&Cpu).unwrap();
    let role = PassRole::Student { attention_output: false };
    let sizes = student.pass_sizes(SHAPE).unwrap().in_role(role);
    let mut activations = Activations::with_slots(&Cpu, &sizes, Slots::ONE).unwrap();
    upload(&Cpu, &mut activations, 0);
    let mut teach = |student: &mut Model<Cpu, f32>| {
        let loss =
            AttentionOutputLoss { gradients: &mut gradients, scale: SCALE, straight_through: true };
        let slot = PassSlot::default();
        let taught =
            student.teach_chunk(&mut activations, slot, Some(loss), &mut sums, &mut |_, _| Ok(()));
        taught.unwrap_err().to_string()
    };
    assert!(teach(&mut student).contains("planned without an attention-output loss"));
    let teacher = Teacher::new(teacher(&config), SHAPE, config.vocab_size, 1.0).unwrap();
    student.set_teacher(Some(teacher)).unwrap();
    assert!(teach(&mut student).contains("planned without an attention-output loss"));
    // The teacher is still there.
    student.teacher_sizes(SHAPE).unwrap();
}
