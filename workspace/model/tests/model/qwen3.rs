//! Qwen3 against that of transformers, whose logits `tools/peer/qwen3_logits.py` wrote. With
//! Mixture-of-Head attention it is compared in f64 (`moh_reference.rs`).

use std::collections::HashMap;
use std::path::Path;

use moh_hf::ConfigFile;
use moh_kernels::Cpu;
use moh_model::layout::ModelLayout;
use moh_model::{
    Activations, Architecture, Error, Generator, Model, ModelConfig, MohConfig, PassShape,
    Recompute, RouterKind, StepSums, initial,
};
use serde_json::Value;

/// Tensors by name.
type Weights = HashMap<String, Vec<f32>>;

/// The models that transformers computed: configuration, token ids, and logits.
fn cases() -> Vec<(ModelConfig, Vec<u32>, Vec<f64>)> {
    let cases: Vec<Value> = serde_json::from_str(include_str!("qwen3_logits.json")).unwrap();
    let case = |case: Value| {
        let file = ConfigFile::from_value(case["config"].clone(), Path::new("config.json"));
        let ids = serde_json::from_value(case["ids"].clone()).unwrap();
        let logits: Vec<Vec<f64>> = serde_json::from_value(case["logits"].clone()).unwrap();
        (file.unwrap().config, ids, logits.concat())
    };
    cases.into_iter().map(case).collect()
}

/// Random matrices, and norms around 1, as the script draws them.
fn weights(config: &ModelConfig) -> Weights {
    let draw = |name: &str, shape: &[usize]| {
        let mut values = vec![0f32; shape.iter().product()];
        initial::initialize(3, 0.3, name, &[values.len(), 1], &mut values);
        if shape.len() == 1 {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        values
    };
    let layout = ModelLayout::new(config);
    layout.segments().map(|(_, s)| (s.name.clone(), draw(&s.name, s.shape()))).collect()
}

fn model(config: &ModelConfig, weights: &Weights) -> Model<Cpu, f32> {
    Model::new::<Error>(Cpu, config.clone(), 32, |segment, values| {
        values.copy_from_slice(&weights[&segment.name]);
        Ok(())
    })
    .unwrap()
}

fn logits(config: &ModelConfig, weights: &Weights, ids: &[u32]) -> Vec<f32> {
    let mut model = model(config, weights);
    let (batch, length) = (1, ids.len());
    let (recompute, training, document_mask) = (Recompute::None, false, false);
    let shape = PassShape { batch, length, recompute, training, document_mask };
    let mut activations = Activations::new(&model, shape).unwrap();
    activations.upload(&Cpu, ids, ids, &[]).unwrap();
    model.forward(&mut activations, &mut StepSums::new(&Cpu).unwrap()).unwrap();
    model.logits(&activations).unwrap()
}

fn assert_close(found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (a, b) in found.iter().zip(expected) {
        assert!((f64::from(*a) - b).abs() < tolerance, "{a}, expected {b}");
    }
}

#[test]
fn logits_are_those_of_transformers() {
    for (config, ids, expected) in cases() {
        assert_eq!(config.architecture, Architecture::Qwen3);
        let weights = weights(&config);
        assert_close(&logits(&config, &weights, &ids), &expected, 1e-4);
    }
}

#[test]
fn tokens_that_come_one_by_one_give_the_same_logits() {
    let (dense, ids, _) = cases().remove(0);
    let router = RouterKind::QueryNorm;
    let moh = Some(MohConfig { router, shared_heads: 0.into(), routed_top_k: 3.into() });
    let config = ModelConfig { moh, ..dense };
    let weights = weights(&config);
    let expected: Vec<f64> = logits(&config, &weights, &ids).into_iter().map(f64::from).collect();
    let model = model(&config, &weights);
    let mut generator = Generator::new(&model, ids.len()).unwrap();
    for (id, expected) in ids.iter().zip(expected.chunks_exact(config.vocab_size)) {
        assert_close(&generator.extend(&[*id]).unwrap(), expected, 1e-4);
    }
}
