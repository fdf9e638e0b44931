//! Recipes, optimiser, checkpoints and the training loop.
