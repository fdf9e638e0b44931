//! Measures of heads, compared with the model's own passes.

#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::ops::ControlFlow;

use moh_kernels::{Cpu, ElementType};
use moh_model::tensors::tensor_shapes;
use moh_model::{
    Architecture, HeadCounts, Model, ModelConfig, MohConfig, RouterKind, SharedHeadSets, initial,
};
use moh_report::head_measures::Error;
use moh_report::head_measures::{HeadReport, HeadText, measure_heads, sentence};

const LENGTH: usize = 24;

fn config(architecture: Architecture, moh: Option<MohConfig>) -> ModelConfig {
    let config = moh_testkit::models::config(6, true, moh);
    ModelConfig { architecture, num_hidden_layers: 3, num_key_value_heads: 4, ..config }
}

/// Returns three layers: with 2 shared heads, with all heads shared, and with 2 other shared heads.
fn moh(router: RouterKind) -> MohConfig {
    let shared_heads =
        SharedHeadSets::from_ids(&[vec![0, 1], (0..8).collect(), vec![4, 5]]).unwrap();
    let routed_top_k: HeadCounts = match router {
        RouterKind::Static => [0, 0, 0].into_iter().collect(),
        _ => [2, 0, 4].into_iter().collect(),
    };
    MohConfig { router, shared_heads, routed_top_k }
}

/// Returns random matrices. Fails if asked for a tensor that the model does not have.
fn weights(config: &ModelConfig) -> impl FnMut(&str, &mut [f32]) -> Result<(), Error> {
    let names: HashSet<String> = tensor_shapes(config).into_iter().map(|(name, _)| name).collect();
    move |name, values| {
        assert!(names.contains(name), "{name}");
        let shape =
            if name.ends_with("norm.weight") { vec![values.len()] } else { vec![values.len(), 1] };
        initial::initialize(5, 0.2, name, &shape, values);
        Ok(())
    }
}

fn texts() -> Vec<HeadText> {
    let ids = |windows: usize, factor: u32| {
        (0..(windows * LENGTH) as u32).map(|i| (i * i + factor * i) % 61).collect()
    };
    let text = |name: &str, ids| HeadText { name: name.to_owned(), ids };
    vec![text("a", ids(3, 7)), text("b", ids(2, 11))]
}

fn measure(config: &ModelConfig) -> HeadReport {
    let mut source = weights(config);
    let mut go_on = |_, _| ControlFlow::Continue(());
    measure_heads(&Cpu, config, &texts(), LENGTH, &mut source, &mut go_on).unwrap().unwrap()
}

#[test]
fn all_tokens_compute_all_heads_of_a_dense_model() {
    for architecture in [Architecture::Llama, Architecture::Qwen3] {
        let (texts, layers) = measure(&config(architecture, None));
        assert_eq!(texts.iter().map(|text| text.tokens).collect::<Vec<_>>(), [72, 48]);
        assert_eq!(layers.len(), 3);
        for layer in &layers {
            assert_eq!(layer.gate_entropy, None);
            for (index, head) in layer.heads.iter().enumerate() {
                assert_eq!(
                    (head.head, head.shared, &head.load[..]),
                    (index, true, &[1.0, 1.0][..])
                );
                assert_eq!(layer.pattern_similarities[index][index], Some(1.0));
                assert_eq!(layer.output_similarities[index][index], Some(1.0));
                assert!((1..=6).contains(&head.feature_rank));
                let (distance, entropy) = (head.distance.unwrap(), head.entropy.unwrap());
                assert!(distance > 0.0 && distance < LENGTH as f64);
                assert!(entropy > 0.0 && entropy <= (LENGTH as f64).ln());
            }
            let pairs = layer.pattern_similarities.iter().flatten().map(|value| value.unwrap());
            assert!(pairs.clone().all(|value| (0.0..=1.0).contains(&value)));
            let mean = (pairs.sum::<f64>() - 8.0) / 56.0;
            assert!((mean - layer.pattern_similarity.unwrap()).abs() < 1e-12);
        }
    }
}

#[test]
fn loads_are_those_of_the_heads_that_the_model_selects() {
    for router in RouterKind::ALL {
        let config = config(Architecture::Llama, Some(moh(router)));
        let (_, layers) = measure(&config);
        let mut source = weights(&config);
        let load = |segment: &moh_model::layout::Segment, values: &mut [f32]| {
            source(&segment.name, values)
        };
        let mut model = Model::new(Cpu, ElementType::F32, config.clone(), LENGTH, load).unwrap();
        for (text, HeadText { ids, .. }) in texts().iter().enumerate() {
            let windows: Vec<Vec<u32>> = ids.chunks(LENGTH).map(<[u32]>::to_vec).collect();
            let output = model.run(&windows).unwrap();
            for (layer, head) in (0..3).flat_map(|layer| (0..8).map(move |head| (layer, head))) {
                let places =
                    (0..windows.len()).flat_map(|row| (0..LENGTH).map(move |at| (row, at)));
                let computes = |&(row, at): &(usize, usize)| {
                    output.active_heads(layer, row, at).contains(&head)
                };
                let expected = places.filter(computes).count() as f64 / ids.len() as f64;
                let found = layers[layer].heads[head].load[text];
                assert_eq!(found, expected, "{router:?}, layer {layer}, head {head}");
            }
        }
        let has_gates = |layer: usize| layers[layer].gate_entropy.is_some();
        assert_eq!([0, 1, 2].map(has_gates), [router.selects(), false, router.selects()]);
        assert!(layers[1].heads.iter().all(|head| head.shared && head.load == [1.0, 1.0]));
    }
}

#[test]
fn heads_that_no_token_computes_have_no_attention() {
    let (_, layers) = measure(&config(Architecture::Llama, Some(moh(RouterKind::Static))));
    let layer = &layers[0];
    let idle = &layer.heads[5];
    assert_eq!((idle.load.as_slice(), idle.distance, idle.entropy), (&[0.0, 0.0][..], None, None));
    assert_eq!((idle.feature_rank, idle.tokens.len()), (0, 0));
    assert_eq!(layer.pattern_similarities[0][5], None);
    assert_eq!(layer.pattern_similarity, layer.pattern_similarities[0][1]);
}

#[test]
fn a_sentence_has_the_heads_of_each_token_and_maps_of_all_heads() {
    let config = config(Architecture::Qwen3, Some(moh(RouterKind::TwoStage)));
    let ids = &texts()[0].ids[..13];
    let layers = sentence(&Cpu, &config, ids, &mut weights(&config)).unwrap();
    assert_eq!(layers[2].shared_heads, [4, 5]);
    for (layer, active) in [(0, 4), (1, 8), (2, 6)] {
        let found = &layers[layer];
        assert!(found.active.iter().all(|heads| heads.len() == active));
        let shared = &found.shared_heads;
        assert!(found.active.iter().all(|heads| shared.iter().all(|head| heads.contains(head))));
        assert_eq!((found.maps.len(), found.maps[0].len()), (8, 13));
        assert_eq!((found.gates.is_some(), found.weights.is_some()), (layer != 1, layer != 1));
        for (active, weights) in found.active.iter().zip(found.weights.iter().flatten()) {
            let weighed = (0..8).filter(|&head| weights[head] != 0.0).collect::<Vec<_>>();
            assert_eq!(&weighed, active);
        }
        for gates in found.gates.iter().flatten() {
            assert!((gates.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        }
        for row in found.maps.iter().flatten() {
            assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        }
        assert_eq!(found.maps[3][12].len(), 13);
    }
}

#[test]
fn texts_and_sentences_that_cannot_be_measured_are_refused() {
    let config = config(Architecture::Llama, None);
    let mut go_on = |_, _| ControlFlow::Continue(());
    let mut refused = |ids: usize| {
        let texts = [HeadText { name: "x".into(), ids: vec![1; ids] }];
        let source = &mut weights(&config);
        measure_heads(&Cpu, &config, &texts, LENGTH, source, &mut go_on).unwrap_err().to_string()
    };
    assert_eq!(refused(25), "x has 25 tokens: not whole windows of 24");
    assert_eq!(refused(0), "x has 0 tokens: not whole windows of 24");
    for ids in [vec![], vec![1; 65]] {
        let error = sentence(&Cpu, &config, &ids, &mut weights(&config)).unwrap_err().to_string();
        assert!(error.ends_with("tokens: must have 1 to 64"), "{error}");
    }
    let mut stop = |_, _| ControlFlow::Break(());
    let source = &mut weights(&config);
    assert_eq!(measure_heads(&Cpu, &config, &texts(), LENGTH, source, &mut stop).unwrap(), None);
}
