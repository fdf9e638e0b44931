//! Qwen3 against the logits of transformers, which `tools/peer/qwen3_logits.py` wrote. `moh_reference.rs` compares
//! Qwen3 with Mixture-of-Head attention in f64.

use std::path::Path;

use moh_hf::ConfigFile;
use moh_kernels::Cpu;
use moh_model::{
    Activations, Architecture, Generator, ModelConfig, PassShape, Recompute, RouterKind, StepSums,
};
use moh_testkit::models::{Weights, model_of, moh, weights};
use serde_json::Value;

/// Returns the models that transformers computed, with weights drawn as in the script: configuration, token ids, and
/// logits.
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

fn logits(config: &ModelConfig, weights: &Weights, ids: &[u32]) -> Vec<f32> {
    let mut model = model_of(config.clone(), weights);
    let shape = PassShape::evaluation(1, ids.len(), Recompute::None);
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
    let moh = Some(moh(RouterKind::QueryNorm, &[0], &[3]));
    let config = ModelConfig { moh, ..dense };
    let weights = weights(&config);
    let expected: Vec<f64> = logits(&config, &weights, &ids).into_iter().map(f64::from).collect();
    let model = model_of(config.clone(), &weights);
    let mut generator = Generator::new(&model, ids.len()).unwrap();
    for (id, expected) in ids.iter().zip(expected.chunks_exact(config.vocab_size)) {
        assert_close(&generator.extend(&[*id]).unwrap(), expected, 1e-4);
    }
}
