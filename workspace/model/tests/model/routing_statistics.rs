//! Statistics of routings from an evaluation equal the statistics of the tables of selected heads and gates, on every
//! device.

#[cfg(feature = "cuda-emulator")]
use moh_kernels::Cuda;
use moh_kernels::{Backend, Cpu, ElementType};
use moh_model::router::RoutingStatistics;
use moh_model::{Activations, Model, MohConfig, PassShape, Recompute, RouterKind, StepSums};
use moh_testkit::models::{SHAPE, config, model, moh, upload};

/// The second sequence of the micro-batch is padding.
const TOKENS: usize = 40;

/// Returns the statistics of an evaluation with this recomputation.
fn evaluated<B: Backend + Clone>(model: &mut Model<B>, recompute: Recompute) -> RoutingStatistics {
    let backend = model.backend().clone();
    let shape = PassShape { recompute, training: false, ..SHAPE };
    let mut activations = Activations::new(model, shape).unwrap();
    upload(&backend, &mut activations, 0);
    let mut statistics = model.routing_statistics();
    let mut sums = StepSums::new(&backend).unwrap();
    model.evaluate(&mut activations, &mut sums, Some((&mut statistics, TOKENS))).unwrap();
    statistics
}

fn agrees<B: Backend + Clone>(backend: B, moh: MohConfig) {
    let mut model = model(backend.clone(), ElementType::F32, config(16, true, Some(moh)));
    let shape = PassShape { recompute: Recompute::None, training: false, ..SHAPE };
    let mut activations = Activations::new(&model, shape).unwrap();
    upload(&backend, &mut activations, 0);
    model.forward(&mut activations, &mut StepSums::new(&backend).unwrap()).unwrap();
    let masks = model.routed_mask(&activations).unwrap();
    let gates = model.gates(&activations).unwrap();
    let statistics = evaluated(&mut model, Recompute::None);
    // Blocks that share a routing are counted when they are computed.
    assert_eq!(evaluated(&mut model, Recompute::Block), statistics);
    let layers: Vec<usize> = statistics.layers.iter().map(|layer| layer.layer).collect();
    let routes = |&layer: &usize| model.config().routed_heads(layer) > 0;
    assert_eq!(layers, (0..2).filter(routes).collect::<Vec<_>>());
    for found in &statistics.layers {
        let routed = model.config().routed_heads(found.layer);
        assert_eq!((found.tokens, found.shared_heads.len()), (TOKENS as u64, 8 - routed));
        let mask = &masks[found.layer][..TOKENS * routed];
        let column = |head| mask.iter().skip(head).step_by(routed).map(|&bit| u64::from(bit)).sum();
        assert_eq!(found.selected, (0..routed).map(column).collect::<Vec<u64>>());
        let top_k = model.config().layer_heads(found.layer).top_k;
        assert_eq!(found.selected.iter().sum::<u64>(), (TOKENS * top_k) as u64);
        let gates = gates[found.layer][..TOKENS * routed].iter().map(|&gate| f64::from(gate));
        let entropy = gates.map(|gate| -gate * gate.ln()).sum::<f64>() / TOKENS as f64;
        let mean = found.mean_entropy();
        assert!((mean - entropy).abs() < 1e-6, "{mean} {entropy}");
        assert!(entropy > 0.0 && entropy < found.max_entropy());
    }
}

#[test]
fn statistics_are_those_of_the_tables() {
    for (router, shared, top_k) in [
        (RouterKind::QueryNorm, [3, 3], [2, 2]),
        // Layers with different heads, and dense layers.
        (RouterKind::QueryNorm, [6, 1], [1, 4]),
        (RouterKind::QueryNorm, [8, 3], [0, 2]),
        (RouterKind::Group, [0, 0], [4, 4]),
        (RouterKind::Linear, [3, 3], [2, 2]),
        (RouterKind::OneStage, [3, 0], [2, 4]),
        (RouterKind::TwoStage, [3, 3], [2, 2]),
    ] {
        let moh = moh(router, &shared, &top_k);
        agrees(Cpu, moh.clone());
        #[cfg(feature = "cuda-emulator")]
        agrees(Cuda::emulated(), moh);
    }
}
