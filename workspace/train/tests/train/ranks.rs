//! Runs on several ranks end as a run on one rank: with the same losses and weights except for the order of sums. This
//! holds for any number of ranks and any pipeline, also if another number of ranks continues the run.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::driver::{finish, finish_on, run_on, stop_ranks_when};
use crate::support::results::assert_alike;
use crate::support::stories::Stories;
use crate::support::{MICRO_BATCHES, TestRun, arranged, run_of};
use moh_checkpoint::run_directory::RunDirectory;
use moh_recipe::Recipe;
use moh_testkit::programs::{copy_all, flip};
use moh_testkit::ranks::on_ranks;
use moh_train::{Error, Event, Outcome};

/// Ranks, and the layouts of both stages, as for [`arranged`].
type Layout = (usize, [[usize; 3]; 2]);

/// One rank for each share of the data in both stages.
const DATA: [[usize; 3]; 2] = [[1, 1, 1]; 2];

/// Stops a run during `step`, or the step after it: ranks may notice a signal late, and only the last rank gets it.
fn stop_on(ranks: usize, recipe: &Recipe, step: u64) -> u64 {
    let is_now = |event: &Event<'_>| matches!(event, Event::Step { step: now, .. } if *now == step);
    let outcome = stop_ranks_when((ranks, ranks - 1..ranks), recipe, is_now);
    let Outcome::Stopped { step: stopped } = outcome else { panic!("{outcome:?}") };
    assert!(stopped == step || stopped == step + 1, "{outcome:?}");
    stopped
}

/// Checks that the recipe with eight micro-batches a step and these changes ends in each layout as on one rank. If
/// `twice`, a second run must give the same bits.
fn end_as_one(changes: &[&str], layouts: &[Layout], twice: bool) {
    let place = TestRun::new();
    let recipe = |name: &str, layout| {
        arranged(place.recipe_in(name, &[&MICRO_BATCHES, changes].concat()), layout)
    };
    let reference = finish_on(1, &recipe("one", DATA));
    for &(ranks, layout) in layouts {
        let what = format!("{ranks} ranks, {layout:?}");
        let found = finish_on(ranks, &recipe(&what, layout));
        assert_alike(&found, &reference, &format!("{what}, {changes:?}"));
        if twice {
            let repeated = finish_on(ranks, &recipe(&format!("{what}, again"), layout));
            assert!(repeated.weights == found.weights, "{what}: other bits the second time");
        }
    }
}

#[test]
fn every_number_of_ranks_ends_as_one() {
    // Uneven shares; as many ranks as micro-batches; more ranks than micro-batches, so that some have no work.
    end_as_one(&[], &[2, 3, 4, 6, 8, 11].map(|ranks| (ranks, DATA)), true);
}

#[test]
fn every_pipeline_ends_as_one_rank() {
    let (one, two) = ([1, 1, 1], [1, 2, 1]);
    for tied in ["model.new.tie_word_embeddings=false", "model.new.tie_word_embeddings=true"] {
        // Alone, with data parallelism, with ranks that have no work, and another layout in each stage.
        let both = [2, 6, 18].map(|ranks| (ranks, [two; 2]));
        end_as_one(&[tied], &[&both[..], &[(4, [one, two]), (2, [two, one])]].concat(), false);
    }
}

/// A Mixture-of-Head model from scratch, with a learned router that weighs heads, and other numbers of heads in each
/// layer.
const TWO_STAGE: [&str; 3] = [
    "model.new.moh={ router = \"two-stage\", shared_heads = [1, 2], routed_top_k = [2, 1] }",
    "stage.adapt.attention=moh",
    "stage.moh.moh={ shared_head_ids = [[2], [0]], routed_top_k = 1 }",
];

#[test]
fn every_share_of_the_tensors_ends_as_one_rank() {
    let tensor = [2, 1, 1];
    // Tied or not; every layer saved, norms recomputed, or blocks; documents apart; another architecture.
    for changes in [
        &["model.new.tie_word_embeddings=true", "memory.recompute=none"][..],
        &["model.new.tie_word_embeddings=false", "memory.recompute=cheap"],
        &["memory.recompute=block", "data.document_mask=true"],
        &["model.new.model_type=qwen3", "memory.recompute=cheap"],
        &TWO_STAGE,
    ] {
        // Alone; with data parallelism, ranks that have no work and a pipeline; with another layout in each stage.
        let shares = [2, 4, 18].map(|ranks| (ranks, [tensor; 2]));
        let with_pipeline = [(4, [[2, 2, 1]; 2]), (4, [tensor, [1, 2, 1]])];
        end_as_one(changes, &[&shares[..], &with_pipeline].concat(), true);
    }
}

#[test]
fn stages_of_several_chunks_end_as_one_rank() {
    // Eight micro-batches a step: divisible by the number of stages, or not.
    for change in ["model.new.tie_word_embeddings=true", "memory.recompute=block"] {
        let layouts =
            [(2, [1, 2, 3]), (3, [1, 3, 2]), (6, [1, 2, 2]), (8, [2, 2, 2]), (18, [1, 2, 3])];
        let layouts = layouts.map(|(ranks, layout)| (ranks, [layout; 2]));
        end_as_one(&["model.new.num_hidden_layers=6", change], &layouts, true);
    }
}

/// A dense layer and three with other heads each.
const MIXED_LAYERS: [&str; 2] = [
    "model.new.num_hidden_layers=4",
    "stage.moh.moh={shared_heads=[4,1,2,0],routed_top_k=[0,2,1,2]}",
];

#[test]
fn layers_with_other_heads_end_as_one_rank() {
    // Stages of their own layers; chunks with buffers that serve dense and other layers alternately; shares of the
    // heads; all of this with data parallelism.
    let layouts = [(2, [1, 2, 1]), (2, [1, 2, 2]), (2, [2, 1, 1]), (4, [2, 2, 2]), (8, [2, 2, 1])];
    end_as_one(&MIXED_LAYERS, &layouts.map(|(ranks, layout)| (ranks, [layout; 2])), false);
}

#[test]
fn a_run_continues_in_another_layout() {
    let [one, pipeline, tensor] = [[1, 1, 1], [1, 2, 1], [2, 1, 1]];
    let (whole, chunks) = ([2, 2, 1], [2, 2, 2]);
    // The step at which each part stops, if the part does not end the run.
    let mixed: [(Layout, Option<u64>); 2] = [((4, [chunks; 2]), Some(7)), ((2, [tensor; 2]), None)];
    let shares = [
        ((8, [whole; 2]), Some(2)),
        ((3, DATA), Some(4)),
        ((2, [one, tensor]), Some(7)),
        ((1, DATA), None),
    ];
    let pipelines = [
        ((4, [pipeline; 2]), Some(2)),
        ((3, DATA), Some(4)),
        ((2, [one, pipeline]), Some(7)),
        ((1, DATA), None),
    ];
    for (changes, parts) in [(&MIXED_LAYERS[..], &mixed[..]), (&[], &shares), (&[], &pipelines)] {
        let place = TestRun::new();
        let recipe = |name| place.recipe_in(name, &[&MICRO_BATCHES, changes].concat());
        let reference = finish(&recipe("whole"));
        for ((ranks, layout), step) in parts {
            let part = arranged(recipe("run"), *layout);
            match step {
                Some(step) => drop(stop_on(*ranks, &part, *step)),
                None => assert_alike(&finish_on(*ranks, &part), &reference, &format!("{parts:?}")),
            }
        }
    }
}

#[test]
fn a_run_continues_on_other_numbers_of_ranks() {
    let place = TestRun::new();
    let reference = finish(&place.recipe_in("whole", &MICRO_BATCHES));
    let recipe = place.recipe(&MICRO_BATCHES);
    for (ranks, step) in [(4, 1), (3, 3), (1, 5), (2, 7)] {
        let step = stop_on(ranks, &recipe, step);
        let files = std::fs::read_dir(run_of(&recipe).checkpoint(step)).unwrap().count();
        assert_eq!(files, 4 * ranks + 2, "parts of {ranks} ranks, the manifest and its hash");
    }
    assert_alike(&finish_on(5, &recipe), &reference, "4, 3, 1, 2, then 5 ranks");
}

#[test]
fn pipelines_that_ranks_cannot_form_are_refused_before_the_run_begins() {
    let place = TestRun::new();
    let recipe = arranged(place.recipe(&MICRO_BATCHES), [[1, 2, 1], [1, 1, 1]]);
    let outcomes = run_on((3, 0..0), &recipe, &|_, _| {});
    let told = |error: &Error| !matches!(error, Error::Step(moh_step::Error::OtherRank { .. }));
    let error = outcomes.into_iter().map(Result::unwrap_err).find(told).unwrap().to_string();
    let parallel = "stage.adapt.parallel = { tensor = 1, pipeline = 2 }: 3 ranks were started";
    assert!(error.contains(parallel), "{error}");
    assert!(!recipe.run.dir.exists());
}

#[test]
fn rounded_weights_gradients_and_exchanges_stay_close() {
    // Losses do not show the size of gradients, as Adam divides them by their own size. The first norm shows it.
    let losses = |ranks: usize, changes: &[&str]| -> Vec<f64> {
        let place = TestRun::new();
        let results = finish_on(ranks, &place.recipe(&[&MICRO_BATCHES[..], changes].concat()));
        let of = |key: &str| -> Vec<f64> {
            results.metrics.iter().map(|line| line[key].as_f64().unwrap()).collect()
        };
        [&of("loss")[..], &of("grad_norm")[..1]].concat()
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
        // The rounded exchange shows in the losses.
        assert_ne!(found, expected, "{changes:?}");
    }
    assert_ne!(losses(3, &["precision.reduce=bf16"]), losses(3, &[]));
}

#[test]
fn shards_of_what_bf16_weights_lack_continue_with_the_same_bits() {
    let changes = [&MICRO_BATCHES[..], &["run.dtype=bf16", "precision.moments=bf16"]].concat();
    let place = TestRun::new();
    let reference = finish_on(3, &place.recipe_in("whole", &changes));
    let recipe = place.recipe(&changes);
    stop_on(3, &recipe, 4);
    let found = finish_on(3, &recipe);
    assert!(found.weights == reference.weights, "other weights than without the stop");
    assert_alike(&found, &reference, "stopped and continued");
}

#[test]
fn a_part_that_is_damaged_or_missing_sets_the_checkpoint_aside_on_all_ranks() {
    let place = TestRun::new();
    let reference = finish(&place.recipe_in("whole", &MICRO_BATCHES));
    for (file, is_missing) in [
        ("second_moment-00003-of-00003.safetensors", false),
        ("tensors-00002-of-00003.json", false),
        // Read by one of the two ranks alone.
        ("weights-00003-of-00003.safetensors", true),
        ("tensors-00001-of-00003.json", true),
    ] {
        let recipe = place.recipe_in(file, &MICRO_BATCHES);
        let step = stop_on(3, &recipe, 6);
        let run = run_of(&recipe);
        let part = run.checkpoint(step).join(file);
        match is_missing {
            true => std::fs::remove_file(&part).unwrap(),
            false => flip(&part, |length| length - 1),
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
    let shared = run_of(&recipe);
    // The disk of another machine, as if the directory were local to each.
    let other = RunDirectory::new(place.path("other"));
    copy_all(shared.root(), other.root());
    std::fs::remove_dir_all(other.checkpoint(step)).unwrap();
    on_ranks(2, |world| {
        let run = if world.rank() == 0 { &shared } else { &other };
        let mut ranks = moh_step::Ranks::new(moh_kernels::Cpu, world.group().clone()).unwrap();
        let mut ignore = |_: &Path, _: &moh_checkpoint::Error| {};
        let found = moh_checkpoint::newest(run, &mut ranks, &mut ignore);
        let error = found.unwrap_err().to_string();
        let is_told = error.contains("manifest.json: ")
            && error.ends_with(
                ", but other ranks see the checkpoint: put the run directory on a file system that all ranks share",
            );
        assert_eq!(is_told, world.rank() == 1, "{error}");
    });
    assert!(shared.checkpoint(step).is_dir());
}

#[test]
fn ranks_stop_together_in_an_evaluation_and_continue_with_the_same_bits() {
    // Data ranks, one without a batch; pipelines and tensors, with another layout in the second stage.
    for (ranks, layout) in [(3, DATA), (4, [[2, 1, 1], [1, 2, 1]])] {
        let place = TestRun::new();
        let recipe = |name: &str| arranged(place.recipe_in(name, &MICRO_BATCHES), layout);
        let reference = finish_on(ranks, &recipe("whole"));
        // As loaded, at the end of the first stage, converted, at the end. The signal reaches all ranks, or the last
        // rank, which may notice it later.
        for (evaluation, step, all) in
            [(0, 0, true), (2, 5, true), (2, 5, false), (3, 5, true), (6, 10, true)]
        {
            let recipe = recipe(&format!("{evaluation}-{all}"));
            let (first, begun) = (if all { 0 } else { ranks - 1 }, AtomicU64::new(0));
            let outcome = stop_ranks_when((ranks, first..ranks), &recipe, |event| {
                matches!(event, Event::Evaluating { done: 0, .. })
                    && begun.fetch_add(1, Ordering::Relaxed) == evaluation
            });
            let stopped = match outcome {
                Outcome::StoppedBeforeTraining => 0,
                Outcome::Stopped { step } => step,
                _ => panic!("{outcome:?}"),
            };
            assert!(stopped == step || !all && stopped == step + 1, "{outcome:?}");
            let found = finish_on(ranks, &recipe);
            assert!(found == reference, "{ranks} ranks, {layout:?}, {evaluation}");
        }
    }
}

#[test]
fn an_error_of_one_rank_is_told_once() {
    let place = TestRun::new();
    let recipe = place.recipe(&["data.validation.path=nowhere"]);
    let outcomes = run_on((3, 0..0), &recipe, &|_, _| {});
    let told = outcomes
        .iter()
        .filter(|outcome| !matches!(outcome, Err(Error::Step(moh_step::Error::OtherRank { .. }))));
    assert_eq!(told.count(), 1, "{outcomes:?}");
    assert!(outcomes.iter().all(Result::is_err));
}

#[test]
fn ranks_agree_on_a_checkpoint_that_cannot_be_written() {
    let place = TestRun::new();
    let reference = finish(&place.recipe_in("whole", &MICRO_BATCHES));
    // Before any checkpoint, so that no checkpoint is in flight.
    let recipe = place.recipe(&[&MICRO_BATCHES[..], &["checkpoint.every_steps=0"]].concat());
    let checkpoints = run_of(&recipe).checkpoints();
    let outcomes = run_on((3, 2..3), &recipe, &|event, stop| {
        if matches!(event, Event::Step { step: 3, .. }) {
            // A file in the place of the directory.
            std::fs::write(&checkpoints, "").unwrap();
            stop.store(true, Ordering::Relaxed);
        }
    });
    let error = outcomes[0].as_ref().unwrap_err().to_string();
    assert!(error.contains("; there is no good checkpoint yet: make room"), "{error}");
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
            finish_on(layout.ranks, &recipe);
            stories.compare(layout, &recipe);
        }
    }
}
