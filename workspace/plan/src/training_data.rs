//! The training data that a recipe names.

use moh_data::TrainingData;
use moh_recipe::Recipe;

use crate::Error;

/// Opens the training data of `recipe`, for a model with `vocab_size` rows of its embedding.
///
/// # Errors
/// Fails if a file is missing or invalid, or shorter than one window.
pub fn open_training(recipe: &Recipe, vocab_size: usize) -> Result<TrainingData, Error> {
    let data = &recipe.data;
    let (length, seed) = (data.sequence_length, recipe.run.seed);
    let opened = TrainingData::open(&data.sources, length, data.order, seed, vocab_size);
    Ok(opened.map_err(|error| error.with_length("data.sequence_length"))?)
}
