//! Calibrated stages: they start with the heads, output projections and routers that crate `moh-calibrate` finds on
//! sequences that they do not train on. This holds on any layout of ranks, and with the same bits after a stop or a
//! kill at any moment. Also stages with a router that has matrices that the model lacks, calibrated or not.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::driver::{
    Start, finish, finish_in_parts, finish_on, heard, refuses, replay, run_in, stop_at,
    stop_ranks_when, stop_when, watch,
};
use crate::support::results::{Results, assert_alike};
use crate::support::{MICRO_BATCHES, TestRun, arranged, run_of, summary_of};
use moh_calibrate::{
    Calibration, CalibrationOptions, CalibrationTokens, FoundLayer, LayerStore, Watch, calibrate,
};
use moh_checkpoint::run_log::routing_log::{self, RoutingMoment};
use moh_checkpoint::{RunDirectory, StoredCheckpoint};
use moh_comm::World;
use moh_hf::ConfigFile;
use moh_kernels::Cpu;
use moh_model::tensors::{OUTPUT_PROJECTION, ROUTER, ROUTER_STAGES, in_layer};
use moh_model::{RouterKind, SharedChoice};
use moh_plan::open_training;
use moh_recipe::{Recipe, START};
use moh_step::TensorKind;
use moh_testkit::assert_refused;
use moh_testkit::programs::{copy_all, edit_json, flip};
use moh_train::{Event, Outcome, RunOptions, TimeLimit};
use safetensors::SafeTensors;

/// The second stage converts, after 5 steps of 8 samples, and is calibrated on 16 sequences.
const SECOND: &str = "stage.moh.moh={ router = 'query-norm', shared_heads = 2, routed_top_k = 1, \
                      calibration = { tokens = 135 } }";
/// The first stage is calibrated, with the default router, and the second stage keeps its heads and its router.
const FIRST: [&str; 3] = [
    "stage.adapt.attention=moh",
    "stage.adapt.moh={ shared_heads = 2, routed_top_k = 1, calibration = { tokens = 128 } }",
    "stage.moh.moh={ shared_heads = 2, routed_top_k = 1 }",
];
/// As `FIRST`, with a router without matrices, and the first stage chooses the number of shared heads too.
const NUMBERS: [&str; 3] = [
    FIRST[0],
    "stage.adapt.moh={ router = 'query-norm', shared_heads = 2, routed_top_k = 1, \
     calibration = { tokens = 128, shared = 'calibrated-number' } }",
    FIRST[2],
];
const LEARNED: &str = "stage.moh.moh={ router = 'two-stage', shared_heads = 1, routed_top_k = 2, \
                       calibration = { tokens = 128 } }";
/// The first stage fits the router alone, and the second stage keeps it.
const LEARNED_FIRST: [&str; 3] = [
    FIRST[0],
    "stage.adapt.moh={ shared_heads = 2, routed_top_k = 1, \
     calibration = { tokens = 128, shared = 'given', refit = false } }",
    FIRST[2],
];
/// The second stage has a learned router that is not fitted.
const ZEROS: &str = "stage.moh.moh={ router = 'two-stage', shared_heads = 1, routed_top_k = 2 }";

const BF16: &str = "run.dtype=bf16";
/// Every checkpoint stays.
const KEEP: &str = "checkpoint.keep=9";

/// Returns a finished run of the dense first stage alone.
fn dense_run(place: &TestRun) -> RunDirectory {
    let mut recipe = place.recipe_in("parent", &[]);
    recipe.stages.truncate(1);
    finish(&recipe);
    run_of(&recipe)
}

/// The output projections of layers.
#[derive(Default)]
struct Layers(Vec<Vec<f32>>);

impl LayerStore<moh_calibrate::Error> for Layers {
    fn known(&mut self, _: usize) -> moh_calibrate::Result<Option<FoundLayer>> {
        Ok(None)
    }

    fn keep(&mut self, found: FoundLayer) -> moh_calibrate::Result<()> {
        self.0.extend(found.projection);
        Ok(())
    }
}

/// Returns the result of crate `moh-calibrate` for the checkpoint of step 5, on the 16 samples after the second stage's
/// samples, and the output projections.
fn expected(recipe: &Recipe, shared: SharedChoice) -> (Calibration, Vec<Vec<f32>>) {
    let stored = StoredCheckpoint::of_step(&run_of(recipe), 5).unwrap();
    let config = moh_checkpoint::run_directory::config_file(&stored, Path::new("config.json"))
        .unwrap()
        .config;
    let data = &open_training(recipe, config.vocab_size).unwrap()[1];
    let mut ids = Vec::new();
    let trained = recipe.stages[1].num_steps() * recipe.batch_sequences(&recipe.stages[1]);
    for number in (40..56).map(|number| number + trained) {
        let mut window = vec![0; data.sequence_length() + 1];
        data.sample(number, &mut window, None).unwrap();
        ids.extend_from_slice(&window[..data.sequence_length()]);
    }
    let tokens = CalibrationTokens::new(ids, data.sequence_length(), 4096, &config).unwrap();
    let moh = recipe.stages[1].moh_config(&config).unwrap().unwrap();
    let options = CalibrationOptions { moh, shared, refit: true, stored: None };
    let mut layers = Layers::default();
    let mut read = |name: &str, values: &mut [f32]| {
        stored.read_f32(TensorKind::Weight, name, values).unwrap();
        Ok::<_, moh_calibrate::Error>(())
    };
    let watch = Watch { progress: &mut |_, _| (), is_stopped: &|| false };
    let found = calibrate(&Cpu, &config, &options, &tokens, &mut read, &mut layers, watch).unwrap();
    (found.unwrap(), layers.0)
}

/// Returns a tensor of each layer of the export, in order.
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

fn config_of(recipe: &Recipe) -> ConfigFile {
    ConfigFile::read(&run_of(recipe).export()).unwrap()
}

/// Returns the heads that the calibration of a run has chosen in each layer.
fn chosen(recipe: &Recipe) -> Vec<(Vec<usize>, usize)> {
    let layers = summary_of(recipe).calibrations.remove(0).layers;
    layers.into_iter().map(|layer| (layer.shared_heads, layer.routed_top_k)).collect()
}

#[test]
fn a_stage_begins_with_what_is_measured_on_its_first_sequences() {
    let place = TestRun::new();
    // The output projections stay as they are at the stage's start.
    let frozen = "stage.moh.optimizer.groups={ attention = 0 }";
    let recipe = place.recipe_in("run", &[SECOND, frozen, KEEP]);
    let heard = heard(&recipe, |event| match event {
        Event::Calibrated(calibration) => Some((*calibration).clone()),
        _ => None,
    });
    let (calibration, projections) = expected(&recipe, SharedChoice::Calibrated);
    assert_eq!(exported(&recipe, OUTPUT_PROJECTION), projections);
    let (run, config) = (run_of(&recipe), config_of(&recipe));
    assert_eq!(config.config.moh, Some(calibration.moh.clone()));
    assert_eq!(config.fields["moh_output_refitted"], true);
    // The checkpoint of the boundary is the dense model's, and the stage's checkpoints have the heads.
    let fields = |step| {
        let stored = StoredCheckpoint::of_step(&run, step).unwrap();
        stored.manifest().config.clone()
    };
    assert!(
        !fields(5).contains_key("moh_router") && !fields(5).contains_key("moh_output_refitted")
    );
    assert_eq!(fields(6)["moh_output_refitted"], true);
    let summary = summary_of(&recipe);
    assert_eq!(summary.calibrations, heard);
    let found = &summary.calibrations[0];
    assert_eq!(
        (found.stage.as_str(), found.step, found.tokens, found.refit),
        ("moh", 5, 128, true)
    );
    let expected = calibration.losses;
    assert_eq!([found.loss_dense, found.loss], [expected.dense, expected.calibrated]);
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
    // The matrices stay as they are at the stage's start.
    let frozen = "stage.moh.optimizer.groups={ attention = 0, router = 0 }";
    let recipe = place.recipe_in("run", &[LEARNED, frozen, KEEP]);
    finish(&recipe);
    let (calibration, projections) = expected(&recipe, SharedChoice::Calibrated);
    let fits = calibration.layers.into_iter().map(|layer| layer.router.unwrap().rows);
    assert_eq!(exported(&recipe, ROUTER), fits.collect::<Vec<_>>());
    assert_eq!(exported(&recipe, OUTPUT_PROJECTION), projections);
    assert!(exported(&recipe, ROUTER_STAGES).iter().flatten().all(|&value| value == 0.0));
    assert_eq!(config_of(&recipe).config.moh, Some(calibration.moh));
}

#[test]
fn a_router_that_is_not_fitted_begins_with_zeros() {
    let place = TestRun::new();
    let converted = |name, moh| {
        let recipe = place.recipe_in(name, &[moh]);
        finish(&recipe);
        let summary = summary_of(&recipe);
        assert_eq!(summary.evaluations.len(), 4);
        (summary.evaluations[2].loss, recipe)
    };
    let (loss, learned) = converted("learned", ZEROS);
    // With equal logits the first heads are selected, with weight 1.
    let all = "stage.moh.moh={ router = 'static', shared_heads = 3, routed_top_k = 0 }";
    let (of_first, _) = converted("static", all);
    assert!((loss / of_first - 1.0).abs() < 1e-6, "{loss}, not {of_first}");
    // The stage trains the router.
    for name in [ROUTER, ROUTER_STAGES] {
        assert!(exported(&learned, name).iter().all(|of| of.iter().any(|&value| value != 0.0)));
    }
}

#[test]
fn a_stage_can_begin_with_the_best_numbers_of_heads() {
    let place = TestRun::new();
    for (name, heads) in [
        ("number", "router = 'query-norm', shared_heads = 0, routed_top_k = 3"),
        ("learned", "router = 'linear', shared_heads = 1, routed_top_k = 2"),
    ] {
        let calibration = "calibration = { tokens = 128, shared = 'calibrated-number' }";
        let moh = format!("stage.moh.moh={{ {heads}, {calibration} }}");
        let recipe = place.recipe_in(name, &[&moh, KEEP]);
        finish(&recipe);
        let found = config_of(&recipe).config.moh.unwrap();
        assert_eq!(found, expected(&recipe, SharedChoice::CalibratedNumber).0.moh, "{name}");
        let layers = [0, 1].map(|layer| found.layer(layer));
        assert!(layers.iter().all(|layer| layer.active() == 3), "{found:?}");
        assert!(layers.iter().any(|layer| !layer.shared.is_empty()), "{found:?}");
    }
}

#[test]
fn later_stages_keep_the_heads() {
    let place = TestRun::new();
    for (name, changes, router) in
        [("heads", FIRST, RouterKind::Linear), ("numbers", NUMBERS, RouterKind::QueryNorm)]
    {
        let recipe = place.recipe_in(name, &changes);
        finish(&recipe);
        let moh = config_of(&recipe).config.moh.unwrap();
        let kept = [0, 1].map(|layer| moh.layer(layer));
        let kept = kept.map(|layer| (layer.shared.heads().collect(), layer.top_k));
        assert_eq!(chosen(&recipe), kept, "{name}");
        assert_eq!(moh.router, router, "{name}");
        // The model as loaded, converted and after each stage, without a conversion between the stages.
        assert_eq!(summary_of(&recipe).evaluations.len(), 4, "{name}");
    }
}

#[test]
fn the_given_heads_and_weights_can_stay() {
    let place = TestRun::new();
    let with = |name, options: &str| {
        let moh = format!(
            "stage.moh.moh={{ router = 'query-norm', shared_head_ids = [[1, 3], [0, 2]], routed_top_k = 1{options} }}"
        );
        let recipe = place.recipe_in(name, &[&moh]);
        let weights = finish(&recipe).weights;
        (config_of(&recipe).config.moh, weights)
    };
    let refitted = with("refitted", ", calibration = { tokens = 128, shared = \"given\" }");
    let without = with("without", "");
    assert_eq!(refitted.0, without.0);
    assert_ne!(refitted.1, without.1);
    // Chosen heads with unchanged weights.
    let chosen = "stage.moh.moh={ shared_heads = 2, routed_top_k = 1, calibration = { tokens = 128, refit = false } }";
    let chosen = place.recipe_in("chosen", &[chosen]);
    finish(&chosen);
    let run = run_of(&chosen);
    assert!(run.calibration(5).is_file() && run.calibrated_layers(5).is_file());
    assert!(!config_of(&chosen).fields.contains_key("moh_output_refitted"));
}

#[test]
fn a_stop_and_a_kill_leave_the_same_bits() {
    let place = TestRun::new();
    for (number, changes) in [
        &[SECOND, BF16][..],
        &FIRST,
        &[FIRST[0], FIRST[1], FIRST[2], BF16],
        &[NUMBERS[0], NUMBERS[1], NUMBERS[2], BF16],
        &[LEARNED, BF16],
        &LEARNED_FIRST,
        &[ZEROS, BF16],
    ]
    .into_iter()
    .enumerate()
    {
        let named = |name: &str| place.recipe_in(&format!("{name}-{number}"), changes);
        // The files that a process killed after these steps would leave.
        let killed = [1, 5, 6].map(|step| (step, named(&format!("killed-{step}"))));
        let copies = killed.each_ref().map(|(step, copy)| (*step, copy.run.dir.as_path()));
        let whole = Start { copies: &copies, ..Start::default() }.finish(&named("whole"));
        for (step, copy) in &killed {
            assert!(finish(copy) == whole, "{changes:?}: killed at {step}");
        }
        let stopped = finish_in_parts(&named("stopped"), [1, 4, 5, 6, 9]);
        assert!(stopped == whole, "{changes:?}: stopped");
    }
}

/// Runs a recipe to its end; returns whether the run has calibrated.
fn measures(recipe: &Recipe) -> bool {
    !heard(recipe, |event| matches!(event, Event::Calibrating { .. }).then_some(())).is_empty()
}

#[test]
fn a_result_is_used_again_if_it_is_whole_and_of_the_same_run() {
    let place = TestRun::new();
    let whole = place.recipe_in("whole", &[SECOND]);
    assert!(measures(&whole));
    let results = Results::of(&whole);
    let before = place.recipe_in("before", &[SECOND]);
    stop_at(&before, 5);
    // Each changes the result, or the file with the fitted matrices.
    type Change = fn(&Path, &Path);
    let changes: [(&str, Change); 4] = [
        ("same", |_, _| {}),
        ("identity", |record, _| {
            let text = fs::read_to_string(record).unwrap();
            fs::write(record, text.replacen("\"identity\": \"", "\"identity\": \"0", 1)).unwrap();
        }),
        ("matrices", |_, matrices| flip(matrices, |length| length - 1)),
        // A record with one layer more than the model.
        ("layers", |path, _| {
            edit_json(path, |record| {
                let list = record.pointer_mut("/calibration/layers").unwrap();
                let list = list.as_array_mut().unwrap();
                list.push(list[0].clone());
            });
        }),
    ];
    for (name, change) in changes {
        let again = place.recipe_in(name, &[SECOND]);
        copy_all(&before.run.dir, &again.run.dir);
        let [record, matrices] =
            [RunDirectory::calibration, RunDirectory::calibrated_layers].map(|file| {
                let path = file(&run_of(&again), 5);
                fs::copy(file(&run_of(&whole), 5), &path).unwrap();
                path
            });
        change(&record, &matrices);
        assert_eq!(measures(&again), name != "same", "{name}");
        assert!(Results::of(&again) == results, "{name}");
    }
}

#[test]
fn a_run_that_is_asked_to_stop_while_it_measures_goes_on_later() {
    let place = TestRun::new();
    let whole = finish(&place.recipe_in("whole", &[SECOND]));
    let stopped = place.recipe_in("stopped", &[SECOND]);
    let outcome = stop_when(&stopped, |event| matches!(event, Event::Calibrating { done: 0, .. }));
    assert_eq!(outcome, Outcome::Stopped { step: 5 });
    assert!(!run_of(&stopped).calibration(5).exists());
    assert!(measures(&stopped));
    assert!(Results::of(&stopped) == whole);
}

#[test]
fn a_time_limit_ends_the_measurement() {
    let place = TestRun::new();
    let whole = finish(&place.recipe_in("whole", &FIRST));
    let limited = place.recipe_in("limited", &FIRST);
    let never = AtomicBool::new(false);
    let limit = Some(TimeLimit::new(Instant::now(), Duration::from_nanos(1)));
    let options = RunOptions { time_limit: limit, ..RunOptions::new(&never) };
    let outcome = run_in(&World::single(), &limited, options, &mut |_| {});
    assert_eq!(outcome.unwrap(), Outcome::StoppedBeforeTraining);
    assert!(!run_of(&limited).calibration(0).exists());
    assert!(measures(&limited));
    assert!(Results::of(&limited) == whole);
}

#[test]
fn a_rank_that_is_asked_to_stop_ends_the_measurement_of_the_first() {
    let place = TestRun::new();
    let recipe = place.recipe_in("stopped", &[SECOND]);
    // The signal reaches the second rank alone.
    let is_measuring = |event: &Event<'_>| matches!(event, Event::Calibrating { .. });
    let outcome = stop_ranks_when((2, 1..2), &recipe, is_measuring);
    assert_eq!(outcome, Outcome::Stopped { step: 5 });
    let summary = finish(&recipe).summary;
    assert!(summary.contains("\"calibrations\""), "{summary}");
}

#[test]
fn a_run_that_goes_back_to_the_stages_beginning_has_the_same_heads() {
    let place = TestRun::new();
    for (name, stage) in [("second", SECOND), ("learned", LEARNED)] {
        let recipe = place.recipe_in(name, &[stage, BF16, KEEP]);
        let whole = finish(&recipe);
        let back = Start { resume_step: Some(5), ..Start::default() };
        let found = back.finish_and_hear(&recipe, |event, _| {
            assert!(!matches!(event, Event::Calibrating { .. }));
        });
        assert!(found == whole, "{stage}");
    }
}

#[test]
fn a_run_that_is_stopped_in_any_evaluation_has_the_same_router() {
    let place = TestRun::new();
    for (name, changes) in
        [("zeros", &[ZEROS, BF16][..]), ("fitted", &[LEARNED]), ("first", &LEARNED_FIRST)]
    {
        let whole = finish(&place.recipe_in(name, changes));
        // As loaded, after step 3, and so on: seven in all.
        for number in 0..7 {
            let stopped = place.recipe_in(&format!("{name}-{number}"), changes);
            let mut evaluations = 0;
            let outcome = watch(&stopped, |event, stop| {
                if matches!(event, Event::Evaluating { done: 0, .. }) {
                    stop.fetch_or(evaluations == number, Ordering::Relaxed);
                    evaluations += 1;
                }
            });
            assert!(!matches!(outcome.unwrap(), Outcome::Finished(_)), "{name} {number}");
            assert!(finish(&stopped) == whole, "{name} {number}");
        }
    }
}

#[test]
fn every_layout_has_the_same_heads_and_matrices() {
    let place = TestRun::new();
    for (number, changes, step) in [
        (0, &FIRST[..], 0),
        (1, &[SECOND], 5),
        (2, &NUMBERS, 0),
        (3, &[LEARNED], 5),
        (4, &LEARNED_FIRST, 0),
    ] {
        let recipe = |name: &str, layout| {
            let recipe = place.recipe_in(name, &[changes, &MICRO_BATCHES].concat());
            arranged(recipe, [layout; 2])
        };
        let matrices = |recipe: &Recipe| fs::read(run_of(recipe).calibrated_layers(step)).unwrap();
        let one = recipe(&format!("one-{number}"), [1, 1, 1]);
        let reference = finish_on(1, &one);
        for (ranks, layout) in
            [(2, [1, 1, 1]), (2, [2, 1, 1]), (2, [1, 2, 1]), (4, [2, 2, 1]), (3, [1, 1, 1])]
        {
            let what = format!("{number}, {ranks} ranks, {layout:?}");
            let other = recipe(&what, layout);
            let found = finish_on(ranks, &other);
            assert_eq!(chosen(&other), chosen(&one), "{what}");
            // From the same initial weights the bits are equal. Sums of training have another order.
            assert!(step > 0 || matrices(&other) == matrices(&one), "{what}");
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
        ("second", &[SECOND, BF16], 5),
        ("learned", &[LEARNED, BF16], 5),
        ("learned-first", &LEARNED_FIRST, 0),
    ] {
        let recipe = place.recipe_in(name, &[changes, &[KEEP]].concat());
        for (step, line) in (1..).zip(&finish(&recipe).metrics) {
            let found = replay(&recipe, step).unwrap();
            assert_eq!(found.result.loss, line["loss"].as_f64().unwrap(), "{name} {step}");
        }
        fs::remove_file(run_of(&recipe).calibration(step)).unwrap();
        assert_refused(replay(&recipe, step + 1), "is not there any more, and the steps before");
        replay(&recipe, 10).unwrap();
    }
}

#[test]
fn evaluations_before_a_new_router_are_kept_and_not_needed() {
    let place = TestRun::new();
    // A Mixture-of-Head model: the evaluation of the loaded model counts its heads.
    let new = "model.new.moh={ router = 'query-norm', shared_heads = 2, routed_top_k = 1 }";
    let learned = "{ router = 'two-stage', shared_heads = 2, routed_top_k = 1 }";
    let stages = ["adapt", "moh"].map(|stage| format!("stage.{stage}.moh={learned}"));
    let changes = [new, FIRST[0], &stages[0], &stages[1], BF16];
    let whole = place.recipe_in("whole", &changes);
    let results = finish(&whole);
    let lines = |recipe: &Recipe| routing_log::read(&run_of(recipe).routing()).unwrap();
    let moments = |moment| lines(&whole).iter().filter(|line| line.moment == moment).count();
    // A line for each of two layers.
    assert_eq!((moments(RoutingMoment::Loaded), moments(RoutingMoment::Converted)), (2, 2));
    let stopped = place.recipe_in("stopped", &changes);
    assert!(finish_in_parts(&stopped, [1, 5]) == results);
    assert_eq!(lines(&stopped), lines(&whole));
    // Without validation data.
    let mut without = place.recipe_in("without", &changes);
    without.data.validation.clear();
    assert_eq!(finish(&without).weights, results.weights);
}

#[test]
fn a_replay_adds_matrices_where_the_run_has() {
    let place = TestRun::new();
    for (name, stage, dtype) in [("learned", LEARNED, BF16), ("zeros", ZEROS, "run.dtype=f32")] {
        // The last checkpoint before the second stage is of step 4, without the router.
        let recipe = place.recipe_in(name, &[stage, dtype, KEEP, "checkpoint.every_steps=4"]);
        let line = finish(&recipe).metrics.swap_remove(6);
        fs::remove_dir_all(run_of(&recipe).checkpoint(5)).unwrap();
        let found = replay(&recipe, 7).unwrap();
        assert_eq!(found.from, 4, "{name}");
        assert_eq!(found.result.loss, line["loss"].as_f64().unwrap(), "{name}");
        assert_eq!(found.result.grad_norm, line["grad_norm"].as_f64().unwrap(), "{name}");
    }
}

#[test]
fn another_run_continues_a_calibrated_stage() {
    let place = TestRun::new();
    let parent = place.recipe_in("parent", &[SECOND, KEEP]);
    finish(&parent);
    let from = format!("{}@8", parent.run.dir.display());
    let mut child = place.recipe_from(from, "child", &[FIRST[0]]);
    child.stages.truncate(1);
    finish(&child);
    let [parent, child] = [parent, child].map(|recipe| config_of(&recipe));
    assert_eq!(child.config.moh.unwrap().shared_heads, parent.config.moh.unwrap().shared_heads);
    assert_eq!(child.fields["moh_output_refitted"], true);
}

#[test]
fn another_run_gives_its_model_a_router() {
    let place = TestRun::new();
    let parent = dense_run(&place);
    let child = |name: &str| {
        let from = format!("{}@5", parent.root().display());
        let mut child = place.recipe_from(from, name, &LEARNED_FIRST);
        child.model.moments = true;
        child
    };
    let whole = child("whole");
    let reference = finish(&whole);
    assert_alike(&finish_on(2, &child("ranks")), &reference, "2 ranks");
    assert!(finish_in_parts(&child("stopped"), [1, 5]) == reference);
    let first = replay(&whole, 1).unwrap().result.loss;
    assert_eq!(first, reference.metrics[0]["loss"].as_f64().unwrap());
}

#[test]
fn a_model_that_is_no_dense_one_is_refused() {
    let place = TestRun::new();
    let parent = place.recipe_in("parent", &[]);
    finish(&parent);
    let from = run_of(&parent).export().display().to_string();
    let child = place.recipe_from(from, "child", &FIRST);
    refuses(&child, "stage.adapt.moh.calibration: the run's model is a Mixture-of-Head");
    assert!(!child.run.dir.exists());
}

#[test]
fn the_teacher_of_the_start_is_the_model_before_its_refit() {
    let place = TestRun::new();
    let from = dense_run(&place).export().display().to_string();
    let child = |name: &str| {
        let mut child = place.recipe_from(&from, name, &FIRST);
        for stage in &mut child.stages {
            let distill = serde_json::json!({ "teacher": START, "cross_entropy": 1.0 });
            stage.distill = serde_json::from_value(distill).unwrap();
        }
        child
    };
    let whole = finish(&child("whole"));
    let first = whole.metrics[0]["distillation_loss"].as_f64().unwrap();
    assert!(first > 0.0, "{first}");
    assert!(finish_in_parts(&child("stopped"), [2, 6]) == whole);
}
