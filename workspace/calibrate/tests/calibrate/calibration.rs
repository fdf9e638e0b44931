//! Whole calibrations of small random models.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::{LENGTH, Layers, config, moh, run_on, source, tokens, with_more_heads};
use moh_calibrate::{
    Calibration, CalibrationOptions, Error, FoundLayer, LayerCalibration, Losses, Watch, calibrate,
};
use moh_kernels::{Cpu, DType, ElementType};
use moh_model::{
    HeadCounts, Model, ModelConfig, MohConfig, RouterKind, SharedChoice, SharedHeadSets,
};

/// Returns a calibration, and the output projections that it refitted.
fn run(config: &ModelConfig, options: &CalibrationOptions) -> (Calibration, Vec<Vec<f32>>) {
    run_on(&Cpu, config, options)
}

/// Returns a refit with projections that stay in f32.
fn refit(moh: MohConfig, shared: SharedChoice) -> CalibrationOptions {
    CalibrationOptions { moh, shared, refit: true, stored: None }
}

/// Returns the message with which a calibration of these weights fails.
fn failure(
    config: &ModelConfig,
    options: &CalibrationOptions,
    mut weights: impl FnMut(&str, &mut [f32]) -> Result<(), Error>,
) -> String {
    let tokens = tokens(config);
    let watch = Watch { progress: &mut |_, _| (), is_stopped: &|| false };
    calibrate(&Cpu, config, options, &tokens, &mut weights, &mut Layers::default(), watch)
        .unwrap_err()
        .to_string()
}

/// Returns the active heads of the three layers.
fn active(moh: &MohConfig) -> [usize; 3] {
    [0, 1, 2].map(|layer| moh.layer(layer).active())
}

/// Returns the mean cross-entropy over the held-out tokens, by the logits of a whole model with these output
/// projections and these matrices of a router.
fn loss(
    config: &ModelConfig,
    moh: Option<MohConfig>,
    projections: &[Vec<f32>],
    routers: &[Vec<f32>],
) -> f64 {
    let config = ModelConfig { moh, ..config.clone() };
    let mut read = source(&config);
    let mut model =
        Model::new::<Error>(Cpu, ElementType::F32, config.clone(), LENGTH, |segment, values| {
            read(&segment.name, values)?;
            if segment.name.ends_with("router.stages.weight") {
                values.fill(0.0);
            }
            for (name, tensors) in [("o_proj", projections), ("router", routers)] {
                for (layer, tensor) in tensors.iter().enumerate() {
                    if segment.name == format!("model.layers.{layer}.self_attn.{name}.weight") {
                        values.copy_from_slice(tensor);
                    }
                }
            }
            Ok(())
        })
        .unwrap();
    let held_out = tokens(&config).held_out();
    let windows: Vec<Vec<u32>> = held_out.chunks(LENGTH).map(<[u32]>::to_vec).collect();
    let output = model.run(&windows).unwrap();
    let mut sum = 0.0;
    for (window, logits) in windows.iter().zip(output.logits.chunks_exact(LENGTH * 60)) {
        for (logits, &target) in logits.chunks_exact(60).zip(&window[1..]) {
            let largest = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
            let exponentials = logits.iter().map(|&logit| (f64::from(logit) - largest).exp());
            sum += exponentials.sum::<f64>().ln() + largest - f64::from(logits[target as usize]);
        }
    }
    sum / (windows.len() * (LENGTH - 1)) as f64
}

#[test]
fn losses_are_those_of_whole_models() {
    for (config, moh) in [
        (config("llama"), moh(3, 2)),
        (config("qwen3"), moh(3, 2)),
        (with_more_heads(), moh(8, 4)),
        (with_more_heads(), MohConfig { router: RouterKind::Group, ..moh(8, 4) }),
    ] {
        for (shared, stored) in [
            (SharedChoice::Calibrated, None),
            (SharedChoice::CalibratedNumber, Some(DType::BF16)),
            (SharedChoice::Given, None),
        ] {
            let options = CalibrationOptions { stored, ..refit(moh.clone(), shared) };
            let (found, projections) = run(&config, &options);
            assert_eq!(projections.len(), 3);
            let Losses { dense, calibrated } = found.losses;
            let expected = loss(&config, None, &[], &[]);
            assert!((expected - dense).abs() < 1e-5, "{expected} {dense}");
            let expected = loss(&config, Some(found.moh.clone()), &projections, &[]);
            assert!((expected - calibrated).abs() < 1e-5, "{options:?}: {expected} {calibrated}");
            let mut rounded = projections.concat();
            DType::BF16.round(&mut rounded);
            assert_eq!(rounded == projections.concat(), stored.is_some());
            assert_eq!(active(&found.moh), active(&moh));
            for (layer, measured) in found.layers.iter().enumerate() {
                assert_eq!(measured.shared, found.moh.layer(layer).shared);
                assert!(measured.error.unwrap() < measured.error_before, "{measured:?}");
            }
        }
    }
}

#[test]
fn sets_are_better_than_the_first_heads_and_a_free_number_is_no_worse() {
    let config = config("llama");
    let run = |shared| run(&config, &refit(moh(4, 2), shared)).0;
    let first_layer = |found: &Calibration| found.layers[0].error.unwrap();
    let (given, sets) = (run(SharedChoice::Given), run(SharedChoice::Calibrated));
    assert_eq!(given.moh.shared_heads, SharedHeadSets::from(4));
    // The first layer sees the dense model's activations. Sets are judged on them too, but on other tokens.
    assert!(first_layer(&sets) < first_layer(&given), "{sets:?} {given:?}");
    let number = first_layer(&run(SharedChoice::CalibratedNumber));
    assert!(number < 1.02 * first_layer(&sets), "{number} {sets:?}");
}

#[test]
fn all_heads_keep_the_dense_model() {
    let config = config("llama");
    let (found, projections) = run(&config, &refit(moh(3, 5), SharedChoice::Given));
    assert!((found.losses.calibrated - found.losses.dense).abs() < 1e-5);
    let mut old = vec![0f32; projections[1].len()];
    source(&config)("model.layers.1.self_attn.o_proj.weight", &mut old).unwrap();
    let change = projections[1].iter().zip(&old).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(change < 1e-4, "{change}");
}

#[test]
fn without_a_refit_the_weights_stay() {
    let config = config("llama");
    let options = CalibrationOptions { refit: false, ..refit(moh(4, 2), SharedChoice::Calibrated) };
    let (found, projections) = run(&config, &options);
    assert!(projections.is_empty() && found.layers.iter().all(|layer| layer.error.is_none()));
    let expected = loss(&config, Some(found.moh.clone()), &[], &[]);
    assert!((expected - found.losses.calibrated).abs() < 1e-5);
}

#[test]
fn the_bits_do_not_depend_on_the_threads() {
    for (config, router, shared) in [
        (config("llama"), RouterKind::QueryNorm, SharedChoice::Calibrated),
        (config("llama"), RouterKind::Linear, SharedChoice::Calibrated),
        (config("llama"), RouterKind::TwoStage, SharedChoice::CalibratedNumber),
        (with_more_heads(), RouterKind::QueryNorm, SharedChoice::CalibratedNumber),
    ] {
        let options = refit(MohConfig { router, ..moh(4, 2) }, shared);
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| run(&config, &options))
        };
        assert_eq!(on(1), on(3));
    }
}

/// A whole model with the fitted rows has the measured loss, so it routes as the measurement did.
#[test]
fn rows_are_fitted_for_the_stream_that_the_router_reads() {
    for (model_type, router, shared) in [
        ("llama", RouterKind::Linear, SharedChoice::CalibratedNumber),
        ("qwen3", RouterKind::Linear, SharedChoice::CalibratedNumber),
        ("llama", RouterKind::OneStage, SharedChoice::Calibrated),
        ("llama", RouterKind::TwoStage, SharedChoice::Calibrated),
        ("qwen3", RouterKind::TwoStage, SharedChoice::CalibratedNumber),
    ] {
        let config = config(model_type);
        let moh = MohConfig { router, ..moh(3, 2) };
        let (found, projections) = run(&config, &refit(moh, shared));
        for layer in found.layers.iter().filter(|layer| layer.shared.len() < 8) {
            let fit = layer.router.as_ref().unwrap();
            assert_eq!(fit.rows.len(), 8 * 32);
            assert!(layer.error.unwrap() < layer.error_before, "{layer:?}");
            assert!(fit.explained > 0.05 && fit.explained < 1.0, "{}", fit.explained);
        }
        let rows = |layer: &LayerCalibration| {
            layer.router.as_ref().map_or_else(Vec::new, |fit| fit.rows.clone())
        };
        let routers: Vec<Vec<f32>> = found.layers.iter().map(rows).collect();
        let expected = loss(&config, Some(found.moh.clone()), &projections, &routers);
        let measured = found.losses.calibrated;
        assert!((expected - measured).abs() < 1e-5, "{router:?}: {expected} {measured}");
    }
}

#[test]
fn a_layer_whose_heads_are_all_shared_is_left_dense() {
    let config = config("llama");
    let shared_heads = HeadCounts::Each(vec![8, 4, 4]).into();
    let routed_top_k = HeadCounts::Each(vec![0, 2, 2]);
    let moh = MohConfig { shared_heads, routed_top_k, ..moh(4, 2) };
    let (found, _) = run(&config, &refit(moh, SharedChoice::CalibratedNumber));
    assert_eq!((found.layers[0].shared.len(), found.layers[0].top_k), (8, 0));
    // Only the rounding of products in f32 is left, mostly of a few first tokens.
    assert!(found.layers[0].error.unwrap() < 1e-6);
}

#[test]
fn weights_that_are_not_finite_are_named_by_layer() {
    for (config, moh, shared) in [
        (config("llama"), moh(4, 2), SharedChoice::Given),
        (config("llama"), moh(4, 2), SharedChoice::Calibrated),
        (with_more_heads(), moh(8, 2), SharedChoice::Calibrated),
        (with_more_heads(), moh(8, 2), SharedChoice::CalibratedNumber),
    ] {
        let mut read = source(&config);
        let message = failure(&config, &refit(moh, shared), |name, values| {
            read(name, values)?;
            if name == "model.layers.1.self_attn.v_proj.weight" {
                // A weight of the last key/value head.
                *values.last_mut().unwrap() = f32::NAN;
            }
            Ok(())
        });
        assert!(
            message.starts_with("layer 1: the heads' outputs have a value that is not finite"),
            "{shared:?}: {message}"
        );
    }
}

#[test]
fn a_calibration_stops_within_a_layer() {
    let config = config("llama");
    let (mut layers, mut kept) = (Vec::new(), Layers::default());
    let asked = AtomicUsize::new(0);
    // Stops in the search of the second layer.
    let is_stopped = || asked.fetch_add(1, Ordering::Relaxed) == 1000;
    let found = calibrate::<Cpu, Error>(
        &Cpu,
        &config,
        &refit(moh(4, 2), SharedChoice::Calibrated),
        &tokens(&config),
        &mut source(&config),
        &mut kept,
        Watch { progress: &mut |done, all| layers.push((done, all)), is_stopped: &is_stopped },
    );
    assert_eq!(found.unwrap(), None);
    assert_eq!((layers, asked.into_inner()), (vec![(0, 3), (1, 3)], 1001));
    assert_eq!(kept.0.len(), 1);
}

#[test]
fn a_calibration_goes_on_behind_the_layers_that_are_known() {
    for (config, router, shared) in [
        (config("llama"), RouterKind::QueryNorm, SharedChoice::Calibrated),
        (config("qwen3"), RouterKind::TwoStage, SharedChoice::Calibrated),
        (with_more_heads(), RouterKind::Group, SharedChoice::CalibratedNumber),
    ] {
        let options = refit(MohConfig { router, ..moh(4, 4) }, shared);
        let run = |known: &[FoundLayer]| {
            let (mut layers, watch) =
                (Layers(known.to_vec()), Watch { progress: &mut |_, _| (), is_stopped: &|| false });
            let tokens = tokens(&config);
            let mut weights = source(&config);
            let found =
                calibrate(&Cpu, &config, &options, &tokens, &mut weights, &mut layers, watch);
            (found.unwrap().unwrap(), layers.0)
        };
        let (found, layers) = run(&[]);
        for known in 1..=layers.len() {
            assert_eq!(
                run(&layers[..known]),
                (found.clone(), layers.clone()),
                "{router:?} {known}"
            );
        }
    }
}
