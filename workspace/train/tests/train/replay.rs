//! A step of a run is replayed from a checkpoint before it, with the numbers of the run, and nothing in the
//! run directory changes.

use crate::support::driver::{finish, finish_on, replay, stop_at};
use crate::support::{TestRun, arranged, files, run_of, shorten};
use moh_testkit::assert_refused;

#[test]
fn every_step_has_the_numbers_of_the_run() {
    for changes in [
        &["checkpoint.every_steps=4"][..],
        &["memory.recompute=block", "data.document_mask=true"],
        &["run.dtype=bf16", "precision.moments=bf16", "model.new.model_type=qwen3"],
        &["stage.moh.data={sequence_length=16, document_mask=true}"],
    ] {
        let place = TestRun::new();
        let recipe = place.recipe(changes);
        let results = finish(&recipe);
        let before = files(&recipe.run.dir);
        for (step, line) in (1..).zip(&results.metrics) {
            let found = replay(&recipe, step).unwrap();
            assert_eq!((found.step, found.stage_step), (step, line["step"].as_u64().unwrap()));
            assert_eq!(found.result.loss, line["loss"].as_f64().unwrap(), "{changes:?}");
            assert_eq!(found.result.grad_norm, line["grad_norm"].as_f64().unwrap(), "{changes:?}");
            for (loss, value) in found.result.auxiliary.iter() {
                assert_eq!(value, line[loss.name()].as_f64());
            }
            assert_eq!(found.learning_rate, line["learning_rate"].as_f64().unwrap());
            assert!(found.from < step);
        }
        assert!(files(&recipe.run.dir) == before, "{changes:?}");
    }
}

#[test]
fn the_parts_of_a_step_add_up() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    stop_at(&recipe, 9);
    // A process that trains in the directory does not matter.
    let _lock = run_of(&recipe).lock().unwrap();
    let found = replay(&recipe, 9).unwrap();
    assert_eq!((found.from, found.stage.as_str()), (8, "moh"));
    let squares: f64 = found.gradients.iter().map(|tensor| tensor.norm.powi(2)).sum();
    assert!((squares.sqrt() / found.result.grad_norm - 1.0).abs() < 1e-12);
    assert_eq!(found.gradients.len(), 2 * 9 + 3);
    let of_block = |block| found.gradients.iter().filter(|tensor| tensor.block == block).count();
    assert_eq!([Some(0), Some(1), None].map(of_block), [9, 9, 3]);
    assert_eq!(found.blocks.len(), 2);
    for block in &found.blocks {
        for magnitude in [&block.attention, &block.mlp] {
            assert!(0.0 < magnitude.rms() && magnitude.rms() < f64::from(magnitude.largest));
        }
    }
    // Each token of 8 sequences of 8 selects two of three heads.
    assert_eq!(found.routing.layers.len(), 2);
    for layer in &found.routing.layers {
        assert_eq!((layer.tokens, layer.selected.iter().sum::<u64>()), (64, 128));
        assert!(layer.mean_entropy() <= layer.max_entropy() + 1e-6);
    }
    // A dense stage does not route.
    assert!(replay(&recipe, 3).unwrap().routing.layers.is_empty());
}

#[test]
fn samples_are_found_in_their_files() {
    let place = TestRun::new();
    let recipe = place.recipe(&["data.order=sequential"]);
    finish(&recipe);
    assert_eq!(moh_train::replay_from(&run_of(&recipe), 3).unwrap(), 0);
    let found = replay(&recipe, 3).unwrap();
    let file = moh_data::TokenFile::open(&place.path("text")).unwrap();
    assert_eq!(found.samples.len(), 8);
    for (number, sample) in (16..).zip(&found.samples) {
        assert_eq!(sample.number, number);
        assert_eq!(sample.path, place.path("text"));
        assert_eq!((sample.tokens.end - sample.tokens.start, sample.tokens.start % 8), (9, 0));
        let (first, last) = (sample.documents.start, sample.documents.end - 1);
        assert!(file.document(first).unwrap().contains(&sample.tokens.start));
        assert!(file.document(last).unwrap().contains(&(sample.tokens.end - 1)));
    }
}

#[test]
fn a_run_of_several_ranks_is_replayed_by_one() {
    let place = TestRun::new();
    let recipe = arranged(place.recipe(&[]), [[2, 1, 1], [1, 2, 1]]);
    let results = finish_on(2, &recipe);
    for step in [2, 10] {
        let found = replay(&recipe, step).unwrap();
        let loss = results.metrics[step as usize - 1]["loss"].as_f64().unwrap();
        assert!((found.result.loss / loss - 1.0).abs() < 1e-4);
    }
}

#[test]
fn what_cannot_be_replayed_is_refused() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    assert_refused(replay(&recipe, 1), "recipe.toml");
    finish(&recipe);
    for step in [0, 11] {
        assert_refused(replay(&recipe, step), &format!("no step {step}: use 1 to 10"));
    }
    shorten(&run_of(&recipe).checkpoint(8).join("weights.safetensors"));
    let before = files(&recipe.run.dir);
    assert_refused(replay(&recipe, 9), "weights.safetensors");
    assert!(files(&recipe.run.dir) == before);
}
