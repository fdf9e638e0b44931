//! A run of a tiny model, trained by the library, for tests of programs that read runs.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use moh_comm::World;
use moh_kernels::open_device::OpenDevice;
use moh_recipe::Recipe;
use moh_train::RunOptions;

use crate::programs::{
    RECIPE_HEAD, VOCABULARY, two_stages, word_tokenizer, workplace, write_tokens,
};

/// Returns a directory with a model, its tokenizer and a text.
pub fn prepared() -> tempfile::TempDir {
    let dir = workplace();
    let source = dir.path().join("source");
    fs::write(source.join("tokenizer.json"), word_tokenizer(VOCABULARY, "w0")).unwrap();
    fs::write(source.join("generation_config.json"), "{\"eos_token_id\": 3}").unwrap();
    fs::write(source.join("chat_template.jinja"), "{{ messages }}").unwrap();
    write_tokens(&dir.path().join("text"), VOCABULARY, 2000, 1);
    dir
}

/// Runs four dense steps, and two steps with some of the heads if there are two stages, with a checkpoint after each.
pub fn train(dir: &Path, stages: usize, change: impl FnOnce(&mut Recipe)) {
    let checkpoints = "[checkpoint]\nevery_steps = 1\nkeep = 9\n";
    let text = format!("{RECIPE_HEAD}{}{checkpoints}", two_stages([128, 64], 32));
    let mut recipe = Recipe::parse(&text, Path::new("recipe.toml"), &[]).unwrap();
    recipe.stages.truncate(stages);
    let source = dir.join("source");
    recipe.run.dir = dir.join("run");
    recipe.model.from = Some(source.display().to_string());
    recipe.data.sources[0].path = dir.join("text");
    change(&mut recipe);
    run(&mut recipe, Some(&source));
}

/// Runs a recipe to its end. Its model may be in a directory.
pub fn run(recipe: &mut Recipe, from: Option<&Path>) {
    let (stop, world, path) = (AtomicBool::new(false), World::single(), Path::new("recipe.toml"));
    let (device, options) = (OpenDevice::Cpu, RunOptions::new(&stop));
    moh_train::run(recipe, path, from, device, &world, options, &mut |_| {}).unwrap();
}
