//! Code that the tests of runs share: a small recipe with its token files, and the files of a run.

// Every test file compiles this module for itself and uses a part of it.
pub mod driver;
pub mod faulty;
pub mod job;
pub mod results;
pub mod stories;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use moh_checkpoint::run_directory::RunDirectory;
use moh_checkpoint::run_log::Summary;
use moh_data::{TokenFileInfo, TokenFileWriter};
use moh_recipe::{ParallelOptions, Recipe};
use tempfile::TempDir;

/// Eight micro-batches a step.
pub const MICRO_BATCHES: [&str; 2] = ["stage.adapt.micro_batch=1", "stage.moh.micro_batch=1"];

/// Returns a recipe of two stages of 5 steps of 8 sequences of 8 tokens, with checkpoints after steps 2, 4, 5, 6, 8 and
/// 10.
fn recipe_text(dir: &Path) -> String {
    let dir = dir.display();
    format!(
        r#"
[run]
dir = "{dir}/run"
seed = 1
device = "cpu"
dtype = "f32"

[model.new]
vocab_size = 64
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 4
initializer_range = 0.1

[data]
sequence_length = 8
sources = [{{ path = "{dir}/text" }}]
validation = {{ path = "{dir}/held-out", batches = 2, every_steps = 3 }}

[[stage]]
name = "adapt"
attention = "dense"
tokens = 320
batch_tokens = 64
micro_batch = 4
learning_rate = {{ max = 1e-2, min = 1e-3, warmup_steps = 2 }}

[[stage]]
name = "moh"
attention = "moh"
moh = {{ shared_heads = 1, routed_top_k = 2 }}
tokens = 320
batch_tokens = 64
micro_batch = 4
learning_rate = {{ max = 5e-3, min = 1e-3, warmup_steps = 1 }}

[checkpoint]
every_steps = 2
keep = 2
"#
    )
}

/// A directory with token files for the recipe.
pub struct TestRun {
    pub dir: TempDir,
}

impl TestRun {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_tokens(&dir.path().join("text"), 1, 60);
        write_tokens(&dir.path().join("held-out"), 2, 20);
        TestRun { dir }
    }

    pub fn recipe(&self, overrides: &[&str]) -> Recipe {
        let overrides: Vec<String> = overrides.iter().map(ToString::to_string).collect();
        let text = recipe_text(self.dir.path());
        let mut recipe = Recipe::parse(&text, Path::new("recipe.toml"), &overrides).unwrap();
        let model = self.dir.path().join("model");
        if model.is_dir() {
            recipe.model.new = None;
            recipe.model.from = Some(model.display().to_string());
        }
        recipe
    }

    /// Returns the recipe in a run directory of another name.
    pub fn recipe_in(&self, name: &str, overrides: &[&str]) -> Recipe {
        let mut recipe = self.recipe(overrides);
        recipe.run.dir = self.path(name);
        recipe
    }

    /// Returns the recipe as [`TestRun::recipe_in`], for a run that starts from a model or from another run.
    pub fn recipe_from(&self, from: impl Into<String>, name: &str, overrides: &[&str]) -> Recipe {
        let mut recipe = self.recipe_in(name, overrides);
        (recipe.model.new, recipe.model.from) = (None, Some(from.into()));
        recipe
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// Returns the recipe with the layouts of its stages: tensor-parallel ranks, stages of a pipeline, and chunks of each.
pub fn arranged(mut recipe: Recipe, layouts: [[usize; 3]; 2]) -> Recipe {
    for (stage, [tensor, pipeline, virtual_stages]) in recipe.stages.iter_mut().zip(layouts) {
        stage.parallel = ParallelOptions { tensor, pipeline, virtual_stages };
    }
    recipe
}

pub fn run_of(recipe: &Recipe) -> RunDirectory {
    RunDirectory::new(&recipe.run.dir)
}

pub fn summary_of(recipe: &Recipe) -> Summary {
    Summary::read(&run_of(recipe).summary()).unwrap().unwrap()
}

/// Writes documents of 1 to 12 tokens, in which a token depends on the token before it.
pub fn write_tokens(prefix: &Path, seed: u64, documents: u64) {
    write_tokens_with(prefix, seed, documents, &BTreeMap::new());
}

/// Writes documents as [`write_tokens`], with other tokens at these positions.
pub fn write_tokens_with(prefix: &Path, seed: u64, documents: u64, others: &BTreeMap<u64, u32>) {
    let mut writer = TokenFileWriter::replace(prefix, 64 + others.len()).unwrap();
    let mut positions = 0..;
    let mut state = seed;
    let mut next = |below: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..documents {
        let mut token = next(64) as u32;
        let length = 1 + next(12);
        let tokens: Vec<u32> = (0..length)
            .map(|_| {
                token = (token * 5 + 1 + next(3) as u32) % 64;
                *positions.next().and_then(|position| others.get(&position)).unwrap_or(&token)
            })
            .collect();
        writer.push_document(&tokens).unwrap();
    }
    writer.finish(TokenFileInfo::default()).unwrap();
}

/// Returns the files of a token file.
pub fn token_files(prefix: &Path) -> [PathBuf; 3] {
    ["bin", "idx", "json"].map(|ending| prefix.with_extension(ending))
}

pub fn move_tokens(from: &Path, to: &Path) {
    for (from, to) in token_files(from).iter().zip(token_files(to)) {
        fs::rename(from, to).unwrap();
    }
}

pub fn remove_tokens(prefix: &Path) {
    token_files(prefix).iter().for_each(|path| fs::remove_file(path).unwrap());
}

/// Cuts the last bytes of a file off.
pub fn shorten(path: &Path) {
    let bytes = fs::read(path).unwrap();
    fs::write(path, &bytes[..bytes.len() - 7]).unwrap();
}

/// Copies the directory of a run that writes checkpoints in the background, at a moment at which nothing changes. A
/// process that was killed then would leave the same files.
pub fn copy_running(from: &Path, to: &Path) {
    loop {
        let before = sizes(from);
        let copied = before.as_ref().is_some_and(|before| {
            before.iter().all(|(path, size)| {
                let target = to.join(path.strip_prefix(from).unwrap());
                fs::create_dir_all(target.parent().unwrap()).unwrap();
                match size {
                    Some(_) => fs::copy(path, target).is_ok(),
                    None => fs::create_dir_all(target).is_ok(),
                }
            })
        });
        if copied && sizes(from) == before {
            return;
        }
        let _ = fs::remove_dir_all(to);
    }
}

/// Returns everything below a directory, files with their sizes; `None` if a file disappeared meanwhile.
fn sizes(root: &Path) -> Option<BTreeMap<PathBuf, Option<u64>>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(root).ok()? {
        let path = entry.ok()?.path();
        let data = fs::metadata(&path).ok()?;
        if data.is_dir() {
            found.extend(sizes(&path)?);
        }
        found.insert(path, data.is_file().then_some(data.len()));
    }
    Some(found)
}

/// Returns all files below a directory.
pub fn files(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    found
}
