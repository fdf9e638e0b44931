//! The training data that a recipe names.

use moh_data::TrainingData;
use moh_recipe::{Order, Recipe};

use crate::Error;

/// Opens the training data of `recipe`, for a model with `vocab_size` rows of its embedding.
///
/// # Errors
/// Fails if a file is missing or invalid, or shorter than one window.
pub fn open_training(recipe: &Recipe, vocab_size: usize) -> Result<TrainingData, Error> {
    let sources: Vec<_> = (recipe.data.sources.iter())
        .map(|source| moh_data::Source { path: source.path.clone(), weight: source.weight })
        .collect();
    let order = match recipe.data.order {
        Order::Shuffled => moh_data::Order::Shuffled,
        Order::Sequential => moh_data::Order::Sequential,
    };
    let length = recipe.data.sequence_length;
    let opened = TrainingData::open(&sources, length, order, recipe.run.seed, vocab_size);
    Ok(opened.map_err(|error| error.with_length("data.sequence_length"))?)
}
