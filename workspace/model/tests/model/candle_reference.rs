//! The model against candle's Llama, and its gradients against differences of its own loss. These checks need only the
//! repository.

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig};
use moh_hf::ConfigFile;
use moh_kernels::cross_entropy::IGNORED;
use moh_kernels::{Cpu, ElementType};
use moh_model::{
    Activations, Architecture, AuxiliaryLoss, AuxiliaryLosses, FlatBuffers, LossConfig, Model,
    PassShape, Recompute, RouterKind, Segment, StepSums, Sums,
};
use moh_testkit::models::{model_of, moh, weights};
use serde_json::{Value, json};

fn config_json(heads: usize, kv_heads: usize, tied: bool, scaling: Value) -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": heads * 6, "intermediate_size": 20, "num_hidden_layers": 3,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": 37,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": tied, "rope_scaling": scaling,
    })
}

#[test]
fn logits_are_those_of_candles_llama() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    });
    for (heads, kv_heads, tied, scaling) in [
        (4, 4, false, Value::Null),
        (4, 2, true, Value::Null),
        (6, 1, false, llama3.clone()),
        (3, 3, true, llama3),
    ] {
        let json = config_json(heads, kv_heads, tied, scaling);
        let config = ConfigFile::from_value(json.clone(), Path::new("config.json")).unwrap().config;
        let weights = weights(&config);
        let ids: Vec<u32> = (0..19).map(|i| (i * 11 + 5) % 37).collect();

        let mut ours = model_of(config, &weights);
        let shape = PassShape::evaluation(1, ids.len(), Recompute::None);
        let mut activations = Activations::new(&ours, shape).unwrap();
        activations.upload(&Cpu, &ids, &ids, &[]).unwrap();
        ours.forward(&mut activations, &mut StepSums::new(&Cpu).unwrap()).unwrap();
        let logits = ours.logits(&activations).unwrap();
        let last = &logits[(ids.len() - 1) * 37..];

        let device = Device::Cpu;
        let tensors = ours.layout().segments().map(|(_, Segment { name, slice, .. })| {
            (name.clone(), Tensor::from_slice(&weights[name], slice.shape(), &device).unwrap())
        });
        let candle = serde_json::from_value::<LlamaConfig>(json).unwrap().into_config(false);
        let builder = VarBuilder::from_tensors(tensors.collect(), DType::F32, &device);
        let llama = Llama::load(builder, &candle).unwrap();
        let mut cache = Cache::new(false, DType::F32, &candle, &device).unwrap();
        let input = Tensor::from_slice(&ids, (1, ids.len()), &device).unwrap();
        let expected: Vec<f32> =
            llama.forward(&input, 0, &mut cache).unwrap().flatten_all().unwrap().to_vec1().unwrap();
        for (a, b) in last.iter().zip(&expected) {
            assert!((a - b).abs() < 1e-4 * b.abs().max(1.0), "{heads}/{kv_heads}: {a}, not {b}");
        }
    }
}

/// Returns the loss of the gradient check: cross-entropy and balance loss, with a constant selection.
fn total_loss(
    model: &mut Model<Cpu>,
    ids: &[u32],
    targets: &[u32],
    count: f64,
) -> (f64, Vec<Vec<u8>>) {
    let shape = PassShape::evaluation(2, ids.len() / 2, Recompute::None);
    let mut activations = Activations::new(model, shape).unwrap();
    activations.upload(&Cpu, ids, targets, &[]).unwrap();
    let mut sums = StepSums::new(&Cpu).unwrap();
    model.evaluate(&mut activations, &mut sums, None).unwrap();
    let Sums { cross_entropy, auxiliary, .. } = sums.take(&Cpu).unwrap();
    let balance = auxiliary[AuxiliaryLoss::Balance];
    (cross_entropy / count + 0.1 * balance, model.routed_mask(&activations).unwrap())
}

#[test]
fn gradients_are_differences_of_the_loss() {
    // A factor of the scores, which must not change the router's gradient.
    let yarn = json!({"rope_type": "yarn", "factor": 4, "attention_factor": 1.4});
    let json = config_json(6, 2, false, yarn);
    let mut config = ConfigFile::from_value(json, Path::new("config.json")).unwrap().config;
    let moh = moh(RouterKind::QueryNorm, &[2], &[2]);
    let both = |architecture| [(architecture, None), (architecture, Some(moh.clone()))];
    for (architecture, moh) in Architecture::ALL.into_iter().flat_map(both) {
        (config.architecture, config.moh) = (architecture, moh);
        let weights = weights(&config);
        let ids: Vec<u32> = (0..22).map(|i| (i * 7 + i * i) % 37).collect();
        let mut targets: Vec<u32> = (0..22).map(|i| (i * 5 + 1) % 37).collect();
        targets[10] = IGNORED;
        let mut ours = model_of(config.clone(), &weights);
        let shape = PassShape { training: true, ..PassShape::evaluation(2, 11, Recompute::None) };
        let mut activations = Activations::new(&ours, shape).unwrap();
        activations.upload(&Cpu, &ids, &targets, &[]).unwrap();
        let mut gradients = FlatBuffers::zeros(&Cpu, ElementType::F32, ours.layout()).unwrap();
        let scale = LossConfig {
            cross_entropy: 1.0 / 21.0,
            auxiliary: AuxiliaryLosses::all(0.1),
            straight_through: false,
        };
        let mut sums = StepSums::new(&Cpu).unwrap();
        ours.forward_backward(&mut activations, &mut gradients, scale, &mut sums).unwrap();
        for (flat, segment) in ours.layout().segments() {
            let gradient = gradients.read(&Cpu, flat, segment).unwrap();
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            // The loss rises along its own gradient by the gradient's norm.
            let step = 5e-4;
            let moved = |sign: f64| {
                let mut weights = weights.clone();
                let values = weights.get_mut(&segment.name).unwrap();
                for (value, g) in values.iter_mut().zip(&gradient) {
                    *value += (sign * step * f64::from(*g) / norm) as f32;
                }
                total_loss(&mut model_of(config.clone(), &weights), &ids, &targets, 21.0)
            };
            let ((above, mask_above), (below, mask_below)) = (moved(1.0), moved(-1.0));
            assert_eq!(mask_above, mask_below, "{}: a selection changed", segment.name);
            let slope = (above - below) / (2.0 * step);
            assert!((slope - norm).abs() < 2e-2 * norm, "{}: {slope}, not {norm}", segment.name);
        }
    }
}
