//! Runs whose gradients are made NaN, or far too large, where some samples are.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use moh_device::OpenDevice;
use moh_recipe::Recipe;
use moh_train::{Error, Event, Outcome, RunOptions};

use super::on_ranks::on_ranks;
use super::results::Results;

/// Samples with a factor on their gradients.
pub type Faults<'a> = &'a [(u64, f32)];

/// Sequences of a step of the small recipe.
pub const SEQUENCES: u64 = 8;

/// What the first rank hears: the events, before the next thing happens.
pub type Hear<'a> = &'a (dyn Fn(&Event<'_>) + Sync);

/// Runs a recipe on threads that play ranks; with `stop_at`, it is asked to stop after that step.
pub fn run_on(
    ranks: usize,
    recipe: &Recipe,
    faults: Faults<'_>,
    (stop_at, hear): (Option<u64>, Hear<'_>),
) -> Vec<Result<Outcome, Error>> {
    let stop = AtomicBool::new(false);
    on_ranks(ranks, |world| {
        let mut heard = |event: Event<'_>| {
            hear(&event);
            if let Event::Step { step, .. } = event
                && Some(step) == stop_at
            {
                stop.store(true, Ordering::Relaxed);
            }
        };
        let (path, on) = (Path::new("recipe.toml"), (OpenDevice::Cpu, world));
        let options = RunOptions { gradient_faults: faults, ..RunOptions::new(&stop) };
        moh_train::run(&mut recipe.clone(), path, None, on, options, &mut heard)
    })
}

pub fn finish_on(ranks: usize, recipe: &Recipe, faults: Faults<'_>) -> Results {
    for outcome in run_on(ranks, recipe, faults, (None, &|_| {})) {
        assert!(matches!(outcome.unwrap(), Outcome::Finished(_)));
    }
    Results::of(recipe)
}

pub fn finish(recipe: &Recipe, faults: Faults<'_>) -> Results {
    finish_on(1, recipe, faults)
}

/// Runs a recipe until it is asked to stop after `step`; whether it then had steps left.
pub fn stop_at(recipe: &Recipe, faults: Faults<'_>, step: u64) -> bool {
    let outcome = run_on(1, recipe, faults, (Some(step), &|_| {})).pop().unwrap().unwrap();
    // After a return to the initial model there is no step yet.
    matches!(outcome, Outcome::Stopped { .. } | Outcome::StoppedBeforeTraining)
}

/// NaN in one sample of each of these steps.
pub fn nan_at<const N: usize>(steps: [u64; N]) -> [(u64, f32); N] {
    steps.map(|step| ((step - 1) * SEQUENCES + step % SEQUENCES, f32::NAN))
}
