//! Directories that contain runs: the runs in them, and the directories that are omitted.

use std::fs;
use std::time::{Duration, SystemTime};

use super::{PROGRAM, check, empty, step, write_run};
use moh_testkit::programs::{failure, program, stderr, stdout};

#[test]
fn the_runs_of_a_directory_are_compared() {
    let dir = empty();
    let runs = dir.path().join("runs");
    for (name, loss) in [("second", 3.0), ("first", 2.0)] {
        let mut line = step("adapt", 1, 64);
        line["loss"] = loss.into();
        write_run(&runs, name, &[line]);
    }
    // A run below the second level, a damaged run, and a file.
    write_run(&runs.join("older"), "deep", &[step("adapt", 1, 64)]);
    write_run(&runs, "torn", &[step("adapt", 1, 64)]);
    fs::write(runs.join("torn/summary.json"), "<b>").unwrap();
    fs::write(runs.join("notes.txt"), "").unwrap();
    let output = program(PROGRAM, dir.path()).arg("runs").output().unwrap();
    let warnings = stderr(&output);
    assert_eq!(stdout(&output), "runs/report.html\n", "{warnings}");
    let page = fs::read_to_string(runs.join("report.html")).unwrap();
    check(&page);
    assert!(page.contains("<h1>2 runs</h1>") && page.contains("<title>first, second - moh-report"));
    let remark = "left out of runs, as not run directories: older";
    assert!(page.contains(remark) && warnings.contains(remark), "{warnings}");
    assert!(page.contains("left out: runs/torn/summary.json: "), "{page}");
    assert!(warnings.contains("warning: left out: runs/torn/summary.json: "), "{warnings}");
    assert_eq!(warnings.lines().count(), 2, "{warnings}");
    assert!(!page.contains("deep") && !page.contains("notes.txt"));
    // The directory's own page is replaced, and a run directory is a run, whatever else it contains.
    write_run(&runs.join("first"), "inner", &[step("adapt", 1, 64)]);
    for (path, title) in [("runs", "<h1>2 runs</h1>"), ("runs/first", "<h1>Run first</h1>")] {
        assert!(program(PROGRAM, dir.path()).arg(path).status().unwrap().success());
        assert!(
            fs::read_to_string(dir.path().join(path).join("report.html")).unwrap().contains(title)
        );
    }
}

#[test]
fn the_newest_of_many_runs_are_compared() {
    let dir = empty();
    let now = SystemTime::now();
    for number in 0..45 {
        let name = format!("run-{number:02}");
        write_run(dir.path(), &name, &[step("adapt", 1, 64)]);
        let file =
            fs::File::options().append(true).open(dir.path().join(name).join("metrics.jsonl"));
        file.unwrap().set_modified(now - Duration::from_secs(100 * number)).unwrap();
    }
    let output = program(PROGRAM, dir.path()).arg(".").output().unwrap();
    let page = fs::read_to_string(dir.path().join("report.html")).unwrap();
    check(&page);
    assert!(page.contains("<h1>20 runs</h1>"), "{}", stderr(&output));
    let named: Vec<String> = (20..28).map(|number| format!("run-{number}")).collect();
    let remark = format!(
        "left out of ., as older than the newest 20 runs: {} and 17 more",
        named.join(", ")
    );
    assert!(page.contains(&remark) && stderr(&output).contains(&remark), "{}", stderr(&output));
    assert!(page.contains("run-19") && !page.contains("run-28"));
}

#[test]
fn a_directory_without_a_run_that_can_be_read_is_one_sentence() {
    let dir = empty();
    fs::create_dir_all(dir.path().join("runs/notes")).unwrap();
    let error = failure(dir.path(), program(PROGRAM, dir.path()).arg("runs"), 1);
    assert!(
        error.starts_with("runs: is not a run directory") && error.contains("holds none"),
        "{error}"
    );
    write_run(&dir.path().join("runs"), "torn", &[]);
    fs::write(dir.path().join("runs/torn/summary.json"), "[").unwrap();
    let error = failure(dir.path(), program(PROGRAM, dir.path()).arg("runs"), 1);
    let expected = "runs: none of its runs can be read: runs/torn/summary.json: ";
    assert!(error.starts_with(expected), "{error}");
}
