//! Stages with a teacher: the same trajectory on any layout of ranks, the same bits after a stop, and refusals.

use std::fs;
use std::path::Path;

use crate::support::driver::{
    Start, finish, finish_in_parts, finish_on, refusal, refuses, stop_at,
};
use crate::support::results::{Results, assert_alike};
use crate::support::{MICRO_BATCHES, TestRun, arranged, run_of};
use moh_checkpoint::run_directory::RunDirectory;
use moh_recipe::Recipe;
use moh_testkit::programs::{copy_all, edit_json, write_tokenizer};
use serde_json::{Value, json};

/// Four layers, for pipelines of four stages.
const LAYERS: &str = "model.new.num_hidden_layers=4";

/// A finished run. Its last checkpoint and its export are teachers.
struct Trained {
    place: TestRun,
    run: RunDirectory,
}

impl Trained {
    fn new() -> Self {
        Self::with(&["run.seed=5"])
    }

    fn with(changes: &[&str]) -> Self {
        let place = TestRun::new();
        let recipe = place.recipe(&[&MICRO_BATCHES[..], &[LAYERS], changes].concat());
        finish(&recipe);
        Trained { place, run: run_of(&recipe) }
    }

    /// Returns the name of its last checkpoint, of a Mixture-of-Head model.
    fn checkpoint(&self) -> String {
        format!("{}@10", self.run.root().display())
    }

    fn export(&self) -> String {
        self.run.export().display().to_string()
    }

    /// Returns a recipe in its place that starts from the export and learns in the stage `taught` from `teacher`.
    fn recipe(&self, name: &str, taught: &str, teacher: &str, changes: &[&str]) -> Recipe {
        let changes = [&MICRO_BATCHES[..], &[LAYERS], changes].concat();
        let mut recipe = self.place.recipe_from(self.export(), name, &changes);
        let stage = recipe.stages.iter_mut().find(|stage| stage.name == taught).unwrap();
        let distill =
            json!({ "teacher": teacher, "weight": 2, "cross_entropy": 0.5, "temperature": 1.5 });
        stage.distill = serde_json::from_value(distill).unwrap();
        recipe
    }

    /// Returns a directory with the export after a change.
    fn changed(&self, name: &str, change: impl Fn(&Path)) -> String {
        let directory = self.place.path(name);
        copy_all(&self.run.export(), &directory);
        change(&directory);
        directory.display().to_string()
    }
}

/// Returns a loss of each step that has it.
fn losses(results: &Results, name: &str) -> Vec<f64> {
    results.metrics.iter().filter_map(|line| line.get(name)?.as_f64()).collect()
}

#[test]
fn every_layout_with_a_teacher_ends_as_one_rank() {
    let trained = Trained::new();
    // Ranks, tensor, pipeline and chunks: data alone, with ranks that have no work, and each other kind.
    let layouts = [
        (2, [1, 1, 1]),
        (11, [1, 1, 1]),
        (2, [2, 1, 1]),
        (2, [1, 2, 1]),
        (4, [2, 2, 1]),
        (4, [1, 4, 1]),
        (4, [1, 2, 2]),
        (8, [2, 2, 2]),
    ];
    // The run's own model with a vocabulary that has grown, and a Mixture-of-Head teacher with documents apart. The
    // other stage has no teacher.
    let apart = ["data.document_mask=true", "memory.recompute=block"];
    for (taught, teacher, changes) in [
        ("moh", "start".to_owned(), &["model.pad_vocab_to=96"][..]),
        ("adapt", trained.checkpoint(), &apart),
    ] {
        let recipe = |name: &str, layout| {
            arranged(trained.recipe(name, taught, &teacher, changes), [layout; 2])
        };
        let reference = finish_on(1, &recipe(taught, [1, 1, 1]));
        for line in &reference.metrics {
            let found = line.get("distillation_loss").map(|loss| loss.as_f64().unwrap());
            assert_eq!(found.is_some(), line["stage"] == taught, "{line}");
            assert!(found.is_none_or(|loss| loss > 1e-4), "{line}");
        }
        for (ranks, layout) in layouts {
            let what = format!("{taught}, {ranks} ranks, {layout:?}");
            let found = finish_on(ranks, &recipe(&what, layout));
            assert_alike(&found, &reference, &what);
            for (line, reference) in found.metrics.iter().zip(&reference.metrics) {
                let loss = |line: &Value| line.get("distillation_loss")?.as_f64();
                if let Some((found, expected)) = loss(line).zip(loss(reference)) {
                    let error = (found / expected - 1.0).abs();
                    assert!(error < 1e-2, "{what}: {line}, {reference}");
                }
            }
            let repeated = finish_on(ranks, &recipe(&format!("{what}, again"), layout));
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
            recipe
        };
        // The files that a process killed after step 4 would leave.
        let copy = recipe("copy");
        let copies = [(4, copy.run.dir.as_path())];
        let whole = Start { copies: &copies, ..Start::default() }.finish(&recipe("whole"));
        assert!(finish(&copy) == whole, "{teacher}: killed");
        let stopped = finish_in_parts(&recipe("stopped"), [1, 3, 7]);
        assert!(stopped == whole, "{teacher}: stopped");
    }
}

/// The teacher gets the student's input, with documents apart too, and teaches the rows of the vocabulary that it has.
#[test]
fn a_student_that_has_not_moved_has_no_distillation_loss() {
    let trained = Trained::new();
    let padded = "model.pad_vocab_to=96";
    for (number, (teacher, change)) in [
        ("start".to_owned(), "data.document_mask=false"),
        ("start".to_owned(), "data.document_mask=true"),
        ("start".to_owned(), padded),
        (trained.export(), padded),
        (trained.checkpoint(), padded),
    ]
    .into_iter()
    .enumerate()
    {
        let changes = ["stage.adapt.attention=moh", change];
        let recipe = trained.recipe(&format!("still-{number}"), "adapt", &teacher, &changes);
        let losses = losses(&finish(&recipe), "distillation_loss");
        assert_eq!((losses.len(), losses[0]), (5, 0.0), "{teacher} {change}");
        assert!(losses[1..].iter().all(|&loss| loss > 0.0), "{teacher} {change}: {losses:?}");
        let card = fs::read_to_string(run_of(&recipe).export().join("README.md")).unwrap();
        let named = match &teacher[..] {
            "start" => "the model as it was loaded".to_owned(),
            path => format!("`{}`", path.rsplit('/').next().unwrap()),
        };
        let expected = format!(
            "Stage adapt learned the distribution of a teacher, {named}: 2 x its KL divergence at temperature 1.5 + 0.5 \
             x the cross-entropy."
        );
        assert!(card.contains(&expected), "{card}");
    }
}

#[test]
fn weights_that_leave_the_teacher_out_leave_the_run_as_it_is() {
    let trained = Trained::new();
    let mut without = trained.recipe("without", "moh", "start", &[]);
    without.stages[1].distill = None;
    let mut with = trained.recipe("with", "moh", &trained.export(), &[]);
    let distill = with.stages[1].distill.as_mut().unwrap();
    // A weight too small to change an f32.
    (distill.weight, distill.cross_entropy) = (1e-30, 1.0);
    let mut found = finish(&with);
    for line in &mut found.metrics {
        line["distillation_loss"].take();
    }
    assert_alike(&found, &finish(&without), "a weight of almost 0");
}

#[test]
fn a_teacher_that_does_not_fit_is_refused_before_the_run_begins() {
    let trained = Trained::new();
    let larger = Trained::with(&["model.new.vocab_size=65"]);
    let shape = Trained::with(&["model.new.num_hidden_layers=2"]);
    let short = trained.changed("short", |directory| {
        edit_json(&directory.join("config.json"), |json| {
            json["max_position_embeddings"] = 4.into()
        });
    });
    let run = trained.run.root().display().to_string();
    let own_size = "has a vocabulary of 65 rows, but the run's model has 64";
    for (teacher, reason) in [
        (larger.export(), own_size),
        (larger.checkpoint(), own_size),
        (shape.checkpoint(), "has another shape than the run's model"),
        (short, "supports 4 tokens (max_position_embeddings), but the stage's sequences have 8"),
        ("nowhere".to_owned(), "is no directory and no run: name a model directory"),
        (run.clone(), "is a run: name one of its checkpoints, as RUN@STEP"),
        (format!("{run}@9999"), "9999"),
    ] {
        let recipe = trained.recipe("refused", "moh", &teacher, &[]);
        refuses(&recipe, reason);
        assert!(!recipe.run.dir.exists(), "{teacher}");
    }
    // The tokenizer of the run's model, and another tokenizer with as many tokens.
    let [model, same, different] = [("model", "w0"), ("same", "w0"), ("different", "w1")]
        .map(|(name, word)| trained.changed(name, |directory| write_tokenizer(directory, word)));
    let recipe = |teacher: &str| {
        let mut recipe = trained.recipe("tokenizers", "moh", teacher, &[]);
        recipe.model.from = Some(model.clone());
        recipe
    };
    let error = refusal(&recipe(&different));
    assert!(
        error.contains("stage.moh.distill.teacher") && error.contains("has another tokenizer than"),
        "{error}"
    );
    finish(&recipe(&same));
}

#[test]
fn a_run_that_resumes_has_its_teacher() {
    let trained = Trained::new();
    let teacher = trained.changed("teacher", |_| {});
    let recipe = |teacher: &str| trained.recipe("resumed", "moh", teacher, &[]);
    stop_at(&recipe(&teacher), 6);
    // The teacher may move.
    let moved = format!("{teacher}-moved");
    fs::rename(&teacher, &moved).unwrap();
    stop_at(&recipe(&moved), 7);
    let put = |of: &Trained| {
        let weights = of.run.export().join("model.safetensors");
        fs::copy(weights, Path::new(&moved).join("model.safetensors")).unwrap();
    };
    let is_another = |teacher: &str| {
        let error = refusal(&recipe(teacher));
        assert!(
            error.contains("stage.moh.distill.teacher is not") && error.contains("another teacher"),
            "{error}"
        );
    };
    is_another(&trained.checkpoint());
    is_another("start");
    // Other weights in the same place.
    put(&Trained::with(&["run.seed=6"]));
    is_another(&moved);
    // Another weight of the loss is another run.
    put(&trained);
    let mut heavier = recipe(&moved);
    heavier.stages[1].distill.as_mut().unwrap().weight = 3.0;
    refuses(&heavier, "stage.moh.distill.weight");
    finish(&recipe(&moved));
}

#[test]
fn a_run_that_learns_from_its_start_reads_its_model_again() {
    let trained = Trained::new();
    let model = trained.changed("initial", |_| {});
    let mut recipe = trained.recipe("own", "moh", "start", &[]);
    recipe.model.from = Some(model.clone());
    stop_at(&recipe, 6);
    assert!(!run_of(&recipe).keeps_model(&recipe).unwrap());
    let (weights, aside) =
        (Path::new(&model).join("model.safetensors"), trained.place.path("aside"));
    fs::rename(&weights, &aside).unwrap();
    assert!(refusal(&recipe).contains("initial"), "the weights are missing");
    fs::rename(&aside, &weights).unwrap();
    finish(&recipe);
    assert!(run_of(&recipe).keeps_model(&recipe).unwrap());
}
