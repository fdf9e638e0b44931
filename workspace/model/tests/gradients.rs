//! Gradients that a step begins with: those of the step before, forgotten, are as good as zeros.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use half::bf16;
use moh_hf::ConfigFile;
use moh_kernels::{Cpu, Element};
use moh_model::parameters::FlatBuffers;
use moh_model::{
    Activations, Error, LossScale, Model, MohConfig, PassShape, Recompute, Router, StepSums,
    initial,
};
use serde_json::json;

const VOCABULARY: u32 = 61;

fn model<T: Element>(tied: bool) -> Model<Cpu, T> {
    let json = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": tied,
    });
    let mut config = ConfigFile::from_value(json, Path::new("config.json")).unwrap().config;
    config.moh = Some(MohConfig { router: Router::QueryNorm, shared_heads: 3, routed_top_k: 2 });
    Model::new::<Error>(Cpu, config, 64, |segment, values| {
        initial::initialize(3, 0.2, &segment.name, &[values.len(), 1], values);
        Ok(())
    })
    .unwrap()
}

/// The gradients of two micro-batches, from `before` in every number: added to it or, forgotten,
/// instead of it.
fn of_two_passes<T: Element, G: Element>(
    (tied, recompute): (bool, Recompute),
    before: f32,
    forget: bool,
) -> Vec<f32> {
    let mut model = model::<T>(tied);
    let (batch, length) = (2, 20);
    let shape = PassShape { batch, length, recompute, training: true, document_mask: false };
    let mut activations = Activations::new(&model, shape).unwrap();
    let mut sums = StepSums::new(&Cpu).unwrap();
    let mut gradients = FlatBuffers::<Cpu, G>::zeros(&Cpu, model.layout()).unwrap();
    let fill = |_: &_, values: &mut [f32]| -> Result<(), Error> {
        values.fill(before);
        Ok(())
    };
    gradients.fill(&Cpu, model.layout(), fill).unwrap();
    if forget {
        gradients.forget();
    }
    let scale = LossScale { cross_entropy: 1.0 / 80.0, balance: 0.1, straight_through: true };
    for pass in 0..2 {
        let ids: Vec<u32> = (0..40).map(|i| (i * 37 + pass) % VOCABULARY).collect();
        let targets: Vec<u32> = ids.iter().map(|id| (id * 7 + 3) % VOCABULARY).collect();
        activations.upload(&Cpu, &ids, &targets, &[]).unwrap();
        model.forward_backward(&mut activations, &mut gradients, scale, &mut sums).unwrap();
    }
    let segments = model.layout().segments();
    segments.flat_map(|(flat, segment)| gradients.read(&Cpu, flat, segment).unwrap()).collect()
}

#[test]
fn forgotten_gradients_are_zeros_to_the_bit() {
    fn check<T: Element, G: Element>() {
        for tied in [false, true] {
            for recompute in [Recompute::None, Recompute::Cheap, Recompute::Block] {
                let expected = of_two_passes::<T, G>((tied, recompute), 0.0, false);
                let found = of_two_passes::<T, G>((tied, recompute), f32::NAN, true);
                // 0 and -0 are equal, as they are to the update.
                assert!(found == expected, "tied: {tied}, {recompute:?}");
                let added = of_two_passes::<T, G>((tied, recompute), 1.0, false);
                assert!(added != expected, "gradients that nobody forgot are added to");
            }
        }
    }
    check::<f32, f32>();
    check::<bf16, f32>();
    check::<bf16, bf16>();
}
