//! Runs whose gradients are made NaN, or far too large, where some samples are.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moh_comm::World;
use moh_train::{Error, Event, OpenDevice, Outcome, Recipe, RunOptions};

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
    let stop = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let run = |world: World| {
            let stop = Arc::clone(&stop);
            scope.spawn(move || {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
                let mut heard = |event: Event<'_>| {
                    hear(&event);
                    if let Event::Step { step, .. } = event
                        && Some(step) == stop_at
                    {
                        stop.store(true, Ordering::Relaxed);
                    }
                };
                let found = pool.install(|| {
                    let path = Path::new("recipe.toml");
                    let options = RunOptions { gradient_faults: faults, ..RunOptions::new(&stop) };
                    let on = (OpenDevice::Cpu, &world);
                    let mut recipe = recipe.clone();
                    moh_train::run(&mut recipe, path, None, on, options, &mut heard)
                });
                world.close().unwrap();
                found
            })
        };
        let threads: Vec<_> = World::threads(ranks).into_iter().map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
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
    matches!(outcome, Outcome::Stopped { .. })
}

/// NaN in one sample of each of these steps.
pub fn nan_at<const N: usize>(steps: [u64; N]) -> [(u64, f32); N] {
    steps.map(|step| ((step - 1) * SEQUENCES + step % SEQUENCES, f32::NAN))
}
