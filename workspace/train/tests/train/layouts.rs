//! A pretrained model in every layout of ranks, as processes started by mpirun. The losses, the weights and, except for
//! ties, the selected heads are the same as on one rank.

#![cfg(unix)]

use crate::PROGRAM;
use crate::support::job::mpirun;
use crate::support::stories::{Layout, Stories};
use moh_recipe::Recipe;
use moh_testkit::programs::success;

fn train(stories: &Stories, layout: Layout) -> Recipe {
    let recipe = stories.write_recipe(layout);
    let place = recipe.parent().unwrap();
    let words = ["-n", &layout.ranks.to_string(), PROGRAM, "--recipe"].map(str::to_owned);
    let words = [&words[..], &[recipe.display().to_string()]].concat();
    success(&mut mpirun(place, &words));
    Recipe::load(&recipe, &[]).unwrap()
}

fn as_one_rank(attention: &'static str) {
    let mut stories = Stories::new(attention);
    for layout in stories.layouts() {
        let recipe = train(&stories, layout);
        stories.compare(layout, &recipe);
    }
}

#[test]
#[ignore = "needs the feature mpi, mpirun and the fixtures beside the repository"]
fn dense_models_train_as_on_one_rank() {
    as_one_rank("dense");
}

#[test]
#[ignore = "needs the feature mpi, mpirun and the fixtures beside the repository"]
fn mixture_of_head_models_train_as_on_one_rank() {
    as_one_rank("moh");
}
