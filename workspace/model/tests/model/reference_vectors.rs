//! The model against vectors of an independent PyTorch implementation, computed in f64: logits,
//! masks, losses and every gradient, dense and Mixture-of-Head.

use std::path::Path;

use moh_hf::{ConfigFile, Error, WeightFiles};
use moh_kernels::{Cpu, ElementType};
use moh_model::{
    Activations, AuxiliaryLoss, AuxiliaryLosses, EndsPass, FlatBuffers, Generator, LossConfig,
    Model, MohConfig, PassShape, Recompute, RouterKind, StepSums, Sums,
};
use moh_testkit::programs::fixtures;
use safetensors::SafeTensors;
use serde_json::Value;

/// Absolute tolerance of logits.
const LOGITS: f32 = 1e-4;
/// Relative tolerance of losses and of each gradient (L2).
const RELATIVE: f64 = 1e-4;

fn load(dir: &Path, moh: Option<MohConfig>) -> Model<Cpu> {
    let mut config = ConfigFile::read(&dir.join("config.json")).unwrap().config;
    config.moh = moh;
    let weights = WeightFiles::open(dir).unwrap();
    weights.check(&config).unwrap();
    let positions = config.max_position_embeddings;
    Model::new::<Error>(Cpu, ElementType::F32, config, positions, |segment, values| {
        weights.read_f32(&segment.name, values)
    })
    .unwrap()
}

fn moh_of(entry: &Value) -> MohConfig {
    let count = |key: &str| entry[key].as_u64().unwrap() as usize;
    let (shared_heads, routed_top_k) = (count("shared").into(), count("routed_top_k").into());
    MohConfig { router: RouterKind::QueryNorm, shared_heads, routed_top_k }
}

struct Vector {
    bytes: Vec<u8>,
    entry: Value,
}

impl Vector {
    fn all() -> Vec<Vector> {
        let dir = fixtures().join("vectors");
        let manifest: Value =
            serde_json::from_slice(&std::fs::read(dir.join("manifest.json")).unwrap()).unwrap();
        let vectors = manifest["vectors"].as_array().unwrap().iter();
        let read = |entry: &Value| {
            let bytes = std::fs::read(dir.join(entry["file"].as_str().unwrap())).unwrap();
            Vector { bytes, entry: entry.clone() }
        };
        vectors.map(read).collect()
    }

    fn model(&self, moh: Option<MohConfig>) -> Model<Cpu> {
        load(&fixtures().join("vectors").join(self.entry["model"].as_str().unwrap()), moh)
    }

    fn name(&self) -> &str {
        self.entry["name"].as_str().unwrap()
    }

    fn number(&self, key: &str) -> f64 {
        self.entry[key].as_f64().unwrap()
    }

    fn moh(&self) -> MohConfig {
        moh_of(&self.entry)
    }

    fn bytes(&self, tensor: &str) -> Vec<u8> {
        SafeTensors::deserialize(&self.bytes).unwrap().tensor(tensor).unwrap().data().to_vec()
    }

    fn f32(&self, tensor: &str) -> Vec<f32> {
        let chunks = self.bytes(tensor);
        chunks.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// Returns ids, and targets shifted by one; the last token of a sequence has no target.
    fn batch(&self) -> (usize, usize, Vec<u32>, Vec<u32>) {
        let [batch, length]: [usize; 2] =
            serde_json::from_value(self.entry["shape_ids"].clone()).unwrap();
        let ids: Vec<u32> = self
            .bytes("input_ids")
            .chunks_exact(8)
            .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32)
            .collect();
        let targets = EndsPass::<Cpu>::targets(&ids, length);
        (batch, length, ids, targets)
    }
}

fn worst(left: &[f32], right: &[f32]) -> f32 {
    assert_eq!(left.len(), right.len());
    left.iter().zip(right).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn relative_l2(left: &[f32], right: &[f32]) -> f64 {
    assert_eq!(left.len(), right.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = left.iter().zip(right).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = right.iter().map(|&b| square(b)).sum();
    (difference / norm.max(1e-30)).sqrt()
}

/// Computes a training pass, and returns (cross-entropy, balance loss).
fn pass(
    model: &mut Model<Cpu>,
    vector: &Vector,
    recompute: Recompute,
    straight_through: bool,
    gradients: &mut FlatBuffers<Cpu>,
) -> (f64, f64, Activations<Cpu>) {
    let (batch, length, ids, targets) = vector.batch();
    let shape = PassShape { training: true, ..PassShape::evaluation(batch, length, recompute) };
    let mut activations = Activations::new(model, shape).unwrap();
    activations.upload(&Cpu, &ids, &targets, &[]).unwrap();
    let mut sums = StepSums::new(&Cpu).unwrap();
    let count = (batch * (length - 1)) as f64;
    let scale = LossConfig {
        cross_entropy: (1.0 / count) as f32,
        auxiliary: AuxiliaryLosses::all(0.01),
        straight_through,
    };
    model.forward_backward(&mut activations, gradients, scale, &mut sums).unwrap();
    let Sums { cross_entropy, auxiliary, .. } = sums.take(&Cpu).unwrap();
    let balance = auxiliary[AuxiliaryLoss::Balance];
    (cross_entropy / count, balance, activations)
}

fn check_gradients(
    model: &Model<Cpu>,
    vector: &Vector,
    prefix: &str,
    gradients: &FlatBuffers<Cpu>,
) {
    for (flat, segment) in model.layout().segments() {
        let ours = gradients.read(&Cpu, flat, segment).unwrap();
        let expected = vector.f32(&format!("{prefix}.{}", segment.name));
        let error = relative_l2(&ours, &expected);
        assert!(error < RELATIVE, "{} {prefix}.{}: {error:e}", vector.name(), segment.name);
    }
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn dense_logits_loss_and_gradients_match_the_fixtures() {
    for vector in Vector::all() {
        let mut model = vector.model(None);
        let mut gradients = FlatBuffers::zeros(&Cpu, ElementType::F32, model.layout()).unwrap();
        let (loss, balance, activations) =
            pass(&mut model, &vector, Recompute::None, true, &mut gradients);
        let logits = model.logits(&activations).unwrap();
        let error = worst(&logits, &vector.f32("dense_logits"));
        assert!(error < LOGITS, "{}: logits off by {error}", vector.name());
        let expected = vector.number("dense_ce");
        assert!(((loss - expected) / expected).abs() < RELATIVE, "{loss} against {expected}");
        assert_eq!(balance, 0.0);
        check_gradients(&model, &vector, "grad_dense", &gradients);
        // With all eight heads the model equals the dense model, to the bit.
        let all = MohConfig { shared_heads: 4.into(), routed_top_k: 4.into(), ..vector.moh() };
        let mut moh = vector.model(Some(all));
        let (.., all) = pass(&mut moh, &vector, Recompute::Block, true, &mut gradients);
        assert_eq!(moh.logits(&all).unwrap(), logits);
    }
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn moh_logits_masks_gates_losses_and_gradients_match_the_fixtures() {
    for vector in Vector::all() {
        let mut model = vector.model(Some(vector.moh()));
        for (straight_through, prefix) in [(true, "grad"), (false, "grad_noste")] {
            let mut gradients = FlatBuffers::zeros(&Cpu, ElementType::F32, model.layout()).unwrap();
            let (loss, balance, activations) =
                pass(&mut model, &vector, Recompute::None, straight_through, &mut gradients);
            let error = worst(&model.logits(&activations).unwrap(), &vector.f32("moh_logits"));
            assert!(error < LOGITS, "{}: logits off by {error}", vector.name());
            assert_eq!(model.routed_mask(&activations).unwrap().concat(), vector.bytes("mask"));
            let gates = worst(&model.gates(&activations).unwrap().concat(), &vector.f32("gates"));
            assert!(gates < 1e-4, "{}: gates off by {gates}", vector.name());
            for (ours, key) in [(loss, "moh_ce"), (balance, "lb"), (loss + 0.01 * balance, "total")]
            {
                let expected = vector.number(key);
                let error = ((ours - expected) / expected).abs();
                assert!(error < RELATIVE, "{} {key}: {ours} against {expected}", vector.name());
            }
            check_gradients(&model, &vector, prefix, &gradients);
        }
    }
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn greedy_continuations_match_the_fixtures() {
    let fixtures = fixtures();
    for (file, model) in
        [("greedy-stories260K.json", "stories260K"), ("greedy-tiny-h8kv2.json", "tiny-h8kv2")]
    {
        let path = fixtures.join("vectors").join(file);
        let cases: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        for case in cases["cases"].as_array().unwrap() {
            let moh = case["shared"].is_u64().then(|| moh_of(case));
            let model = load(&fixtures.join(model), moh);
            let expected: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            let prompt = case["prompt_len"].as_u64().unwrap() as usize;
            assert_eq!(continue_greedily(&model, &expected[..prompt], expected.len()), expected);
        }
    }
}

fn continue_greedily(model: &Model<Cpu>, prompt: &[u32], length: usize) -> Vec<u32> {
    let mut generator = Generator::new(model, length).unwrap();
    let mut ids = prompt.to_vec();
    let mut logits = generator.extend(prompt).unwrap();
    while ids.len() < length {
        let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        ids.push(best as u32);
        if ids.len() < length {
            logits = generator.extend(&[best as u32]).unwrap();
        }
    }
    ids
}
