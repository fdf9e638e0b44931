//! The measurements of a run: routing of its evaluations, several validation sets, norms by block and the speed of each
//! step, on one rank and on several, interrupted or not.

use std::fs;

use crate::support::driver::{Start, finish, finish_on, stop_at};
use crate::support::{TestRun, arranged, run_of, summary_of, write_tokens};
use moh_checkpoint::run_log::{RoutingLine, RoutingMoment, StepMetrics, metrics, routing_log};
use moh_recipe::Recipe;
use moh_train::Event;

const SETS: &str = "data.validation=[{name = \"held-out\", path = \"HERE/held-out\", batches = 2, \
                    every_steps = 3}, {name = \"code\", path = \"HERE/code\", batches = 9, \
                    every_steps = 4}]";

/// Returns a recipe with two validation sets and norms at every second step.
fn recipe(place: &TestRun, name: &str, overrides: &[&str]) -> Recipe {
    let here = place.dir.path();
    if !here.join("code.idx").exists() {
        write_tokens(&here.join("code"), 3, 40);
    }
    let sets = SETS.replace("HERE", &here.display().to_string());
    place.recipe_in(name, &[&[sets.as_str(), "log.norms_every_steps=2"], overrides].concat())
}

fn steps_of(recipe: &Recipe) -> Vec<StepMetrics> {
    metrics::read(&run_of(recipe).metrics()).unwrap()
}

fn routing_of(recipe: &Recipe) -> Vec<RoutingLine> {
    routing_log::read(&run_of(recipe).routing()).unwrap()
}

#[test]
fn every_set_is_evaluated_when_it_is_due_and_the_first_is_the_runs() {
    let place = TestRun::new();
    let recipe = recipe(&place, "run", &[]);
    finish(&recipe);
    for (number, step) in (1..).zip(steps_of(&recipe)) {
        let due = |every: u64| number % 5 == 0 || number % every == 0;
        let mut expected = Vec::new();
        expected.extend(due(4).then_some("code"));
        expected.extend(due(3).then_some("held-out"));
        assert_eq!(step.validation_sets.keys().collect::<Vec<_>>(), expected, "step {number}");
        assert_eq!(step.validation, step.validation_sets.get("held-out").copied());
    }
    let summary = summary_of(&recipe);
    assert_eq!(summary.evaluations.len(), 4);
    for evaluation in &summary.evaluations {
        assert_eq!(evaluation.other_sets.keys().collect::<Vec<_>>(), ["code"]);
        assert_ne!(evaluation.other_sets["code"].loss, evaluation.loss);
    }
    // The first set has the losses of a run with that set alone.
    let alone = place.recipe_in("alone", &[]);
    finish(&alone);
    for (evaluation, alone) in summary.evaluations.iter().zip(&summary_of(&alone).evaluations) {
        assert_eq!(evaluation.loss, alone.loss);
        assert!(alone.other_sets.is_empty());
    }
}

#[test]
fn routing_is_counted_for_each_layer_set_and_evaluation_that_routes() {
    let place = TestRun::new();
    let recipe = recipe(&place, "run", &[]);
    finish(&recipe);
    let lines = routing_of(&recipe);
    let mut expected = Vec::new();
    let mut evaluation = |step, moment, sets: &[&str]| {
        let of = |set: &str| [0, 1].map(|layer| (step, moment, set.to_owned(), layer));
        expected.extend(sets.iter().flat_map(|set| of(set)));
    };
    evaluation(5, RoutingMoment::Converted, &["held-out", "code"]);
    evaluation(6, RoutingMoment::Step, &["held-out"]);
    evaluation(8, RoutingMoment::Step, &["code"]);
    evaluation(9, RoutingMoment::Step, &["held-out"]);
    evaluation(10, RoutingMoment::Step, &["held-out", "code"]);
    let found: Vec<_> = (lines.iter())
        .map(|line| (line.step, line.moment, line.validation.clone(), line.layer))
        .collect();
    assert_eq!(found, expected);
    for line in &lines {
        // One shared head of four, and two of three routed heads for each token.
        assert_eq!((line.shared_heads, line.selected.len()), (1, 3));
        assert_eq!(line.stage.as_deref(), Some("moh"));
        assert_eq!(line.selected.iter().sum::<u64>(), 2 * line.tokens, "{line:?}");
        assert!(line.entropy > 0.0 && line.entropy <= 3f64.ln(), "{line:?}");
        // Two micro-batches of 4 windows of 8 tokens. The other set has fewer windows than requested.
        match line.validation.as_str() {
            "held-out" => assert_eq!(line.tokens, 64),
            _ => assert!(line.tokens % 8 == 0 && line.tokens < 9 * 4 * 8, "{line:?}"),
        }
    }
}

#[test]
fn a_dense_run_has_no_routing() {
    let place = TestRun::new();
    let recipe = recipe(&place, "run", &["stage.moh.attention=dense"]);
    finish(&recipe);
    assert!(!run_of(&recipe).routing().exists());
}

#[test]
fn a_resumed_run_measures_what_an_uninterrupted_one_does() {
    let place = TestRun::new();
    let whole = recipe(&place, "whole", &[]);
    let results = finish(&whole);
    let routing = |recipe: &Recipe| fs::read(run_of(recipe).routing()).unwrap();
    for step in [3, 5, 6, 9] {
        let resumed = recipe(&place, &format!("resumed-{step}"), &[]);
        stop_at(&resumed, step);
        // Lines of steps after the checkpoint, as a killed process leaves them.
        fs::write(run_of(&resumed).routing(), routing(&whole)).unwrap();
        assert!(finish(&resumed) == results, "step {step}");
        assert_eq!(routing(&resumed), routing(&whole), "step {step}");
    }
}

#[test]
fn a_routing_log_that_cannot_be_read_is_set_aside_and_the_run_goes_on() {
    let place = TestRun::new();
    let recipe = recipe(&place, "run", &[]);
    stop_at(&recipe, 6);
    let run = run_of(&recipe);
    fs::write(run.routing(), "not a line\n").unwrap();
    finish(&recipe);
    let aside = run.root().join("routing-before-step-6.jsonl");
    assert_eq!(fs::read_to_string(aside).unwrap(), "not a line\n");
    assert_eq!(routing_of(&recipe)[0].step, 8);
}

#[test]
fn a_routing_log_that_cannot_be_written_is_a_warning_once() {
    let place = TestRun::new();
    let recipe = recipe(&place, "run", &[]);
    let run = run_of(&recipe);
    let mut warnings = Vec::new();
    Start::default().finish_and_hear(&recipe, |event, _| match event {
        // The file appears with its first line, after the conversion at step 5.
        Event::Step { step: 4, .. } => fs::create_dir(run.routing()).unwrap(),
        Event::Warning { text } => warnings.push((*text).to_owned()),
        _ => {}
    });
    warnings.retain(|text| text.contains("routing.jsonl"));
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].ends_with("recorded again when the run is resumed"), "{warnings:?}");
}

#[test]
fn norms_by_block_add_up_to_the_global_norm() {
    let place = TestRun::new();
    for (name, overrides) in [
        ("untied", vec![]),
        ("tied", vec!["model.new.tie_word_embeddings=true"]),
        ("bf16", vec!["run.dtype=bf16"]),
    ] {
        let recipe = recipe(&place, name, &overrides);
        finish(&recipe);
        for (number, step) in (1u64..).zip(steps_of(&recipe)) {
            assert_eq!(step.block_norms.is_some(), number % 2 == 0, "{name}, step {number}");
            let Some(norms) = step.block_norms else { continue };
            for norms in [&norms.gradient, &norms.weight] {
                assert_eq!((norms.blocks.len(), norms.head.is_none()), (2, name == "tied"));
            }
            let gradient = &norms.gradient;
            let parts = [gradient.embedding, gradient.final_norm, gradient.head.unwrap_or(0.0)];
            let all = parts.iter().chain(&gradient.blocks).map(|norm| norm * norm).sum::<f64>();
            let error = (all.sqrt() / step.grad_norm - 1.0).abs();
            assert!(error < 1e-9, "{name}: {} is not {}", all.sqrt(), step.grad_norm);
            // 16 weights that start as 1 and change by at most 1% in a step.
            assert!((norms.weight.final_norm / 4.0 - 1.0).abs() < 0.1, "{norms:?}");
        }
    }
}

#[test]
fn every_layout_of_ranks_measures_the_same() {
    let place = TestRun::new();
    for tied in ["false", "true"] {
        let tied = format!("model.new.tie_word_embeddings={tied}");
        let one = recipe(&place, &format!("one-{tied}"), &[&tied]);
        finish(&one);
        let (steps, routing) = (steps_of(&one), routing_of(&one));
        for (ranks, parts) in
            [(2, [1, 1, 1]), (2, [2, 1, 1]), (2, [1, 2, 1]), (3, [1, 1, 1]), (4, [2, 2, 1])]
        {
            let name = format!("{ranks}-{parts:?}-{tied}");
            let divided = arranged(recipe(&place, &name, &[&tied]), [parts; 2]);
            finish_on(ranks, &divided);
            for (line, expected) in routing_of(&divided).iter().zip(&routing) {
                let place = |line: &RoutingLine| {
                    (line.step, line.moment, line.validation.clone(), line.layer, line.tokens)
                };
                assert_eq!(place(line), place(expected), "{name}");
                assert!((line.entropy - expected.entropy).abs() < 1e-3, "{name}: {line:?}");
                // Rounding may order norms that are nearly equal in another way.
                for (count, expected) in line.selected.iter().zip(&expected.selected) {
                    assert!(count.abs_diff(*expected) <= 2, "{name}: {line:?}");
                }
            }
            assert_eq!(routing_of(&divided).len(), routing.len());
            for (step, expected) in steps_of(&divided).iter().zip(&steps) {
                let (Some(found), Some(expected)) = (&step.block_norms, &expected.block_norms)
                else {
                    assert_eq!(step.block_norms.is_some(), expected.block_norms.is_some());
                    continue;
                };
                let all = |norms: &moh_step::BlockNorms| {
                    let of = |norms: &moh_step::Norms| {
                        let ends = [norms.embedding, norms.final_norm];
                        let ends = ends.into_iter().chain(norms.head);
                        ends.chain(norms.blocks.iter().copied()).collect::<Vec<f64>>()
                    };
                    [of(&norms.gradient), of(&norms.weight)].concat()
                };
                for (found, expected) in all(found).into_iter().zip(all(expected)) {
                    assert!((found / expected - 1.0).abs() < 2e-2, "{name}: {step:?}");
                }
            }
        }
    }
}

#[test]
fn data_ranks_count_the_routing_of_equal_weights_exactly() {
    let place = TestRun::new();
    let converted = |ranks: usize| {
        // A first stage with changes too small for f32.
        let rate = "stage.adapt.learning_rate={max = 1e-30, min = 0, warmup_steps = 0}";
        let recipe = recipe(&place, &format!("ranks-{ranks}"), &[rate]);
        finish_on(ranks, &recipe);
        let mut lines = routing_of(&recipe);
        lines.retain(|line| line.moment == RoutingMoment::Converted);
        lines
    };
    let one = converted(1);
    assert_eq!(one.len(), 4);
    for ranks in [2, 3] {
        assert_eq!(converted(ranks), one, "{ranks} ranks");
    }
}

#[test]
fn the_speed_of_a_step_has_the_times_of_its_parts() {
    let place = TestRun::new();
    let peak = recipe(&place, "run", &["log.peak_tflops=0.5"]);
    finish_on(2, &peak);
    let steps = steps_of(&peak);
    for (number, step) in (1..).zip(&steps) {
        let speed = step.speed.unwrap();
        let within = [speed.data, speed.forward, speed.backward, speed.exchange];
        let within: f64 = within.iter().sum::<f64>() + speed.gradient_norm + speed.optimizer;
        assert!(within > 0.0 && within <= speed.seconds, "step {number}: {speed:?}");
        assert!(speed.forward > 0.0 && speed.backward > 0.0 && speed.exchange > 0.0);
        assert!(speed.data > 0.0 && speed.optimizer > 0.0 && speed.gradient_norm > 0.0);
        assert_eq!(speed.evaluation > 0.0, !step.validation_sets.is_empty(), "step {number}");
        // Checkpoints after steps 2, 4, 5, 6 and 8.
        let saved = [3, 5, 6, 7, 9].contains(&number);
        assert_eq!(speed.checkpoint > 0.0, saved, "step {number}: {speed:?}");
        assert!(speed.tflops > 0.0);
        assert!((speed.mfu.unwrap() / speed.tflops - 2.0).abs() < 1e-9);
        let rate = step.tokens_per_second * speed.seconds;
        assert!((rate - 64.0).abs() < 1e-6, "{speed:?}");
    }
    // Fewer heads, so fewer operations.
    let flops = |step: &StepMetrics| step.speed.unwrap().tflops / step.tokens_per_second;
    assert!(flops(&steps[9]) < flops(&steps[0]));
    let unknown = recipe(&place, "unknown", &[]);
    finish(&unknown);
    assert!(steps_of(&unknown).iter().all(|step| step.speed.unwrap().mfu.is_none()));
}
