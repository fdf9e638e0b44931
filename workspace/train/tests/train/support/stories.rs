//! Twenty-five steps of a small pretrained model on ranks in every arrangement. `MOH_EVERY_LAYOUT=1` tries all
//! arrangements, otherwise a few of each kind are tried.

use std::path::PathBuf;

use moh_checkpoint::run_directory::RunDirectory;
use moh_data::TokenFile;
use moh_hf::{ConfigFile, Error, WeightFiles};
use moh_kernels::{Cpu, ElementType};
use moh_model::{Activations, Model, PassShape, Recompute, StepSums};
use moh_recipe::{ParallelOptions, Recipe};
use moh_testkit::programs::fixtures;
use moh_testkit::texts::prepare_text;
use moh_text::prepare::AppendEos;

use super::results::{Results, assert_alike};

const EVERY: &str = "MOH_EVERY_LAYOUT";

/// The number of tokens with selected heads that are compared after training.
const TOKENS: usize = 24 * 32;

/// Ranks and their arrangement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub ranks: usize,
    pub parallel: ParallelOptions,
}

/// Runs of stories260K, a model of five blocks and four key/value heads, on 24 sequences a step.
pub struct Stories {
    place: tempfile::TempDir,
    attention: &'static str,
    reference: Option<(Results, Vec<u8>)>,
}

impl Stories {
    /// Runs with dense attention, or with three quarters of the heads.
    pub fn new(attention: &'static str) -> Self {
        let place = tempfile::tempdir().unwrap();
        let stories = fixtures().join("data/stories-valid.jsonl");
        let (model, prefix) = (fixtures().join("stories260K"), place.path().join("stories"));
        prepare_text(&model, &stories, &prefix, AppendEos::Never);
        Stories { place, attention, reference: None }
    }

    /// Returns one rank, then the arrangements of two to eight ranks that the model has: a few of each kind, or all of
    /// them.
    pub fn layouts(&self) -> Vec<Layout> {
        let mut found = Vec::new();
        for ranks in [1, 2, 3, 4, 6, 8] {
            for tensor in [1, 2, 4] {
                for pipeline in 1..=5 {
                    let most = if pipeline > 1 { 5 / pipeline } else { 1 };
                    let layout = |virtual_stages| Layout {
                        ranks,
                        parallel: ParallelOptions { tensor, pipeline, virtual_stages },
                    };
                    if ranks % (tensor * pipeline) == 0 {
                        found.extend((1..=most).map(layout));
                    }
                }
            }
        }
        if std::env::var_os(EVERY).is_none() {
            let kinds = [
                (1, 1, 1, 1),
                (2, 1, 1, 1),
                (2, 2, 1, 1),
                (2, 1, 2, 2),
                (3, 1, 3, 1),
                (4, 4, 1, 1),
                (6, 2, 3, 1),
                (6, 1, 2, 1),
                (8, 2, 2, 2),
                (8, 1, 1, 1),
            ];
            found.retain(|layout| {
                let ParallelOptions { tensor, pipeline, virtual_stages } = layout.parallel;
                kinds.contains(&(layout.ranks, tensor, pipeline, virtual_stages))
            });
        }
        found
    }

    /// Writes the recipe of a run in a new directory.
    pub fn write_recipe(&self, layout: Layout) -> PathBuf {
        let ParallelOptions { tensor, pipeline, virtual_stages } = layout.parallel;
        let attention = match self.attention {
            "dense" => "attention = \"dense\"",
            _ => "attention = \"moh\"\nmoh = { shared_heads = 4, routed_top_k = 2 }",
        };
        let name = format!("run-{}-{tensor}-{pipeline}-{virtual_stages}", layout.ranks);
        let text = format!(
            r#"
[run]
dir = "{dir}/{name}"
seed = 1
device = "cpu"
dtype = "f32"

[model]
from = "{model}"

[data]
sequence_length = 32
sources = [{{ path = "{dir}/stories" }}]

[[stage]]
name = "only"
{attention}
tokens = 19_200
batch_tokens = 768
micro_batch = 2
learning_rate = {{ max = 1e-3, min = 1e-4, warmup_steps = 5 }}
parallel = {{ tensor = {tensor}, pipeline = {pipeline}, virtual_stages = {virtual_stages} }}
"#,
            dir = self.place.path().display(),
            model = fixtures().join("stories260K").display(),
        );
        let path = self.place.path().join(format!("{name}.toml"));
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Compares a finished run with the run on one rank, which comes first. Prints the number of places in which the
    /// models select other heads.
    pub fn compare(&mut self, layout: Layout, recipe: &Recipe) {
        let found = Results::of(recipe);
        let selected = self.selected(recipe);
        let Some((reference, expected)) = &self.reference else {
            assert_eq!(layout.ranks, 1);
            self.reference = Some((found, selected));
            return;
        };
        let what = format!("{layout:?}, {}", self.attention);
        assert_alike(&found, reference, &what);
        let flips = selected.iter().zip(expected).filter(|(found, one)| found != one).count();
        if !expected.is_empty() {
            println!("{what}: {flips} of {} choices differ after training", expected.len());
        }
        assert_eq!(selected.len(), expected.len());
        // Weights that agree to 1e-3 change the order of the closest norms only.
        assert!(flips * 200 <= expected.len(), "{what}: {flips} of {} differ", expected.len());
    }

    /// Returns the routed heads that the trained model selects for the first tokens of the text.
    fn selected(&self, recipe: &Recipe) -> Vec<u8> {
        let export = RunDirectory::new(&recipe.run.dir).export();
        let config = ConfigFile::read(&export).unwrap().config;
        let weights = WeightFiles::open(&export).unwrap();
        let source = |segment: &moh_model::layout::Segment, values: &mut [f32]| {
            weights.read_f32(&segment.name, values)
        };
        let mut model = Model::new::<Error>(Cpu, ElementType::F32, config, 32, source).unwrap();
        let file = TokenFile::open(&self.place.path().join("stories")).unwrap();
        let ids = file.ids(0..TOKENS as u64).unwrap();
        let shape = PassShape::evaluation(TOKENS / 32, 32, Recompute::None);
        let mut activations = Activations::new(&model, shape).unwrap();
        activations.upload(&Cpu, &ids, &ids, &[]).unwrap();
        model.forward(&mut activations, &mut StepSums::new(&Cpu).unwrap()).unwrap();
        model.routed_mask(&activations).unwrap().concat()
    }
}
