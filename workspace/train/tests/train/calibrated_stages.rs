//! Stages whose conversion is measured: they begin with the heads, output projections and routers of crate `moh-calibrate`
//! on their first sequences, on any layout of ranks, and with the same bits after a stop or a kill at any moment. And
//! stages whose router has matrices that the model lacks, measured or not.

use std::cell::Cell;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::driver::{Start, finish, run_in, stop_at, watch};
use crate::support::results::{Results, assert_alike};
use crate::support::{TestRun, copy_all};
use moh_calibrate::{Calibration, CalibrationOptions, CalibrationTokens, Shared, calibrate};
use moh_checkpoint::StoredCheckpoint;
use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::Summary;
use moh_checkpoint::run_log::routing_log::{self, RoutingMoment};
use moh_comm::World;
use moh_hf::ConfigFile;
use moh_kernels::Cpu;
use moh_kernels::open_device::OpenDevice;
use moh_model::tensors::{OUTPUT_PROJECTION, ROUTER, ROUTER_STAGES, in_layer};
use moh_plan::open_training;
use moh_recipe::{DistillOptions, Recipe, START};
use moh_step::TensorKind;
use moh_testkit::ranks::on_ranks;
use moh_train::{Error, Event, Outcome, Replay, RunOptions, TimeLimit};
use safetensors::SafeTensors;
use serde_json::Value;

/// The second stage converts, after 5 steps of 8 samples, and is calibrated on 16 sequences.
const SECOND: &str =
    "stage.moh.moh={ shared_heads = 2, routed_top_k = 1, calibration = { tokens = 135 } }";
/// The first stage does, and the second one keeps its heads.
const FIRST: [&str; 3] = [
    "stage.adapt.attention=moh",
    "stage.adapt.moh={ shared_heads = 2, routed_top_k = 1, calibration = { tokens = 128 } }",
    "stage.moh.moh={ shared_heads = 2, routed_top_k = 1 }",
];

/// As before, and the first stage chooses the number of shared heads too.
const NUMBERS: [&str; 3] = [
    FIRST[0],
    "stage.adapt.moh={ shared_heads = 2, routed_top_k = 1, \
     calibration = { tokens = 128, shared = 'calibrated-number' } }",
    FIRST[2],
];

/// As before, and the first stage also divides the active heads among the layers.
const TOTAL: [&str; 3] = [
    FIRST[0],
    "stage.adapt.moh={ shared_heads = 2, routed_top_k = 1, \
     calibration = { tokens = 128, shared = 'calibrated-total' } }",
    FIRST[2],
];

/// The second stage converts to a learned router.
const LEARNED: &str = "stage.moh.moh={ router = 'two-stage', shared_heads = 1, routed_top_k = 2, \
                       calibration = { tokens = 128 } }";
/// The first stage does, with the given heads and weights but the router's, and the second one keeps it.
const LEARNED_FIRST: [&str; 3] = [
    FIRST[0],
    "stage.adapt.moh={ router = 'linear', shared_heads = 2, routed_top_k = 1, \
     calibration = { tokens = 128, shared = 'given', refit = false } }",
    "stage.moh.moh={ router = 'linear', shared_heads = 2, routed_top_k = 1 }",
];
/// The second stage has a learned router that is not fitted.
const ZEROS: &str = "stage.moh.moh={ router = 'two-stage', shared_heads = 1, routed_top_k = 2 }";

fn recipe(place: &TestRun, name: &str, changes: &[&str]) -> Recipe {
    let mut recipe = place.recipe(changes);
    recipe.run.dir = place.dir.path().join(name);
    recipe
}

/// As [`recipe`], of a run that starts from a model or from another run.
fn recipe_from(place: &TestRun, name: &str, changes: &[&str], from: String) -> Recipe {
    let mut recipe = recipe(place, name, changes);
    recipe.model.new = None;
    recipe.model.from = Some(from);
    recipe
}

/// A finished run of the first stage alone, which is dense.
fn dense_run(place: &TestRun) -> Recipe {
    let mut recipe = recipe(place, "parent", &[]);
    recipe.stages.truncate(1);
    finish(&recipe);
    recipe
}

/// Replays a step of a finished run.
fn replay(recipe: &Recipe, step: u64) -> Result<Replay, Error> {
    let run = run_of(recipe);
    let stored = Recipe::load(&run.recipe(), &[]).unwrap();
    moh_train::replay(&run, stored, &run.recipe(), None, OpenDevice::Cpu, step)
}

fn run_of(recipe: &Recipe) -> RunDirectory {
    RunDirectory::new(&recipe.run.dir)
}

/// What crate `moh-calibrate` finds for the checkpoint of `step` on 16 samples from `first` on, and the output
/// projections.
fn expected(
    recipe: &Recipe,
    step: u64,
    first: u64,
    shared: Shared,
) -> (Calibration, Vec<Vec<f32>>) {
    let run = run_of(recipe);
    let stored = StoredCheckpoint::of_step(&run.checkpoint_directory(), step).unwrap();
    let config = moh_checkpoint::run_directory::config_file(&stored, Path::new("config.json"))
        .unwrap()
        .config;
    let stage = stored.manifest().state.stage;
    let data = &open_training(recipe, config.vocab_size).unwrap()[stage];
    let mut ids = Vec::new();
    for number in first..first + 16 {
        let mut window = vec![0; data.sequence_length() + 1];
        data.sample(number, &mut window, None).unwrap();
        ids.extend_from_slice(&window[..data.sequence_length()]);
    }
    let tokens = CalibrationTokens::new(ids, data.sequence_length(), &config).unwrap();
    let moh = recipe.stages[stage].moh_config(&config).unwrap().unwrap();
    let options = CalibrationOptions { moh, shared, refit: true, stored: None };
    let mut projections = Vec::new();
    let mut read = |name: &str, values: &mut [f32]| {
        stored.read_f32(TensorKind::Weight, name, values).unwrap();
        Ok::<_, moh_calibrate::Error>(())
    };
    let mut refitted = |_: usize, values: &[f32]| {
        projections.push(values.to_vec());
        Ok(())
    };
    let mut go_on = |_, _| std::ops::ControlFlow::Continue(());
    let found =
        calibrate(&Cpu, &config, &options, &tokens, &mut read, &mut refitted, &mut go_on).unwrap();
    (found.unwrap(), projections)
}

/// A tensor of each layer of the export, in order.
fn exported(recipe: &Recipe, name: &str) -> Vec<Vec<f32>> {
    let bytes = fs::read(run_of(recipe).export().join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let layer = |layer: usize| {
        let tensor = file.tensor(&in_layer(layer, name)).unwrap();
        let values = tensor.data().chunks_exact(4);
        values.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    (0..2).map(layer).collect()
}

#[test]
fn a_stage_begins_with_what_is_measured_on_its_first_sequences() {
    let place = TestRun::new();
    // The output projections stay as the stage begins.
    let frozen = "stage.moh.optimizer.groups={ attention = 0 }";
    let recipe = recipe(&place, "run", &[SECOND, frozen, "checkpoint.keep=9"]);
    let mut heard = None;
    let outcome = watch(&recipe, |event, _| {
        if let Event::Calibrated(calibration) = event {
            heard = Some((*calibration).clone());
        }
    });
    assert!(matches!(outcome.unwrap(), Outcome::Finished(_)));
    let (calibration, projections) = expected(&recipe, 5, 40, Shared::Calibrated);
    assert_eq!(exported(&recipe, OUTPUT_PROJECTION), projections);
    let run = run_of(&recipe);
    let config = ConfigFile::read(&run.export()).unwrap();
    assert_eq!(config.config.moh, Some(calibration.moh.clone()));
    assert_eq!(config.fields["moh_output_refitted"], true);
    // The checkpoint of the boundary is the dense model's, and those of the stage have the heads.
    let fields = |step| {
        let stored = StoredCheckpoint::of_step(&run.checkpoint_directory(), step).unwrap();
        stored.manifest().config.clone()
    };
    assert!(
        !fields(5).contains_key("moh_router") && !fields(5).contains_key("moh_output_refitted")
    );
    assert_eq!(fields(6)["moh_output_refitted"], true);
    let summary = Summary::read(&run.summary()).unwrap().unwrap();
    assert_eq!(summary.calibrations, [heard.unwrap()]);
    let found = &summary.calibrations[0];
    assert_eq!(
        (found.stage.as_str(), found.step, found.tokens, found.refit),
        ("moh", 5, 128, true)
    );
    let losses = [found.loss_dense, found.loss_given, found.loss];
    let expected = calibration.losses;
    assert_eq!(losses, [expected.dense, expected.given, expected.calibrated]);
    for (found, expected) in found.layers.iter().zip(&calibration.layers) {
        assert_eq!(found.shared_heads, expected.shared.heads().collect::<Vec<_>>());
        assert_eq!((found.routed_top_k, found.error), (1, expected.error));
        assert!(found.error.unwrap() < found.error_before);
    }
    let card = fs::read_to_string(run.export().join("README.md")).unwrap();
    assert!(card.contains("Before stage moh the heads were measured on 128 tokens"), "{card}");
}

#[test]
fn a_learned_router_begins_as_it_is_fitted() {
    let place = TestRun::new();
    // They stay as the stage begins.
    let frozen = "stage.moh.optimizer.groups={ attention = 0, router = 0 }";
    let recipe = recipe(&place, "run", &[LEARNED, frozen, "checkpoint.keep=9"]);
    finish(&recipe);
    let (calibration, projections) = expected(&recipe, 5, 40, Shared::Calibrated);
    let fits = calibration.layers.into_iter().map(|layer| layer.router.unwrap().rows);
    assert_eq!(exported(&recipe, ROUTER), fits.collect::<Vec<_>>());
    assert_eq!(exported(&recipe, OUTPUT_PROJECTION), projections);
    assert!(exported(&recipe, ROUTER_STAGES).iter().flatten().all(|&value| value == 0.0));
    let config = ConfigFile::read(&run_of(&recipe).export()).unwrap().config;
    assert_eq!(config.moh, Some(calibration.moh));
}

#[test]
fn a_router_that_is_not_fitted_begins_with_zeros() {
    let place = TestRun::new();
    let converted = |name, moh| {
        let recipe = recipe(&place, name, &[moh]);
        finish(&recipe);
        let summary = Summary::read(&run_of(&recipe).summary()).unwrap().unwrap();
        assert_eq!(summary.evaluations.len(), 4);
        (summary.evaluations[2].loss, recipe)
    };
    let (loss, learned) = converted("learned", ZEROS);
    // Of equal logits the first heads are selected, with weight 1.
    let (of_first, _) = converted(
        "static",
        "stage.moh.moh={ router = 'static', shared_heads = 3, routed_top_k = 0 }",
    );
    assert!((loss / of_first - 1.0).abs() < 1e-6, "{loss}, not {of_first}");
    // The stage trains it.
    for name in [ROUTER, ROUTER_STAGES] {
        assert!(exported(&learned, name).iter().all(|of| of.iter().any(|&value| value != 0.0)));
    }
}

#[test]
fn a_stage_can_begin_with_the_best_number_of_shared_heads() {
    let place = TestRun::new();
    let moh = "stage.moh.moh={ shared_heads = 0, routed_top_k = 3, \
               calibration = { tokens = 128, shared = 'calibrated-number' } }";
    let recipe = recipe(&place, "run", &[moh, "checkpoint.keep=9"]);
    finish(&recipe);
    let (calibration, _) = expected(&recipe, 5, 40, Shared::CalibratedNumber);
    let found = ConfigFile::read(&run_of(&recipe).export()).unwrap().config.moh.unwrap();
    assert_eq!(found, calibration.moh);
    let layers = (0..2).map(|layer| found.layer(layer));
    assert!(layers.clone().all(|layer| layer.active() == 3), "{found:?}");
    assert!(layers.clone().any(|layer| !layer.shared.is_empty()), "{found:?}");
}

#[test]
fn a_stage_can_divide_active_heads_among_layers() {
    let place = TestRun::new();
    for (name, router) in [("query-norm", "query-norm"), ("learned", "linear")] {
        let moh = format!(
            "stage.moh.moh={{ router = '{router}', shared_heads = 1, routed_top_k = 1, \
             calibration = {{ tokens = 128, shared = 'calibrated-total' }} }}"
        );
        let recipe = recipe(&place, name, &[&moh, "checkpoint.keep=9"]);
        finish(&recipe);
        let (calibration, _) = expected(&recipe, 5, 40, Shared::CalibratedTotal(4));
        let found = ConfigFile::read(&run_of(&recipe).export()).unwrap().config.moh.unwrap();
        assert_eq!(found, calibration.moh);
        let active: Vec<usize> = (0..2).map(|layer| found.layer(layer).active()).collect();
        assert_eq!(active.iter().sum::<usize>(), 4, "{name}: {active:?}");
    }
}

#[test]
fn later_stages_keep_the_heads() {
    let place = TestRun::new();
    for (name, changes) in [("heads", FIRST), ("numbers", NUMBERS), ("total", TOTAL)] {
        let recipe = recipe(&place, name, &changes);
        finish(&recipe);
        let run = run_of(&recipe);
        let summary = Summary::read(&run.summary()).unwrap().unwrap();
        let chosen = summary.calibrations[0].layers.iter();
        let heads: Vec<_> =
            chosen.map(|layer| (layer.shared_heads.clone(), layer.routed_top_k)).collect();
        let moh = ConfigFile::read(&run.export()).unwrap().config.moh.unwrap();
        let kept = (0..2).map(|layer| moh.layer(layer));
        let kept = kept.map(|layer| (layer.shared.heads().collect(), layer.top_k));
        assert_eq!(kept.collect::<Vec<(Vec<usize>, usize)>>(), heads, "{name}");
        // The model as loaded, converted and after each stage, and no conversion between these.
        assert_eq!(summary.evaluations.len(), 4, "{name}");
    }
}

#[test]
fn the_given_heads_and_weights_can_stay() {
    let place = TestRun::new();
    let with = |name, options: &str| {
        let moh = format!(
            "stage.moh.moh={{ shared_head_ids = [[1, 3], [0, 2]], routed_top_k = 1{options} }}"
        );
        recipe(&place, name, &[&moh])
    };
    let refitted = with("refitted", ", calibration = { tokens = 128, shared = \"given\" }");
    finish(&refitted);
    let without = with("without", "");
    finish(&without);
    let moh = |recipe: &Recipe| ConfigFile::read(&run_of(recipe).export()).unwrap().config.moh;
    assert_eq!(moh(&refitted), moh(&without));
    assert_ne!(Results::of(&refitted).weights, Results::of(&without).weights);
    // Chosen heads with the weights as they are.
    let chosen = "stage.moh.moh={ shared_heads = 2, routed_top_k = 1, calibration = { tokens = 128, refit = false } }";
    let chosen = recipe(&place, "chosen", &[chosen]);
    finish(&chosen);
    let run = run_of(&chosen);
    assert!(run.calibration(5).is_file() && !run.calibrated_tensors(5).exists());
    let config = ConfigFile::read(&run.export()).unwrap();
    assert!(!config.fields.contains_key("moh_output_refitted"));
}

#[test]
fn a_stop_and_a_kill_leave_the_same_bits() {
    let place = TestRun::new();
    for (number, changes) in [
        &[SECOND, "run.dtype=bf16"][..],
        &[FIRST[0], FIRST[1], FIRST[2]],
        &[FIRST[0], FIRST[1], FIRST[2], "run.dtype=bf16"],
        &[NUMBERS[0], NUMBERS[1], NUMBERS[2], "run.dtype=bf16"],
        &TOTAL,
        &[LEARNED, "run.dtype=bf16"],
        &[LEARNED_FIRST[0], LEARNED_FIRST[1], LEARNED_FIRST[2]],
        &[ZEROS, "run.dtype=bf16"],
    ]
    .into_iter()
    .enumerate()
    {
        let named = |name: &str| recipe(&place, &format!("{name}-{number}"), changes);
        let whole = named("whole");
        finish(&whole);
        let stopped = named("stopped");
        for step in [1, 4, 5, 6, 9] {
            stop_at(&stopped, step);
        }
        finish(&stopped);
        assert!(Results::of(&stopped) == Results::of(&whole), "{changes:?}: stopped");
        // What a process that was killed after these steps would leave.
        for step in [1, 5, 6] {
            let killed = named(&format!("killed-{step}"));
            let copy = named(&format!("copy-{step}"));
            Start { copy_at: Some((step, &copy.run.dir)), ..Start::default() }
                .run(&killed)
                .unwrap();
            finish(&copy);
            assert!(Results::of(&copy) == Results::of(&whole), "{changes:?}: killed at {step}");
        }
    }
}

/// Runs a recipe to its end; returns whether it has measured.
fn measures(recipe: &Recipe) -> bool {
    let measured = Cell::new(false);
    let outcome = watch(recipe, |event, _| {
        measured.set(measured.get() || matches!(event, Event::Calibrating { .. }));
    });
    assert!(matches!(outcome.unwrap(), Outcome::Finished(_)));
    measured.get()
}

#[test]
fn a_result_is_used_again_if_it_is_whole_and_of_the_same_run() {
    let place = TestRun::new();
    let whole = recipe(&place, "whole", &[SECOND]);
    assert!(measures(&whole));
    let files = [RunDirectory::calibration, RunDirectory::calibrated_tensors];
    let before = recipe(&place, "before", &[SECOND]);
    stop_at(&before, 5);
    for (name, change) in
        [("same", None), ("identity", Some(0)), ("matrices", Some(1)), ("layers", Some(0))]
    {
        let again = recipe(&place, name, &[SECOND]);
        copy_all(&before.run.dir, &again.run.dir);
        for (index, file) in files.iter().enumerate() {
            let mut bytes = fs::read(file(&run_of(&whole), 5)).unwrap();
            if change == Some(index) {
                match index {
                    0 if name == "layers" => {
                        // Of one layer more than the model has.
                        let mut record: Value = serde_json::from_slice(&bytes).unwrap();
                        for list in ["/calibration/layers", "/projections"] {
                            let list = record.pointer_mut(list).unwrap().as_array_mut().unwrap();
                            list.push(list[0].clone());
                        }
                        bytes = record.to_string().into();
                    }
                    0 => {
                        let text = String::from_utf8(bytes).unwrap();
                        bytes = text.replacen("\"identity\": \"", "\"identity\": \"0", 1).into();
                    }
                    _ => *bytes.last_mut().unwrap() ^= 1,
                }
            }
            fs::write(file(&run_of(&again), 5), bytes).unwrap();
        }
        assert_eq!(measures(&again), change.is_some(), "{name}");
        assert!(Results::of(&again) == Results::of(&whole), "{name}");
    }
}

#[test]
fn a_run_that_is_asked_to_stop_while_it_measures_goes_on_later() {
    let place = TestRun::new();
    let whole = recipe(&place, "whole", &[SECOND]);
    finish(&whole);
    let stopped = recipe(&place, "stopped", &[SECOND]);
    let outcome = watch(&stopped, |event, stop| {
        stop.fetch_or(matches!(event, Event::Calibrating { done: 0, .. }), Ordering::Relaxed);
    });
    assert_eq!(outcome.unwrap(), Outcome::Stopped { step: 5 });
    assert!(!run_of(&stopped).calibration(5).exists());
    assert!(measures(&stopped));
    assert!(Results::of(&stopped) == Results::of(&whole));
}

#[test]
fn a_time_limit_ends_the_measurement() {
    let place = TestRun::new();
    let whole = recipe(&place, "whole", &FIRST);
    finish(&whole);
    let limited = recipe(&place, "limited", &FIRST);
    let never = AtomicBool::new(false);
    let limit = Some(TimeLimit::new(Instant::now(), Duration::from_nanos(1)));
    let options = RunOptions { time_limit: limit, ..RunOptions::new(&never) };
    let outcome = run_in(&World::single(), &limited, options, &mut |_| {});
    assert_eq!(outcome.unwrap(), Outcome::StoppedBeforeTraining);
    assert!(!run_of(&limited).calibration(0).exists());
    assert!(measures(&limited));
    assert!(Results::of(&limited) == Results::of(&whole));
}

#[test]
fn a_rank_that_is_asked_to_stop_ends_the_measurement_of_the_first() {
    let place = TestRun::new();
    let recipe = recipe(&place, "stopped", &[SECOND]);
    let asked = AtomicBool::new(false);
    let outcomes = on_ranks(2, |world| {
        // The signal reaches the second rank alone.
        let never = AtomicBool::new(false);
        let stop = if world.rank() == 1 { &asked } else { &never };
        run_in(world, &recipe, RunOptions::new(stop), &mut |event| {
            asked.fetch_or(matches!(event, Event::Calibrating { .. }), Ordering::Relaxed);
        })
    });
    for outcome in outcomes {
        assert_eq!(outcome.unwrap(), Outcome::Stopped { step: 5 });
    }
    finish(&recipe);
    let summary = Results::of(&recipe).summary;
    assert!(summary.contains("\"calibrations\""), "{summary}");
}

#[test]
fn a_run_that_goes_back_to_the_stages_beginning_has_the_same_heads() {
    let place = TestRun::new();
    for (number, stage) in [SECOND, LEARNED].into_iter().enumerate() {
        let changes = [stage, "run.dtype=bf16", "checkpoint.keep=9"];
        let recipe = recipe(&place, &format!("run-{number}"), &changes);
        finish(&recipe);
        let whole = Results::of(&recipe);
        let back = Start { resume_step: Some(5), ..Start::default() };
        let outcome = back.run_and_hear(&recipe, &mut |event| {
            assert!(!matches!(event, Event::Calibrating { .. }));
        });
        assert!(matches!(outcome.unwrap(), Outcome::Finished(_)));
        assert!(Results::of(&recipe) == whole, "{stage}");
    }
}

#[test]
fn a_run_that_is_stopped_in_any_evaluation_has_the_same_router() {
    let place = TestRun::new();
    for (name, changes) in [
        ("zeros", &[ZEROS, "run.dtype=bf16"][..]),
        ("fitted", &[LEARNED]),
        ("first", &LEARNED_FIRST),
    ] {
        let whole = recipe(&place, name, changes);
        finish(&whole);
        // As loaded, after step 3, and so on: seven in all.
        for number in 0..7 {
            let stopped = recipe(&place, &format!("{name}-{number}"), changes);
            let mut evaluations = 0;
            let outcome = watch(&stopped, |event, stop| {
                if matches!(event, Event::Evaluating { done: 0, .. }) {
                    stop.fetch_or(evaluations == number, Ordering::Relaxed);
                    evaluations += 1;
                }
            });
            assert!(!matches!(outcome.unwrap(), Outcome::Finished(_)), "{name} {number}");
            finish(&stopped);
            assert!(Results::of(&stopped) == Results::of(&whole), "{name} {number}");
        }
    }
}

fn finish_on(ranks: usize, recipe: &Recipe) -> Results {
    let outcomes = on_ranks(ranks, |world| {
        run_in(world, recipe, RunOptions::new(&AtomicBool::new(false)), &mut |_| {})
    });
    for outcome in outcomes {
        assert!(matches!(outcome.unwrap(), Outcome::Finished(_)));
    }
    Results::of(recipe)
}

#[test]
fn every_layout_has_the_same_heads_and_matrices() {
    let place = TestRun::new();
    for (number, changes, step) in [
        (0, &FIRST[..], 0),
        (1, &[SECOND], 5),
        (2, &NUMBERS, 0),
        (3, &TOTAL, 0),
        (4, &[LEARNED], 5),
        (5, &LEARNED_FIRST, 0),
    ] {
        let layout = |name: &str, tensor: usize, pipeline: usize| {
            let keys = ["adapt", "moh"].map(|stage| {
                format!("stage.{stage}.parallel={{ tensor = {tensor}, pipeline = {pipeline} }}")
            });
            let keys = keys.iter().map(String::as_str);
            let sizes = ["stage.adapt.micro_batch=1", "stage.moh.micro_batch=1"];
            let changes: Vec<&str> = changes.iter().copied().chain(sizes).chain(keys).collect();
            recipe(&place, name, &changes)
        };
        let one = layout(&format!("one-{number}"), 1, 1);
        let reference = finish_on(1, &one);
        let files = |recipe: &Recipe| {
            let run = run_of(recipe);
            fs::read(run.calibrated_tensors(step)).unwrap()
        };
        let heads = |recipe: &Recipe| {
            let summary = Summary::read(&run_of(recipe).summary()).unwrap().unwrap();
            let layers = summary.calibrations[0].layers.clone();
            let heads = layers.into_iter().map(|layer| (layer.shared_heads, layer.routed_top_k));
            heads.collect::<Vec<_>>()
        };
        for (ranks, tensor, pipeline) in [(2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2), (3, 1, 1)] {
            let what = format!("{number}-{ranks}-{tensor}-{pipeline}");
            let other = layout(&what, tensor, pipeline);
            let found = finish_on(ranks, &other);
            assert_eq!(heads(&other), heads(&one), "{what}");
            // Of the same initial weights to the bit; sums of training have another order.
            assert!(step > 0 || files(&other) == files(&one), "{what}");
            assert_alike(&found, &reference, &what);
        }
    }
}

#[test]
fn the_steps_of_a_calibrated_stage_are_replayed() {
    let place = TestRun::new();
    for (name, changes, step) in [
        ("first", &FIRST[..], 0),
        ("numbers", &NUMBERS, 0),
        ("total", &TOTAL, 0),
        ("second", &[SECOND, "run.dtype=bf16"], 5),
        ("learned", &[LEARNED, "run.dtype=bf16"], 5),
        ("learned-first", &LEARNED_FIRST, 0),
    ] {
        let changes: Vec<&str> = changes.iter().copied().chain(["checkpoint.keep=9"]).collect();
        let recipe = recipe(&place, name, &changes);
        finish(&recipe);
        let replay = |step| replay(&recipe, step);
        for (step, line) in (1..).zip(&Results::of(&recipe).metrics) {
            let found = replay(step).unwrap();
            assert_eq!(found.result.loss, line["loss"].as_f64().unwrap(), "{name} {step}");
        }
        fs::remove_file(run_of(&recipe).calibration(step)).unwrap();
        let error = replay(step + 1).unwrap_err();
        assert!(matches!(error, Error::NoCalibration { .. }), "{error}");
        replay(10).unwrap();
    }
}

#[test]
fn evaluations_before_a_new_router_are_kept_and_not_needed() {
    let place = TestRun::new();
    // A Mixture-of-Head model, whose heads the evaluation of the loaded model counts.
    let new = "model.new.moh={ router = 'query-norm', shared_heads = 2, routed_top_k = 1 }";
    let learned = "{ router = 'two-stage', shared_heads = 2, routed_top_k = 1 }";
    let stages = ["adapt", "moh"].map(|stage| format!("stage.{stage}.moh={learned}"));
    let changes = [new, FIRST[0], &stages[0], &stages[1], "run.dtype=bf16"];
    let whole = recipe(&place, "whole", &changes);
    finish(&whole);
    let lines = |recipe: &Recipe| routing_log::read(&run_of(recipe).routing()).unwrap();
    let moments = |moment| lines(&whole).iter().filter(|line| line.moment == moment).count();
    // Of two layers.
    assert_eq!((moments(RoutingMoment::Loaded), moments(RoutingMoment::Converted)), (2, 2));
    let stopped = recipe(&place, "stopped", &changes);
    for step in [1, 5] {
        stop_at(&stopped, step);
    }
    finish(&stopped);
    assert_eq!(lines(&stopped), lines(&whole));
    assert!(Results::of(&stopped) == Results::of(&whole));
    // Without validation data.
    let mut without = recipe(&place, "without", &changes);
    without.data.validation.clear();
    finish(&without);
    assert_eq!(Results::of(&without).weights, Results::of(&whole).weights);
}

#[test]
fn a_router_that_no_calibration_has_fitted_is_refused() {
    let place = TestRun::new();
    // Of 7 active heads one layer has all 4, and no router; the next stage has other heads, and would need it.
    let total = "stage.adapt.moh={ router = 'linear', shared_heads = 0, routed_top_k = [3, 4], \
                 calibration = { tokens = 128, shared = 'calibrated-total' } }";
    let own = "stage.moh.moh={ router = 'linear', shared_head_ids = [[0], [1]], routed_top_k = 2 }";
    let recipe = recipe(&place, "run", &[FIRST[0], total, own]);
    let error = Start::default().run(&recipe).unwrap_err().to_string();
    assert!(error.contains("stage moh needs model.layers."), "{error}");
    assert!(error.contains("which no calibration has fitted: let it keep the heads"), "{error}");
}

#[test]
fn a_replay_adds_matrices_where_the_run_has() {
    let place = TestRun::new();
    for (name, stages) in
        [("learned", [LEARNED, "run.dtype=bf16"]), ("zeros", [ZEROS, "run.dtype=f32"])]
    {
        // The last checkpoint before the second stage is of step 4, without the router.
        let changes = [stages[0], stages[1], "checkpoint.keep=9", "checkpoint.every_steps=4"];
        let recipe = recipe(&place, name, &changes);
        finish(&recipe);
        fs::remove_dir_all(run_of(&recipe).checkpoint(5)).unwrap();
        let found = replay(&recipe, 7).unwrap();
        assert_eq!(found.from, 4, "{name}");
        let line = &Results::of(&recipe).metrics[6];
        assert_eq!(found.result.loss, line["loss"].as_f64().unwrap(), "{name}");
        assert_eq!(found.result.grad_norm, line["grad_norm"].as_f64().unwrap(), "{name}");
    }
}

#[test]
fn another_run_continues_a_calibrated_stage() {
    let place = TestRun::new();
    let parent = recipe(&place, "parent", &[SECOND, "checkpoint.keep=9"]);
    finish(&parent);
    let from = format!("{}@8", parent.run.dir.display());
    let mut child = recipe_from(&place, "child", &["stage.adapt.attention=moh"], from);
    child.stages.truncate(1);
    finish(&child);
    let [parent, child] =
        [parent, child].map(|recipe| ConfigFile::read(&run_of(&recipe).export()).unwrap());
    assert_eq!(child.config.moh.unwrap().shared_heads, parent.config.moh.unwrap().shared_heads);
    assert_eq!(child.fields["moh_output_refitted"], true);
}

#[test]
fn another_run_gives_its_model_a_router() {
    let place = TestRun::new();
    let parent = dense_run(&place);
    let child = |name: &str| {
        let from = format!("{}@5", parent.run.dir.display());
        let mut child = recipe_from(&place, name, &LEARNED_FIRST, from);
        child.model.moments = true;
        child
    };
    let whole = child("whole");
    let reference = finish_on(1, &whole);
    assert_alike(&finish_on(2, &child("ranks")), &reference, "2 ranks");
    let stopped = child("stopped");
    for step in [1, 5] {
        stop_at(&stopped, step);
    }
    finish(&stopped);
    assert!(Results::of(&stopped) == reference);
    let first = replay(&whole, 1).unwrap().result.loss;
    assert_eq!(first, reference.metrics[0]["loss"].as_f64().unwrap());
}

#[test]
fn a_model_that_is_no_dense_one_is_refused() {
    let place = TestRun::new();
    let parent = recipe(&place, "parent", &[]);
    finish(&parent);
    let from = run_of(&parent).export().display().to_string();
    let child = recipe_from(&place, "child", &FIRST, from);
    let error = Start::default().run(&child).unwrap_err().to_string();
    assert!(
        error.contains("stage.adapt.moh.calibration: the run's model is a Mixture-of-Head"),
        "{error}"
    );
    assert!(!child.run.dir.exists());
}

#[test]
fn the_teacher_of_the_start_is_the_model_before_its_refit() {
    let place = TestRun::new();
    let parent = dense_run(&place);
    let child = |name: &str| {
        let from = run_of(&parent).export().display().to_string();
        let mut child = recipe_from(&place, name, &FIRST, from);
        for stage in &mut child.stages {
            stage.distill = Some(DistillOptions {
                teacher: START.to_owned(),
                weight: 1.0,
                cross_entropy: 1.0,
                temperature: 1.0,
                attention_output: 0.0,
                attention_output_tokens: None,
            });
        }
        child
    };
    let whole = child("whole");
    finish(&whole);
    let first = Results::of(&whole).metrics[0]["distillation_loss"].as_f64().unwrap();
    assert!(first > 0.0, "{first}");
    let stopped = child("stopped");
    for step in [2, 6] {
        stop_at(&stopped, step);
    }
    finish(&stopped);
    assert!(Results::of(&stopped) == Results::of(&whole));
}
