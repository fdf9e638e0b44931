//! Calibrations by the CUDA kernels, against calibrations by the CPU's operators.

#![cfg(feature = "cuda-emulator")]

use crate::support::{config, moh, run_on, with_more_heads};
use moh_calibrate::CalibrationOptions;
use moh_kernels::{Cpu, Cuda};
use moh_model::{MohConfig, RouterKind, SharedChoice};

/// Products that are summed in another order can choose another set of nearly the same error. These models have no such
/// sets.
#[test]
fn an_emulated_gpu_chooses_and_refits_as_the_cpu() {
    for (config, router, shared) in [
        (config("llama"), RouterKind::QueryNorm, SharedChoice::CalibratedNumber),
        (config("qwen3"), RouterKind::Group, SharedChoice::Calibrated),
        (config("llama"), RouterKind::TwoStage, SharedChoice::Calibrated),
        (with_more_heads(), RouterKind::QueryNorm, SharedChoice::Calibrated),
    ] {
        let moh = MohConfig { router, ..moh(4, 2) };
        let options = CalibrationOptions { moh, shared, refit: true, stored: None };
        let (expected, projections) = run_on(&Cpu, &config, &options);
        let (found, refitted) = run_on(&Cuda::emulated(), &config, &options);
        assert_eq!(found.moh, expected.moh);
        for (found, expected) in [
            (found.losses.dense, expected.losses.dense),
            (found.losses.calibrated, expected.losses.calibrated),
        ] {
            assert!((found - expected).abs() < 1e-5, "{router:?}: {found} {expected}");
        }
        let square = |x: f32| f64::from(x).powi(2);
        let (refitted, projections) = (refitted.concat(), projections.concat());
        let difference = refitted.iter().zip(&projections).map(|(a, b)| square(a - b)).sum::<f64>();
        let error = (difference / projections.iter().copied().map(square).sum::<f64>()).sqrt();
        assert!(error < 1e-3, "{router:?}: {error}");
    }
}
