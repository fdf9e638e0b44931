//! Recipes.

use std::path::Path;

use moh_recipe::Recipe;
use moh_testkit::fuzz::Target;

use crate::{ALLOCATOR, outcome, repository};

#[test]
fn a_mutated_recipe_is_read_or_refused() {
    let target = Target {
        name: "recipe",
        seeds: &[
            repository("recipes/quickstart.toml"),
            repository("recipes/moh-llama3-8b.toml"),
            repository("recipes/stories260k.toml"),
        ],
        memory: 64 << 20,
        allocator: &ALLOCATOR,
    };
    target.run(|input| {
        let text = String::from_utf8_lossy(input);
        outcome(Recipe::parse(&text, Path::new("recipe.toml"), &[]))
    });
}
