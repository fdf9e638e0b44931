//! Stages with a teacher: the same trajectory on any layout of ranks, the same bits after a stop, and what is refused.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::driver::{Start, finish, run_in, stop_at};
use crate::support::results::{Results, assert_alike};
use crate::support::{TestRun, copy_all};
use moh_checkpoint::run_directory::RunDirectory;
use moh_recipe::{DistillOptions, Recipe};
use moh_testkit::ranks::on_ranks;
use moh_train::{Outcome, RunOptions};

/// Four layers, and eight micro-batches a step.
const CHANGES: [&str; 3] =
    ["model.new.num_hidden_layers=4", "stage.adapt.micro_batch=1", "stage.moh.micro_batch=1"];

/// A finished run, whose last checkpoint and export are teachers.
struct Trained {
    place: TestRun,
    run: RunDirectory,
}

impl Trained {
    fn new() -> Self {
        let place = TestRun::new();
        let recipe = place.recipe(&[&CHANGES[..], &["run.seed=5"]].concat());
        finish(&recipe);
        let run = RunDirectory::new(&recipe.run.dir);
        Trained { place, run }
    }

    /// Its last checkpoint, of a Mixture-of-Head model.
    fn checkpoint(&self) -> String {
        format!("{}@10", self.run.root().display())
    }

    fn export(&self) -> String {
        self.run.export().display().to_string()
    }

    /// A recipe in its place that starts from the export and learns in the stage `taught` from `teacher`.
    fn recipe(&self, name: &str, taught: &str, teacher: &str, changes: &[&str]) -> Recipe {
        let changes: Vec<&str> = CHANGES.iter().chain(changes).copied().collect();
        let mut recipe = self.place.recipe(&changes);
        let stage = recipe.stages.iter_mut().find(|stage| stage.name == taught).unwrap();
        stage.distill = Some(DistillOptions {
            teacher: teacher.to_owned(),
            weight: 2.0,
            cross_entropy: 0.5,
            temperature: 1.5,
            attention_output: 0.0,
            attention_output_tokens: None,
        });
        recipe.run.dir = self.place.dir.path().join(name);
        recipe.model.new = None;
        recipe.model.from = Some(self.export());
        recipe
    }
}

/// Sets the weight of the attention-output loss in the first two steps of a stage.
fn learn_outputs(recipe: &mut Recipe, taught: &str, weight: f64) {
    let stage = recipe.stages.iter_mut().find(|stage| stage.name == taught).unwrap();
    let distill = stage.distill.as_mut().unwrap();
    distill.attention_output = weight;
    distill.attention_output_tokens = (weight > 0.0).then_some(2 * stage.batch_tokens);
}

fn finish_on(ranks: usize, recipe: &Recipe) -> Results {
    let outcomes = on_ranks(ranks, |world| {
        let stop = std::sync::atomic::AtomicBool::new(false);
        run_in(world, recipe, RunOptions::new(&stop), &mut |_| {})
    });
    for outcome in outcomes {
        assert!(matches!(outcome.unwrap(), Outcome::Finished(_)));
    }
    Results::of(recipe)
}

/// Refuses the recipe on one rank, and returns the message.
#[track_caller]
fn refusal(recipe: &Recipe) -> String {
    Start::default().run(recipe).unwrap_err().to_string()
}

/// The keys of the layout of both stages.
fn layout(tensor: usize, pipeline: usize, chunks: usize) -> Vec<String> {
    let keys = |stage: &str| {
        let key = |name, value| format!("stage.{stage}.parallel.{name}={value}");
        [key("tensor", tensor), key("pipeline", pipeline), key("virtual_stages", chunks)]
    };
    ["adapt", "moh"].into_iter().flat_map(keys).collect()
}

#[test]
fn every_layout_with_a_teacher_ends_as_one_rank() {
    let trained = Trained::new();
    // Ranks, tensor, pipeline and chunks: data alone, with ranks that have no work, and each of the others.
    let layouts = [
        (2, 1, 1, 1),
        (11, 1, 1, 1),
        (2, 2, 1, 1),
        (2, 1, 2, 1),
        (4, 2, 2, 1),
        (4, 1, 4, 1),
        (4, 1, 2, 2),
        (8, 2, 2, 2),
    ];
    // The run's own model with a vocabulary that has grown, whose attention outputs are learned for two steps, and a
    // Mixture-of-Head teacher with documents apart. The other stage has none.
    for (taught, teacher, changes, outputs) in [
        ("moh", "start".to_owned(), &["model.pad_vocab_to=96"][..], 4.0),
        (
            "adapt",
            trained.checkpoint(),
            &["data.document_mask=true", "memory.recompute=block"],
            0.0,
        ),
    ] {
        let recipe = |name: &str, layout: &[String]| {
            let layout = layout.iter().map(String::as_str);
            let changes: Vec<&str> = changes.iter().copied().chain(layout).collect();
            let mut recipe = trained.recipe(name, taught, &teacher, &changes);
            learn_outputs(&mut recipe, taught, outputs);
            recipe
        };
        let reference = finish_on(1, &recipe(&format!("{taught}-1"), &[]));
        for line in &reference.metrics {
            let found = line.get("distillation_loss").map(|loss| loss.as_f64().unwrap());
            assert_eq!(found.is_some(), line["stage"] == taught, "{line}");
            assert!(found.is_none_or(|loss| loss > 1e-4), "{line}");
            let found = line.get("attention_output_loss").map(|loss| loss.as_f64().unwrap());
            let first = line["stage"] == taught && line["step"].as_u64().unwrap() <= 2;
            assert_eq!(found.is_some(), outputs > 0.0 && first, "{line}");
            assert!(found.is_none_or(|loss| loss > 1e-4), "{line}");
        }
        for (ranks, tensor, pipeline, chunks) in layouts {
            let what = format!("{taught}-{ranks}-{tensor}-{pipeline}-{chunks}");
            let keys = layout(tensor, pipeline, chunks);
            let found = finish_on(ranks, &recipe(&what, &keys));
            assert_alike(&found, &reference, &what);
            for (line, reference) in found.metrics.iter().zip(&reference.metrics) {
                for name in ["distillation_loss", "attention_output_loss"] {
                    let loss = |line: &serde_json::Value| line.get(name)?.as_f64();
                    if let Some((found, expected)) = loss(line).zip(loss(reference)) {
                        let error = (found / expected - 1.0).abs();
                        assert!(error < 1e-2, "{what}: {line}, {reference}");
                    }
                }
            }
            let repeated = finish_on(ranks, &recipe(&format!("{what}-again"), &keys));
            assert!(repeated.weights == found.weights, "{what}: other bits the second time");
        }
    }
}

#[test]
fn a_stop_and_a_kill_leave_the_same_bits() {
    let trained = Trained::new();
    for (number, teacher) in
        ["start".to_owned(), trained.export(), trained.checkpoint()].iter().enumerate()
    {
        let recipe = |name: &str| {
            let name = format!("{name}-{number}");
            let mut recipe = trained.recipe(&name, "adapt", teacher, &["run.dtype=bf16"]);
            recipe.stages[1].distill = recipe.stages[0].distill.clone();
            // A run stops within the steps of the attention-output loss, and after them.
            learn_outputs(&mut recipe, "adapt", 1.0);
            recipe
        };
        let whole = recipe("whole");
        finish(&whole);
        let stopped = recipe("stopped");
        for step in [1, 3, 7] {
            stop_at(&stopped, step);
        }
        finish(&stopped);
        assert!(Results::of(&stopped) == Results::of(&whole), "{teacher}: stopped");
        // What a process that was killed after step 4 would leave.
        let (killed, copy) = (recipe("killed"), recipe("copy"));
        let copied = Start { copy_at: Some((4, &copy.run.dir)), ..Start::default() };
        copied.run(&killed).unwrap();
        finish(&copy);
        assert!(Results::of(&copy) == Results::of(&whole), "{teacher}: killed");
    }
}

/// The teacher sees what the student sees, with documents apart too, and teaches the rows of the vocabulary that it has.
#[test]
fn a_student_that_has_not_moved_has_no_distillation_loss() {
    let trained = Trained::new();
    for (number, (teacher, change)) in [
        ("start".to_owned(), "data.document_mask=false"),
        ("start".to_owned(), "data.document_mask=true"),
        ("start".to_owned(), "model.pad_vocab_to=96"),
        (trained.export(), "model.pad_vocab_to=96"),
        (trained.checkpoint(), "model.pad_vocab_to=96"),
    ]
    .into_iter()
    .enumerate()
    {
        let changes = ["stage.adapt.attention=moh", change];
        let recipe = trained.recipe(&format!("still-{number}"), "adapt", &teacher, &changes);
        finish(&recipe);
        let losses: Vec<f64> = (Results::of(&recipe).metrics.iter())
            .filter_map(|line| line.get("distillation_loss")?.as_f64())
            .collect();
        assert_eq!((losses.len(), losses[0]), (5, 0.0), "{teacher} {change}");
        assert!(losses[1..].iter().all(|&loss| loss > 0.0), "{teacher} {change}: {losses:?}");
    }
}

#[test]
fn attention_outputs_are_learned() {
    let trained = Trained::new();
    let mut recipe =
        trained.recipe("outputs", "moh", "start", &["stage.moh.learning_rate.max=3e-3"]);
    learn_outputs(&mut recipe, "moh", 1.0);
    let distill = recipe.stages[1].distill.as_mut().unwrap();
    (distill.weight, distill.cross_entropy, distill.attention_output_tokens) = (0.0, 0.0, None);
    finish(&recipe);
    let losses: Vec<f64> = (Results::of(&recipe).metrics.iter())
        .filter_map(|line| line.get("attention_output_loss")?.as_f64())
        .collect();
    assert_eq!(losses.len(), 5);
    assert!(losses[4] < 0.9 * losses[0], "{losses:?}");
}

#[test]
fn weights_that_leave_the_teacher_out_leave_the_run_as_it_is() {
    let trained = Trained::new();
    let mut without = trained.recipe("without", "moh", "start", &[]);
    without.stages[1].distill = None;
    finish(&without);
    let mut with = trained.recipe("with", "moh", &trained.export(), &[]);
    let distill = with.stages[1].distill.as_mut().unwrap();
    // Too small to change an f32.
    (distill.weight, distill.cross_entropy) = (1e-30, 1.0);
    finish(&with);
    let (found, expected) = (Results::of(&with), Results::of(&without));
    assert_alike(&found, &expected, "a weight of almost 0");
}

/// A directory with the export and another `config.json` or tokenizer.
fn changed(trained: &Trained, name: &str, change: impl Fn(&Path)) -> String {
    let directory: PathBuf = trained.place.dir.path().join(name);
    copy_all(&trained.run.export(), &directory);
    change(&directory);
    directory.display().to_string()
}

/// A tokenizer of words, one of them another.
fn write_tokenizer(directory: &Path, word: &str) {
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": { "type": "Whitespace" }, "post_processor": null, "decoder": null,
        "model": { "type": "WordLevel", "vocab": { "a": 0, word: 1 }, "unk_token": "a" },
    });
    fs::write(directory.join("tokenizer.json"), tokenizer.to_string()).unwrap();
}

#[test]
fn a_teacher_that_does_not_fit_is_refused_before_the_run_begins() {
    let trained = Trained::new();
    let other = TestRun::new();
    let other_vocabulary = other.recipe(&[CHANGES[0], "model.new.vocab_size=65"]);
    finish(&other_vocabulary);
    let others = RunDirectory::new(&other_vocabulary.run.dir);
    let other_shape = TestRun::new();
    finish(&other_shape.recipe(&[]));
    let shape = RunDirectory::new(other_shape.dir.path().join("run"));
    let short = changed(&trained, "short", |directory| {
        let path = directory.join("config.json");
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        config["max_position_embeddings"] = 4.into();
        fs::write(&path, config.to_string()).unwrap();
    });
    let run = trained.run.root().display().to_string();
    for (teacher, reason) in [
        (
            others.export().display().to_string(),
            "has a vocabulary of 65 rows, but the run's model has 64",
        ),
        (format!("{}@10", others.root().display()), "has a vocabulary of 65 rows"),
        (format!("{}@10", shape.root().display()), "has another shape than the run's model"),
        (short, "supports 4 tokens (max_position_embeddings), but the stage's sequences have 8"),
        ("nowhere".to_owned(), "is no directory and no run: name a model directory"),
        (run.clone(), "is a run: name one of its checkpoints, as RUN@STEP"),
        (format!("{run}@9999"), "9999"),
    ] {
        let recipe = trained.recipe("refused", "moh", &teacher, &[]);
        let error = refusal(&recipe);
        assert!(error.contains(reason), "{error}");
        assert!(!recipe.run.dir.exists(), "{teacher}");
    }
    // The tokenizer of the run's model, and another one with as many tokens.
    let model = changed(&trained, "model-with-tokenizer", |at| write_tokenizer(at, "b"));
    let same = changed(&trained, "same", |at| write_tokenizer(at, "b"));
    let different = changed(&trained, "different", |at| write_tokenizer(at, "c"));
    let recipe = |name: &str, teacher: &str| {
        let mut recipe = trained.recipe(name, "moh", teacher, &[]);
        recipe.model.from = Some(model.clone());
        recipe
    };
    let error = refusal(&recipe("tokenizers", &different));
    assert!(
        error.contains("stage.moh.distill.teacher") && error.contains("has another tokenizer than"),
        "{error}"
    );
    finish(&recipe("tokenizers", &same));
}

#[test]
fn a_run_that_resumes_has_its_teacher() {
    let trained = Trained::new();
    let teacher = changed(&trained, "teacher", |_| {});
    let recipe = |teacher: &str| trained.recipe("resumed", "moh", teacher, &[]);
    stop_at(&recipe(&teacher), 6);
    // It may move.
    let moved = format!("{teacher}-moved");
    fs::rename(&teacher, &moved).unwrap();
    stop_at(&recipe(&moved), 7);
    let error = refusal(&recipe(&trained.checkpoint()));
    assert!(
        error.contains("stage.moh.distill.teacher") && error.contains("it is another teacher"),
        "{error}"
    );
    let error = refusal(&recipe("start"));
    assert!(error.contains("it is another teacher"), "{error}");
    // Other weights in the same place.
    let place = TestRun::new();
    let other = place.recipe(&[&CHANGES[..], &["run.seed=6"]].concat());
    finish(&other);
    let weights = RunDirectory::new(&other.run.dir).export().join("model.safetensors");
    fs::copy(weights, Path::new(&moved).join("model.safetensors")).unwrap();
    let error = refusal(&recipe(&moved));
    assert!(error.contains("it is another teacher"), "{error}");
    // Another weight of the loss is another run.
    fs::copy(
        trained.run.export().join("model.safetensors"),
        Path::new(&moved).join("model.safetensors"),
    )
    .unwrap();
    let mut heavier = recipe(&moved);
    heavier.stages[1].distill.as_mut().unwrap().weight = 3.0;
    let error = refusal(&heavier);
    assert!(error.contains("stage.moh.distill.weight"), "{error}");
    finish(&recipe(&moved));
}

#[test]
fn a_run_that_learns_from_its_start_reads_its_model_again() {
    let trained = Trained::new();
    let model = changed(&trained, "initial", |_| {});
    let recipe = || {
        let mut recipe = trained.recipe("own", "moh", "start", &[]);
        recipe.model.from = Some(model.clone());
        recipe
    };
    stop_at(&recipe(), 6);
    let run = RunDirectory::new(&recipe().run.dir);
    assert!(!run.keeps_model(&recipe()).unwrap());
    let (weights, aside) =
        (Path::new(&model).join("model.safetensors"), trained.place.dir.path().join("aside"));
    fs::rename(&weights, &aside).unwrap();
    assert!(refusal(&recipe()).contains("initial"), "the weights are missing");
    fs::rename(&aside, &weights).unwrap();
    finish(&recipe());
    assert!(run.keeps_model(&recipe()).unwrap());
}
