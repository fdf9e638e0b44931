//! Checkpoints are written while training continues: their steps, their completion, and the result where they cannot be
//! written.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::driver::{Start, finish, heard, reference, resumed, run_in, watch};
use crate::support::results::Results;
use crate::support::{TestRun, run_of};
use moh_comm::World;
use moh_recipe::Recipe;
use moh_train::{Event, Outcome, RunOptions, TimeLimit};

/// A run's directory of checkpoints, which can be lost: a file then has its name.
struct Disk {
    checkpoints: PathBuf,
    aside: PathBuf,
}

impl Disk {
    fn of(recipe: &Recipe) -> Self {
        let run = run_of(recipe);
        Disk { checkpoints: run.checkpoints(), aside: run.root().join("aside") }
    }

    /// Loses the directory, while no checkpoint is in flight.
    fn lose(&self) {
        fs::rename(&self.checkpoints, &self.aside).unwrap();
        fs::write(&self.checkpoints, "").unwrap();
    }

    fn restore(&self) {
        fs::remove_file(&self.checkpoints).unwrap();
        fs::rename(&self.aside, &self.checkpoints).unwrap();
    }
}

#[test]
fn a_checkpoint_is_complete_when_it_is_announced() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let mut announced = Vec::new();
    Start::default().finish_and_hear(&recipe, |event, _| {
        if let Event::Checkpoint { path, step, seconds } = event {
            assert!(path.ends_with(format!("step-{step}")) && *seconds > 0.0);
            // A later checkpoint may have removed it.
            assert!(path.join("manifest.json").is_file() || announced.len() > 1);
            announced.push(*step);
        }
    });
    assert_eq!(announced, [2, 4, 5, 6, 8, 10]);
}

#[test]
fn a_checkpoint_that_cannot_be_written_is_warned_of_and_the_run_goes_on() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let disk = Disk::of(&recipe);
    let (mut warnings, mut complete) = (Vec::new(), Vec::new());
    let found = Start::default().finish_and_hear(&recipe, |event, _| match event {
        Event::Step { step: 6, .. } => disk.restore(),
        Event::Warning { text } => warnings.push((*text).to_owned()),
        Event::Checkpoint { step, .. } => {
            complete.push(*step);
            if *step == 4 {
                disk.lose();
            }
        }
        _ => {}
    });
    assert_eq!(complete, [2, 4, 6, 8, 10]);
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.starts_with("the checkpoint of step 5 could not be written: "), "{warning}");
    assert!(warning.contains("checkpoints"), "{warning}");
    let rest = "; the last good checkpoint is of step 4, and another one is tried in a minute, or when \
                the next checkpoint is due";
    assert!(warning.ends_with(rest), "{warning}");
    assert!(found == *reference());
    assert_eq!(run_of(&recipe).checkpoint_steps().unwrap(), [8, 10]);
}

#[test]
fn the_checkpoint_of_a_stop_is_tried_once_more() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let disk = Disk::of(&recipe);
    let mut warnings = Vec::new();
    let stopped = watch(&recipe, |event, stop| match event {
        Event::Step { step: 3, .. } => stop.store(true, Ordering::Relaxed),
        Event::Checkpoint { step: 2, .. } => disk.lose(),
        Event::Warning { text } => {
            warnings.push((*text).to_owned());
            disk.restore();
        }
        _ => {}
    });
    assert_eq!(stopped.unwrap(), Outcome::Stopped { step: 3 });
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.ends_with("and another one is tried now"), "{warning}");
    assert_eq!(run_of(&recipe).checkpoint_steps().unwrap(), [2, 3]);
    assert!(finish(&recipe) == *reference());
}

#[test]
fn a_run_that_cannot_write_its_last_checkpoint_fails_and_resumes_from_the_one_before() {
    // At a stop, and at the end of the run.
    for (step, good, stops) in [(3, 2, true), (10, 8, false)] {
        let place = TestRun::new();
        let recipe = place.recipe(&[]);
        let disk = Disk::of(&recipe);
        let error = watch(&recipe, |event, stop| match event {
            Event::Step { step: now, .. } if *now == step => stop.store(stops, Ordering::Relaxed),
            Event::Checkpoint { step: now, .. } if *now == good => disk.lose(),
            _ => {}
        })
        .unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&format!("step-{step}: the checkpoint could not be")), "{text}");
        assert!(text.contains(&format!("the last good checkpoint is of step {good}")), "{text}");
        assert!(disk.checkpoints.is_file());
        disk.restore();
        assert_eq!(resumed(&recipe), [good]);
        assert!(Results::of(&recipe) == *reference());
    }
}

#[test]
fn old_checkpoints_that_cannot_be_removed_are_warned_of() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let run = run_of(&recipe);
    let mut warnings = Vec::new();
    let found = Start::default().finish_and_hear(&recipe, |event, _| match event {
        // In the place of the directory that a checkpoint is moved to before it is removed.
        Event::Step { step: 3, .. } => {
            fs::write(run.checkpoints().join(".tmp-removed-step-2"), "").unwrap();
        }
        Event::Warning { text } => warnings.push((*text).to_owned()),
        _ => {}
    });
    assert!(!warnings.is_empty());
    for warning in &warnings {
        assert!(warning.contains(".tmp-removed-step-2: ") && warning.contains("is complete"));
    }
    assert!(found == *reference());
}

#[test]
fn checkpoints_by_time_change_no_result() {
    let place = TestRun::new();
    let recipe = place.recipe(&["checkpoint.every_steps=0", "checkpoint.every_minutes=1e-9"]);
    let complete = heard(&recipe, |event| match event {
        Event::Checkpoint { step, .. } => Some(*step),
        _ => None,
    });
    assert_eq!(complete, (1..=10).collect::<Vec<u64>>());
    assert!(Results::of(&recipe) == *reference());
}

#[test]
fn a_run_with_a_time_limit_stops_in_time_and_continues_to_the_same_end() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let limited = |length| {
        let stop = AtomicBool::new(false);
        let time_limit = Some(TimeLimit::new(Instant::now(), length));
        let options = RunOptions { time_limit, ..RunOptions::new(&stop) };
        run_in(&World::single(), &recipe, options, &mut |_| {}).unwrap()
    };
    // No time is left after a step: each start runs one step.
    for step in 1..=3 {
        assert_eq!(limited(Duration::from_nanos(1)), Outcome::Stopped { step });
    }
    assert!(matches!(limited(Duration::from_secs(100_000)), Outcome::Finished(_)));
    assert!(Results::of(&recipe) == *reference());
}

#[test]
fn metrics_that_are_removed_during_a_run_are_warned_of_once() {
    let place = TestRun::new();
    let recipe = place.recipe(&[]);
    let metrics = run_of(&recipe).metrics();
    let mut warnings = Vec::new();
    let done = watch(&recipe, |event, _| match event {
        Event::Step { step: 3, .. } => fs::remove_file(&metrics).unwrap(),
        Event::Warning { text } => warnings.push((*text).to_owned()),
        _ => {}
    });
    assert!(matches!(done, Ok(Outcome::Finished(_))), "{done:?}");
    let expected = format!("{}: was removed while the run writes it", metrics.display());
    assert!(matches!(&warnings[..], [text] if text.starts_with(&expected)), "{warnings:?}");
}
