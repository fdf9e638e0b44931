//! Runs that are stopped or killed, with every recipe.

use std::fs;

use moh_train::Outcome;
use serde_json::Value;

use super::{STEPS, killed_at, remains, uninterrupted};
use crate::support::driver::{self, finish, finish_in_parts, reference, refusal, resumed, stop_at};
use crate::support::results::Results;
use crate::support::{TestRun, run_of};

#[test]
fn a_stopped_run_continues_to_the_same_end() {
    // Between checkpoints, at a checkpoint, at the last step of a stage, after the first step of the next stage.
    for step in [1, 3, 4, 5, 6, 9] {
        let place = TestRun::new();
        let recipe = place.recipe(&[]);
        stop_at(&recipe, step);
        assert_eq!(run_of(&recipe).checkpoint_steps().unwrap().last(), Some(&step));
        assert_eq!(resumed(&recipe), [step]);
        assert!(Results::of(&recipe) == *reference(), "stopped at step {step}");
    }
}

#[test]
fn a_run_continues_with_another_recomputation_and_the_same_bits() {
    let place = TestRun::new();
    stop_at(&place.recipe(&["memory.recompute=none"]), 4);
    stop_at(&place.recipe(&["memory.recompute=block"]), 7);
    assert!(finish(&place.recipe(&["memory.recompute=cheap"])) == *reference());
}

#[test]
fn a_run_that_is_stopped_at_every_step_ends_the_same() {
    assert!(finish_in_parts(&TestRun::new().recipe(&[]), 1..STEPS) == *reference());
}

#[test]
fn a_killed_run_continues_to_the_same_end() {
    let place = TestRun::new();
    // Before the first checkpoint, between two checkpoints, at a stage's end, at the run's end.
    let copies =
        [1, 3, 5, 7, STEPS].map(|step| (step, place.recipe_in(&format!("copy-{step}"), &[])));
    let paths = copies.each_ref().map(|(step, copy)| (*step, copy.run.dir.as_path()));
    killed_at(&place.recipe(&[]), &paths);
    for (step, mut recipe) in copies {
        let run = run_of(&recipe);
        // Beyond the checkpoint, and torn.
        let mut text = fs::read_to_string(run.metrics()).unwrap();
        assert_eq!(text.lines().count() as u64, step);
        let first = text.lines().next().unwrap().to_owned();
        text += &first[..first.len() / 2];
        fs::write(run.metrics(), text).unwrap();
        // A checkpoint and an export that were being written.
        for half in [
            run.checkpoints().join(format!(".tmp-step-{step}-abc/weights.safetensors")),
            run.root().join(".tmp-export-Ab3dE9/model.safetensors"),
            run.root().join(".tmp-metrics.jsonl-abcdef"),
            run.export().join("model.safetensors"),
        ] {
            fs::create_dir_all(half.parent().unwrap()).unwrap();
            fs::write(half, b"half").unwrap();
        }
        assert!(finish(&recipe) == *reference(), "killed at {step}");
        assert!(remains(&recipe).is_empty(), "{:?}", remains(&recipe));
        // Once more, to check that the run is finished.
        recipe.log.tensorboard = false;
        assert!(matches!(driver::run(&recipe).unwrap(), Outcome::AlreadyFinished(_)));
    }
}

#[test]
fn layers_with_other_heads_continue_with_the_same_bits() {
    let changes = ["stage.moh.moh={shared_heads=[4,1],routed_top_k=[0,2]}"];
    let expected = uninterrupted(&changes);
    let config: Value = serde_json::from_str(&expected.config).unwrap();
    assert_eq!(config["moh_shared_heads"], serde_json::json!([4, 1]));
    let summary: Value = serde_json::from_str(&expected.summary).unwrap();
    let converted = &summary["evaluations"][2]["moment"]["converted"];
    assert_eq!(converted["active_heads"], serde_json::json!([4, 3]));
    assert!(expected.metrics[9]["balance_loss"].as_f64().unwrap() > 0.0);
    assert!(finish_in_parts(&TestRun::new().recipe(&changes), [3, 7]) == expected);
}

#[test]
fn a_list_of_equal_counts_continues_a_run_with_the_count() {
    let place = TestRun::new();
    stop_at(&place.recipe(&[]), 7);
    let recipe = place.recipe(&["stage.moh.moh={shared_heads=[1,1],routed_top_k=[2,2]}"]);
    assert!(finish(&recipe) == *reference());
}

#[test]
fn another_recipe_is_refused_and_a_harmless_change_is_not() {
    let place = TestRun::new();
    stop_at(&place.recipe(&[]), 3);
    for change in ["run.seed=2", "stage.moh.tokens=256", "stage.adapt.learning_rate.max=1e-1"] {
        let error = refusal(&place.recipe(&[change]));
        assert!(error.contains("the recipe differs from the run's"), "{error}");
        let (key, _) = change.split_once('=').unwrap();
        assert!(error.contains(&format!("\n  {key}: was ")), "{error}");
    }
    let harmless = ["log.every_steps=5", "log.tensorboard=false", "checkpoint.every_steps=3"];
    let recipe = place.recipe(&harmless);
    assert!(finish(&recipe) == *reference());
}

#[test]
fn runs_of_every_element_type_and_data_option_continue_exactly() {
    for overrides in [
        &["run.dtype=bf16"][..],
        &["precision.moments=bf16"],
        &["precision.gradients=bf16"],
        &["run.dtype=bf16", "precision.gradients=bf16", "precision.moments=bf16"],
        &["data.document_mask=true"],
        &["data.order=sequential"],
    ] {
        let expected = uninterrupted(overrides);
        assert!(expected.metrics != reference().metrics, "{overrides:?} had no effect");
        let found = finish_in_parts(&TestRun::new().recipe(overrides), [3, 5, 7]);
        assert!(found == expected, "{overrides:?}");
    }
}

#[test]
fn recomputing_gives_the_same_bits() {
    for dtype in ["run.dtype=f32", "run.dtype=bf16"] {
        let expected = uninterrupted(&[dtype]);
        for recompute in ["memory.recompute=cheap", "memory.recompute=block"] {
            let found = uninterrupted(&[dtype, recompute]);
            assert!(found == expected, "{dtype} {recompute}");
        }
    }
}

/// Relative, above 1: float sums in another order, over 20 steps.
const ACCUMULATION_TOLERANCE: f64 = 1e-5;

#[test]
fn accumulating_micro_batches_is_one_large_batch() {
    // The balance loss is a mean over micro-batches, not over tokens, so it is omitted here.
    let base = ["stage.adapt.batch_tokens=32", "stage.moh.batch_tokens=32"];
    let with = |micro_batch: usize| {
        let sizes = [
            format!("stage.adapt.micro_batch={micro_batch}"),
            format!("stage.moh.micro_batch={micro_batch}"),
            "stage.moh.moh.balance_loss_weight=0".to_owned(),
            // The windows of an evaluation go by the micro-batch.
            format!("data.validation.batches={}", 4 / micro_batch),
        ];
        let overrides: Vec<&str> =
            base.into_iter().chain(sizes.iter().map(String::as_str)).collect();
        uninterrupted(&overrides)
    };
    let (whole, split) = (with(4), with(1));
    assert_eq!(whole.metrics.len(), 20);
    for (whole, split) in whole.metrics.iter().zip(&split.metrics) {
        for field in ["loss", "grad_norm", "validation_loss"] {
            let [Some(a), Some(b)] = [whole, split].map(|line| line[field].as_f64()) else {
                assert_eq!((field, whole.get(field)), ("validation_loss", None));
                continue;
            };
            let tolerance = ACCUMULATION_TOLERANCE * a.abs().max(1.0);
            assert!((a - b).abs() < tolerance, "{field}: {a} and {b}");
        }
    }
}
