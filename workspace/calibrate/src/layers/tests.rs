//! The search by exchange beside that of all sets, in a pretrained model: the quickstart's, on the text of its
//! recipe. `cargo test -p moh-calibrate exchanges_find_the_best -- --nocapture` prints how they compare.

use std::path::Path;

use moh_data::TokenFile;
use moh_hf::{ConfigFile, WeightFiles};
use moh_kernels::Cpu;
use moh_model::{MohConfig, RouterKind};

use super::*;

/// Calibration tokens, in windows of 128; a search reads seven of nine.
const TOKENS: usize = 4096;

/// By how much the error of exchanges exceeds the least one, of each layer.
fn excess(router: RouterKind, shared: usize, active: usize) -> Vec<f64> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/quickstart");
    let config = ConfigFile::read(&directory).unwrap().config;
    let weights = WeightFiles::open(&directory).unwrap();
    let mut ids = vec![0; TOKENS];
    TokenFile::open(&directory.join("voyage")).unwrap().read(0, &mut ids).unwrap();
    let tokens = CalibrationTokens::new(ids, 128, TOKENS, &config).unwrap();
    let moh =
        MohConfig { router, shared_heads: shared.into(), routed_top_k: (active - shared).into() };
    let options = CalibrationOptions {
        moh: moh.clone(),
        shared: Shared::Calibrated,
        refit: true,
        stored: None,
    };
    let mut read = |name: &str, values: &mut [f32]| {
        weights.read_f32(name, values).unwrap();
        Ok::<_, Error>(())
    };
    let mut job = Job::new(&Cpu, &config, &options, &tokens, &mut read, &|| false).unwrap();
    let mut excess = Vec::new();
    for layer in 0..config.num_hidden_layers {
        let projection = job.load_source(layer).unwrap();
        let sample = job.sample(&projection).unwrap();
        let all = sample.best_set(&mut job.judged_sums, &[shared], active).unwrap();
        let numbers = std::iter::once(shared);
        let found = sample
            .best_by_exchange(&mut job.judged_sums, &sample.grams(), numbers, active)
            .unwrap();
        excess.push(found.error / all.error - 1.0);
        // The next layer of the dense model.
        job.measure(&moh.of_layer_alone(layer)).unwrap();
    }
    excess
}

#[test]
fn exchanges_find_the_best_sets_of_a_pretrained_model_or_nearly() {
    for (router, shared, active) in [
        (RouterKind::QueryNorm, 4, 6),
        (RouterKind::QueryNorm, 2, 4),
        (RouterKind::Static, 6, 6),
        (RouterKind::Static, 4, 4),
        (RouterKind::Group, 4, 6),
    ] {
        let excess = excess(router, shared, active);
        println!("{router:?}, {shared} of {active} active heads shared: {excess:.4?}");
        assert!(excess.iter().all(|excess| (0.0..0.1).contains(excess)), "{router:?}: {excess:?}");
    }
}
