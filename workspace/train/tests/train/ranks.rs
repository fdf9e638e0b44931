//! Runs on several ranks end as a run on one: the same losses and weights but for the order of sums,
//! whatever the number of ranks and the pipeline that they form, and continued on others.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::support::TestRun;
use crate::support::driver::run_in;
use crate::support::results::{Results, assert_alike};
use crate::support::stories::Stories;
use moh_checkpoint::run_directory::RunDirectory;
use moh_recipe::Recipe;
use moh_testkit::ranks::on_ranks;
use moh_train::{Error, Event, Outcome, RunOptions};

/// Runs a recipe on threads that play `ranks` ranks, each with one thread of its own for the operators;
/// with `stop_at`, one of them is asked to stop after that step.
fn train_on(ranks: usize, recipe: &Recipe, stop_at: Option<u64>) -> Vec<Result<Outcome, Error>> {
    // The signal reaches the last rank alone.
    train_and_hear((ranks, ranks - 1..ranks), recipe, &|event, stop| {
        if matches!(event, Event::Step { step, .. } if Some(*step) == stop_at) {
            stop.store(true, Ordering::Relaxed);
        }
    })
}

/// As [`train_on`]; the first rank calls `on_event` with its events and what asks the `reached` ranks to stop.
fn train_and_hear(
    (ranks, reached): (usize, Range<usize>),
    recipe: &Recipe,
    on_event: &(dyn Fn(&Event<'_>, &AtomicBool) + Sync),
) -> Vec<Result<Outcome, Error>> {
    let stop = AtomicBool::new(false);
    on_ranks(ranks, |world| {
        let own_stop = AtomicBool::new(false);
        let asked = if reached.contains(&world.rank()) { &stop } else { &own_stop };
        let mut heard = |event: Event<'_>| on_event(&event, &stop);
        run_in(world, recipe, RunOptions::new(asked), &mut heard)
    })
}

/// Stops a run during `step`, or the step after it: ranks hear of a signal when they hear of it.
fn stop_on(ranks: usize, recipe: &Recipe, step: u64) -> u64 {
    let outcomes: Vec<_> =
        train_on(ranks, recipe, Some(step)).into_iter().map(Result::unwrap).collect();
    let Outcome::Stopped { step: stopped } = outcomes[0] else { panic!("{outcomes:?}") };
    assert!(stopped == step || stopped == step + 1, "{outcomes:?}");
    assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "{outcomes:?}");
    stopped
}

fn finish_on(ranks: usize, recipe: &Recipe) -> Results {
    for outcome in train_on(ranks, recipe, None) {
        assert!(matches!(outcome.unwrap(), Outcome::Finished(_)));
    }
    Results::of(recipe)
}

/// Eight micro-batches a step.
const MICRO_BATCHES: [&str; 2] = ["stage.adapt.micro_batch=1", "stage.moh.micro_batch=1"];

#[test]
fn every_number_of_ranks_ends_as_one() {
    let place = TestRun::new();
    let reference = finish_on(1, &place.recipe(&MICRO_BATCHES));
    // Uneven shares; as many ranks as micro-batches; more of them, of which some have no work.
    for ranks in [2, 3, 4, 6, 8, 11] {
        let place = TestRun::new();
        let recipe = place.recipe(&MICRO_BATCHES);
        let found = finish_on(ranks, &recipe);
        assert_alike(&found, &reference, &format!("{ranks} ranks"));
        let again = TestRun::new();
        let repeated = finish_on(ranks, &again.recipe(&MICRO_BATCHES));
        assert!(repeated.weights == found.weights, "{ranks} ranks: other bits the second time");
    }
}

/// The recipe with so many stages of a pipeline in its two stages of training.
fn pipelines(adapt: usize, moh: usize) -> Vec<String> {
    let mut changes = MICRO_BATCHES.map(str::to_owned).to_vec();
    changes.push(format!("stage.adapt.parallel.pipeline={adapt}"));
    changes.push(format!("stage.moh.parallel.pipeline={moh}"));
    changes
}

#[test]
fn every_pipeline_ends_as_one_rank() {
    for tied in ["model.new.tie_word_embeddings=false", "model.new.tie_word_embeddings=true"] {
        let recipe = |place: &TestRun, changes: &[String]| {
            let changes: Vec<&str> = changes.iter().map(String::as_str).chain([tied]).collect();
            place.recipe(&changes)
        };
        let place = TestRun::new();
        let reference = finish_on(1, &recipe(&place, &pipelines(1, 1)));
        // Alone, with data parallelism, with ranks that have no work, and another one in each stage.
        for (ranks, adapt, moh) in [(2, 2, 2), (6, 2, 2), (18, 2, 2), (4, 1, 2), (2, 2, 1)] {
            let place = TestRun::new();
            let found = finish_on(ranks, &recipe(&place, &pipelines(adapt, moh)));
            assert_alike(&found, &reference, &format!("{ranks} ranks, {adapt}, {moh}, {tied}"));
        }
    }
}

/// The recipe with so many ranks that share tensors and stages of a pipeline in its two stages.
fn arranged(adapt: (usize, usize), moh: (usize, usize)) -> Vec<String> {
    let mut changes = pipelines(adapt.1, moh.1);
    changes.push(format!("stage.adapt.parallel.tensor={}", adapt.0));
    changes.push(format!("stage.moh.parallel.tensor={}", moh.0));
    changes
}

/// A Mixture-of-Head model from scratch, whose learned router weighs heads, others in each layer.
const TWO_STAGE: [&str; 3] = [
    "model.new.moh={ router = \"two-stage\", shared_heads = [1, 2], routed_top_k = [2, 1] }",
    "stage.adapt.attention=moh",
    "stage.moh.moh={ shared_head_ids = [[2], [0]], routed_top_k = 1 }",
];

#[test]
fn every_share_of_the_tensors_ends_as_one_rank() {
    // Tied or not; every layer saved, norms computed again, or blocks; documents apart; another architecture.
    for changes in [
        &["model.new.tie_word_embeddings=true", "memory.recompute=none"][..],
        &["model.new.tie_word_embeddings=false", "memory.recompute=cheap"],
        &["memory.recompute=block", "data.document_mask=true"],
        &["model.new.model_type=qwen3", "memory.recompute=cheap"],
        &TWO_STAGE,
    ] {
        let recipe = |place: &TestRun, arrangement: &[String]| {
            let all = arrangement.iter().map(String::as_str).chain(changes.iter().copied());
            place.recipe(&all.collect::<Vec<_>>())
        };
        let place = TestRun::new();
        let reference = finish_on(1, &recipe(&place, &arranged((1, 1), (1, 1))));
        // Alone; with data parallelism, ranks that have no work and a pipeline; another in each stage.
        for (ranks, adapt, moh) in [
            (2, (2, 1), (2, 1)),
            (4, (2, 1), (2, 1)),
            (18, (2, 1), (2, 1)),
            (4, (2, 2), (2, 2)),
            (4, (2, 1), (1, 2)),
        ] {
            let place = TestRun::new();
            let found = finish_on(ranks, &recipe(&place, &arranged(adapt, moh)));
            let what = format!("{ranks} ranks, {adapt:?}, {moh:?}, {changes:?}");
            assert_alike(&found, &reference, &what);
            let again = TestRun::new();
            let repeated = finish_on(ranks, &recipe(&again, &arranged(adapt, moh)));
            assert!(repeated.weights == found.weights, "{what}: other bits the second time");
        }
    }
}

#[test]
fn stages_of_several_chunks_end_as_one_rank() {
    // Eight micro-batches a step: divisible by the number of stages, or not.
    for changes in [
        &["model.new.tie_word_embeddings=true", "model.new.num_hidden_layers=6"][..],
        &["model.new.num_hidden_layers=6", "memory.recompute=block"],
    ] {
        let recipe = |place: &TestRun, stages: usize, chunks: usize, tensor: usize| {
            let mut all = arranged((tensor, stages), (tensor, stages));
            for stage in ["adapt", "moh"] {
                all.push(format!("stage.{stage}.parallel.virtual_stages={chunks}"));
            }
            let all = all.iter().map(String::as_str).chain(changes.iter().copied());
            place.recipe(&all.collect::<Vec<_>>())
        };
        let place = TestRun::new();
        let reference = finish_on(1, &recipe(&place, 1, 1, 1));
        for (ranks, stages, chunks, tensor) in
            [(2, 2, 3, 1), (3, 3, 2, 1), (6, 2, 2, 1), (8, 2, 2, 2), (18, 2, 3, 1)]
        {
            let place = TestRun::new();
            let found = finish_on(ranks, &recipe(&place, stages, chunks, tensor));
            let what = format!("{ranks} ranks, {stages} stages of {chunks}, {changes:?}");
            assert_alike(&found, &reference, &what);
            let again = TestRun::new();
            let repeated = finish_on(ranks, &recipe(&again, stages, chunks, tensor));
            assert!(repeated.weights == found.weights, "{what}: other bits the second time");
        }
    }
}

/// A dense layer and three with other heads each, arranged in `stages` stages of `chunks` chunks and shares
/// of the tensors.
fn mixed_layers(place: &TestRun, stages: usize, chunks: usize, tensor: usize) -> Recipe {
    let mut changes = arranged((tensor, stages), (tensor, stages));
    changes.push("model.new.num_hidden_layers=4".to_owned());
    changes.push("stage.moh.moh={shared_heads=[4,1,2,0],routed_top_k=[0,2,1,2]}".to_owned());
    for stage in ["adapt", "moh"] {
        changes.push(format!("stage.{stage}.parallel.virtual_stages={chunks}"));
    }
    place.recipe(&changes.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn layers_with_other_heads_end_as_one_rank() {
    let place = TestRun::new();
    let reference = finish_on(1, &mixed_layers(&place, 1, 1, 1));
    // Stages of their own layers; chunks whose buffers serve dense and other layers alternately; shares of
    // the heads; all of it with data parallelism.
    for (ranks, stages, chunks, tensor) in
        [(2, 2, 1, 1), (2, 2, 2, 1), (2, 1, 1, 2), (4, 2, 2, 2), (8, 2, 1, 2)]
    {
        let place = TestRun::new();
        let found = finish_on(ranks, &mixed_layers(&place, stages, chunks, tensor));
        let what = format!("{ranks} ranks, {stages} stages of {chunks}, {tensor} shares");
        assert_alike(&found, &reference, &what);
        assert_eq!(found.config, reference.config, "{what}");
    }
    let place = TestRun::new();
    stop_on(4, &mixed_layers(&place, 2, 2, 2), 7);
    let found = finish_on(2, &mixed_layers(&place, 1, 1, 2));
    assert_alike(&found, &reference, "stages and shares, then shares alone");
}

#[test]
fn shares_of_tensors_continue_as_another_layout() {
    let place = TestRun::new();
    let recipe =
        |changes: &[String]| place.recipe(&changes.iter().map(String::as_str).collect::<Vec<_>>());
    stop_on(8, &recipe(&arranged((2, 2), (2, 2))), 2);
    stop_on(3, &recipe(&arranged((1, 1), (1, 1))), 4);
    stop_on(2, &recipe(&arranged((1, 1), (2, 1))), 7);
    let found = finish_on(1, &recipe(&arranged((1, 1), (1, 1))));
    let other = TestRun::new();
    let what = "tensor 2 x pipeline 2 x data 2, then 3, 2 and 1";
    assert_alike(&found, &finish_on(1, &other.recipe(&MICRO_BATCHES)), what);
}

#[test]
fn a_pipeline_continues_as_another_layout() {
    let place = TestRun::new();
    let recipe =
        |changes: &[String]| place.recipe(&changes.iter().map(String::as_str).collect::<Vec<_>>());
    stop_on(4, &recipe(&pipelines(2, 2)), 2);
    stop_on(3, &recipe(&pipelines(1, 1)), 4);
    stop_on(2, &recipe(&pipelines(1, 2)), 7);
    let found = finish_on(1, &recipe(&pipelines(1, 1)));
    let other = TestRun::new();
    assert_alike(&found, &finish_on(1, &other.recipe(&MICRO_BATCHES)), "4 x 2, 3, 2 x 2, then 1");
}

#[test]
fn pipelines_that_ranks_cannot_form_are_refused_before_the_run_begins() {
    let place = TestRun::new();
    let changes = pipelines(2, 1);
    let recipe = place.recipe(&changes.iter().map(String::as_str).collect::<Vec<_>>());
    let outcomes = train_on(3, &recipe, None);
    let told = |error: &Error| !matches!(error, Error::Step(moh_step::Error::OtherRank { .. }));
    let error = outcomes.into_iter().map(Result::unwrap_err).find(told).unwrap().to_string();
    let parallel = "stage.adapt.parallel = { tensor = 1, pipeline = 2 }: 3 ranks were started";
    assert!(error.contains(parallel), "{error}");
    assert!(!recipe.run.dir.exists());
}

#[test]
fn rounded_weights_gradients_and_exchanges_stay_close() {
    let losses = |ranks: usize, changes: &[&str]| -> Vec<f64> {
        let place = TestRun::new();
        let results = finish_on(ranks, &place.recipe(&[&MICRO_BATCHES[..], changes].concat()));
        results.metrics.iter().map(|line| line["loss"].as_f64().unwrap()).collect()
    };
    for changes in [
        &["run.dtype=bf16"][..],
        &["precision.reduce=bf16"],
        &["run.dtype=bf16", "precision.gradients=bf16", "precision.moments=bf16"],
    ] {
        let expected = losses(1, changes);
        let found = losses(3, changes);
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found / expected - 1.0).abs() < 1e-2, "{found}, not {expected}: {changes:?}");
        }
        // The exchange that is rounded shows in the losses.
        assert_ne!(found, expected, "{changes:?}");
    }
    assert_ne!(losses(3, &["precision.reduce=bf16"]), losses(3, &[]));
}

#[test]
fn a_run_continues_on_other_numbers_of_ranks() {
    let place = TestRun::new();
    let reference = finish_on(1, &place.recipe(&MICRO_BATCHES));
    let place = TestRun::new();
    let recipe = place.recipe(&MICRO_BATCHES);
    for (ranks, step) in [(4, 1), (3, 3), (1, 5), (2, 7)] {
        let step = stop_on(ranks, &recipe, step);
        let run = RunDirectory::new(&recipe.run.dir);
        let files = std::fs::read_dir(run.checkpoint(step)).unwrap().count();
        assert_eq!(files, 4 * ranks + 2, "parts of {ranks} ranks, the manifest and its hash");
    }
    assert_alike(&finish_on(5, &recipe), &reference, "4, 3, 1, 2, then 5 ranks");
}

#[test]
fn shards_of_what_bf16_weights_lack_continue_with_the_same_bits() {
    let changes = [&MICRO_BATCHES[..], &["run.dtype=bf16", "precision.moments=bf16"]].concat();
    let place = TestRun::new();
    let reference = finish_on(3, &place.recipe(&changes));
    let place = TestRun::new();
    let recipe = place.recipe(&changes);
    stop_on(3, &recipe, 4);
    let found = finish_on(3, &recipe);
    assert!(found.weights == reference.weights, "other weights than without the stop");
    assert_alike(&found, &reference, "stopped and continued");
}

#[test]
fn a_part_that_is_damaged_or_missing_sets_the_checkpoint_aside_on_all_ranks() {
    let place = TestRun::new();
    let reference = finish_on(1, &place.recipe(&MICRO_BATCHES));
    for (file, is_missing) in [
        ("second_moment-00003-of-00003.safetensors", false),
        ("tensors-00002-of-00003.json", false),
        // Read by one of the two ranks alone.
        ("weights-00003-of-00003.safetensors", true),
        ("tensors-00001-of-00003.json", true),
    ] {
        let place = TestRun::new();
        let recipe = place.recipe(&MICRO_BATCHES);
        let step = stop_on(3, &recipe, 6);
        let run = RunDirectory::new(&recipe.run.dir);
        let part = run.checkpoint(step).join(file);
        let mut bytes = std::fs::read(&part).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        match is_missing {
            true => std::fs::remove_file(&part).unwrap(),
            false => std::fs::write(&part, bytes).unwrap(),
        }
        let found = finish_on(2, &recipe);
        assert!(run.checkpoints().join(format!("damaged-step-{step}")).is_dir(), "{file}");
        assert_alike(&found, &reference, "from the one before");
    }
}

#[test]
fn a_checkpoint_that_some_ranks_do_not_see_is_kept() {
    let place = TestRun::new();
    let recipe = place.recipe(&MICRO_BATCHES);
    let step = stop_on(2, &recipe, 6);
    let shared = RunDirectory::new(&recipe.run.dir);
    // The disk of another machine, as if the directory were local to each.
    let other = RunDirectory::new(place.dir.path().join("other"));
    crate::support::copy_all(shared.root(), other.root());
    std::fs::remove_dir_all(other.checkpoint(step)).unwrap();
    on_ranks(2, |world| {
        let run = if world.rank() == 0 { &shared } else { &other };
        let mut ranks = moh_step::Ranks::new(moh_kernels::Cpu, world.group().clone()).unwrap();
        let mut ignore = |_: &Path, _: &moh_checkpoint::Error| {};
        let error = moh_checkpoint::newest(&run.checkpoint_directory(), &mut ranks, &mut ignore)
            .unwrap_err();
        let is_told = matches!(error, moh_checkpoint::Error::NotShared { .. });
        assert_eq!(is_told, world.rank() == 1, "{error}");
    });
    assert!(shared.checkpoint(step).is_dir());
}

#[test]
fn ranks_stop_together_in_an_evaluation_and_continue_with_the_same_bits() {
    // Data ranks of which one has no batch; pipelines and tensors, another layout in the second stage.
    for (ranks, adapt, moh) in [(3, (1, 1), (1, 1)), (4, (2, 1), (1, 2))] {
        let place = TestRun::new();
        let changes = arranged(adapt, moh);
        let changes: Vec<&str> = changes.iter().map(String::as_str).collect();
        let reference = finish_on(ranks, &place.recipe(&changes));
        // As loaded, at the end of the first stage, converted, at the end. The signal reaches all ranks, or
        // the last one, which may hear of it later.
        for (evaluation, step, all) in
            [(0, 0, true), (2, 5, true), (2, 5, false), (3, 5, true), (6, 10, true)]
        {
            let place = TestRun::new();
            let recipe = place.recipe(&changes);
            let (first, begun) = (if all { 0 } else { ranks - 1 }, AtomicU64::new(0));
            let outcomes = train_and_hear((ranks, first..ranks), &recipe, &|event, stop| {
                if let Event::Evaluating { done: 0, .. } = event
                    && begun.fetch_add(1, Ordering::Relaxed) == evaluation
                {
                    stop.store(true, Ordering::Relaxed);
                }
            });
            let outcomes: Vec<_> = outcomes.into_iter().map(Result::unwrap).collect();
            assert!(outcomes.iter().all(|one| *one == outcomes[0]), "{outcomes:?}");
            let stopped = match outcomes[0] {
                Outcome::StoppedBeforeTraining => 0,
                Outcome::Stopped { step } => step,
                _ => panic!("{outcomes:?}"),
            };
            assert!(stopped == step || !all && stopped == step + 1, "{outcomes:?}");
            let found = finish_on(ranks, &recipe);
            assert!(found == reference, "{ranks} ranks, {adapt:?}, {moh:?}, {evaluation}");
        }
    }
}

#[test]
fn an_error_of_one_rank_is_told_once() {
    let place = TestRun::new();
    let recipe = place.recipe(&["data.validation.path=nowhere"]);
    let outcomes = train_on(3, &recipe, None);
    let told = outcomes
        .iter()
        .filter(|outcome| !matches!(outcome, Err(Error::Step(moh_step::Error::OtherRank { .. }))));
    assert_eq!(told.count(), 1, "{outcomes:?}");
    assert!(outcomes.iter().all(Result::is_err));
}

#[test]
fn ranks_agree_on_a_checkpoint_that_cannot_be_written() {
    let place = TestRun::new();
    let reference = finish_on(1, &place.recipe(&MICRO_BATCHES));
    let place = TestRun::new();
    // Before any checkpoint, so that none is in flight.
    let recipe = place.recipe(&[&MICRO_BATCHES[..], &["checkpoint.every_steps=0"]].concat());
    let checkpoints = RunDirectory::new(&recipe.run.dir).checkpoints();
    let outcomes = train_and_hear((3, 2..3), &recipe, &|event, stop| {
        if matches!(event, Event::Step { step: 3, .. }) {
            // A file in the place of the directory.
            std::fs::write(&checkpoints, "").unwrap();
            stop.store(true, Ordering::Relaxed);
        }
    });
    let Err(Error::NotSaved { last_good: None, .. }) = &outcomes[0] else { panic!("{outcomes:?}") };
    for outcome in &outcomes[1..] {
        assert!(
            matches!(outcome, Err(Error::Step(moh_step::Error::OtherRank { rank: 0 }))),
            "{outcomes:?}"
        );
    }
    std::fs::remove_file(&checkpoints).unwrap();
    assert_alike(&finish_on(2, &recipe), &reference, "after a checkpoint that failed");
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn a_model_of_the_fixtures_learns_on_many_ranks_as_on_one() {
    for attention in ["dense", "moh"] {
        let mut stories = Stories::new(attention);
        for layout in stories.layouts() {
            let recipe = Recipe::load(&stories.write_recipe(layout), &[]).unwrap();
            for outcome in train_on(layout.ranks, &recipe, None) {
                assert!(matches!(outcome.unwrap(), Outcome::Finished(_)));
            }
            stories.compare(layout, &recipe);
        }
    }
}
