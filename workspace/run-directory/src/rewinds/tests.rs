use moh_checkpoint::RunState;
use moh_step::guard::GuardState;

use super::*;
use crate::ranks_on_threads::ranks_on_threads;

const SMALL: &str = include_str!("../../../recipe/src/tests/small.toml");

fn rewind(number: u64, step: u64, samples: [u64; 2]) -> Rewind {
    let skipped_steps = [step + 5, step + 6];
    Rewind { number, step, skipped_steps, samples, attempt: 1, initial: false }
}

fn list(rewinds: &[Rewind]) -> Rewinds {
    Rewinds { list: rewinds.to_vec() }
}

/// The small recipe: 8 steps of 4 sequences in each of two stages.
fn recipe(distance: u64) -> Recipe {
    let overrides = [format!("guard.rewind={distance}")];
    Recipe::parse(SMALL, Path::new("recipe.toml"), &overrides).unwrap()
}

fn state(step: u64, in_a_row: u64, sample: u64) -> RunState {
    let guard = GuardState { in_a_row, ..GuardState::default() };
    RunState { step, sample, guard, ..RunState::default() }
}

#[test]
fn samples_are_passed_over_after_the_step_once() {
    let rewinds = list(&[rewind(1, 100, [400, 449]), rewind(2, 200, [850, 899])]);
    assert_eq!(rewinds.due(100, 0).unwrap().number, 1);
    assert_eq!(rewinds.due(100, 1), None);
    assert_eq!(rewinds.due(99, 0), None);
    assert_eq!(rewinds.due(200, 1).unwrap().number, 2);
    assert_eq!(rewinds.num_samples(), 100);
    let taken = [50, 100, 101, 200, 201].map(|step| rewinds.taken_before(step));
    assert_eq!(taken, [0, 0, 1, 1, 2]);
}

#[test]
fn a_rewind_to_an_earlier_step_replaces_those_after_it() {
    let rewinds = list(&[
        rewind(1, 100, [400, 449]),
        rewind(2, 200, [850, 899]),
        rewind(3, 100, [400, 999]),
        rewind(4, 150, [1200, 1299]),
    ]);
    assert_eq!(rewinds.due(100, 0).unwrap().number, 3);
    assert_eq!(rewinds.due(200, 1), None);
    assert_eq!(rewinds.num_samples(), 700);
    let taken = [100, 150, 151].map(|step| rewinds.taken_before(step));
    assert_eq!(taken, [0, 3, 4]);
}

#[test]
fn the_next_rewind_is_before_the_first_step_that_was_not_applied() {
    let run = RunDirectory::new("run");
    let none = Rewinds::default();
    let next = none.next(&recipe(3), &run, &state(12, 3, 48)).unwrap();
    // Steps 10 to 12; step 7 is of the first stage, after 28 samples.
    let expected = Rewind { samples: [28, 47], skipped_steps: [10, 12], ..rewind(1, 7, [0, 0]) };
    assert_eq!(next, expected);
    let next = none.next(&recipe(100), &run, &state(12, 3, 48)).unwrap();
    assert_eq!((next.step, next.samples), (0, [0, 47]));
}

#[test]
fn the_same_place_is_left_further_back_and_then_given_up() {
    let run = RunDirectory::new("run");
    let mut rewinds = Rewinds::default();
    let mut steps = Vec::new();
    for sample in [48, 80, 120] {
        let next = rewinds.next(&recipe(3), &run, &state(12, 3, sample)).unwrap();
        assert_eq!(next.samples, [next.step * 4, sample - 1]);
        steps.push((next.number, next.attempt, next.step));
        rewinds.list.push(next);
    }
    assert_eq!(steps, [(1, 1, 7), (2, 2, 4), (3, 3, 1)]);
    let error = rewinds.next(&recipe(3), &run, &state(15, 3, 130)).unwrap_err();
    assert!(error.to_string().contains("steps 13 to 15"), "{error}");
    // Another place, beyond the distance, and its samples after those that were passed over.
    let next = rewinds.next(&recipe(2), &run, &state(16, 1, 200)).unwrap();
    assert_eq!((next.attempt, next.step), (1, 14));
    assert_eq!(next.samples, [14 * 4 + 116, 199]);
}

#[test]
fn all_ranks_have_what_the_first_one_reads() {
    let found = ranks_on_threads(3, |ranks| {
        let directory = tempfile::tempdir().unwrap();
        let run = RunDirectory::new(directory.path());
        if ranks.is_first() {
            list(&[rewind(1, 100, [400, 449])]).append(rewind(2, 200, [850, 899]), &run).unwrap();
        }
        Rewinds::shared(&run, ranks).unwrap()
    });
    let expected = list(&[rewind(1, 100, [400, 449]), rewind(2, 200, [850, 899])]);
    assert!(found.iter().all(|found| *found == expected));
}

#[test]
fn the_file_reads_back_and_is_replaced_as_a_whole() {
    let directory = tempfile::tempdir().unwrap();
    let run = RunDirectory::new(directory.path());
    assert_eq!(Rewinds::read(&run).unwrap(), Rewinds::default());
    let (first, second) = (rewind(1, 100, [400, 449]), rewind(2, 200, [850, 899]));
    Rewinds::default().append(first, &run).unwrap();
    assert_eq!(Rewinds::read(&run).unwrap(), list(&[first]));
    list(&[first]).append(second, &run).unwrap();
    assert_eq!(Rewinds::read(&run).unwrap(), list(&[first, second]));
    let text = std::fs::read_to_string(run.rewinds()).unwrap();
    let line = "{\"number\":1,\"step\":100,\"skipped_steps\":[105,106],\"samples\":[400,449],\
                \"attempt\":1,\"initial\":false}\n";
    assert!(text.starts_with(line), "{text}");
}

#[test]
fn hostile_files_are_refused_by_line() {
    let directory = tempfile::tempdir().unwrap();
    let run = RunDirectory::new(directory.path());
    Rewinds::default().append(rewind(1, 100, [400, 449]), &run).unwrap();
    let good = std::fs::read(run.rewinds()).unwrap();
    let text = String::from_utf8(good.clone()).unwrap();
    let huge = "[".repeat(1 << 20);
    for second in [
        &text[..text.len() / 2],
        text.trim_end(),
        &text,
        "null\n",
        "\n",
        "\u{0}\n",
        &huge[..10_000],
        &text.replace("\"number\":1", "\"number\":-2"),
        &text.replace("\"number\":1", "\"number\":2").replace("[400,449]", "[450,449]"),
        &text.replace("\"number\":1", "\"number\":2").replace("449", "18446744073709551615"),
        &text.replace("\"number\":1", "\"number\":2").replace("\"step\":100", "\"step\":105"),
        &text.replace("\"number\":1", "\"number\":2,\"more\":1"),
    ] {
        std::fs::write(run.rewinds(), [&good, second.as_bytes()].concat()).unwrap();
        let error = Rewinds::read(&run).unwrap_err();
        assert!(
            matches!(error, Error::RunLog(moh_run_log::Error::JsonLine { line: 2, .. })),
            "{second:?}: {error}"
        );
    }
    std::fs::write(run.rewinds(), huge + "]").unwrap();
    assert!(Rewinds::read(&run).unwrap_err().to_string().contains("at most"), "too long");
}
