//! `--watch`: a page that is rewritten while its run continues.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::{PROGRAM, check, empty, step, write_run};
use moh_testkit::programs::{program, success};

const REFRESH: &str = "<meta http-equiv=\"refresh\" content=\"5\">";
const SUMMARY: &str = r#"{"steps":2,"tokens":1234,"heads":8,"evaluations":[],"calibrations":[]}"#;

/// Starts to watch the directory `run` in `dir`, and waits until its first page is written.
fn watch(dir: &Path) -> Child {
    let mut child =
        program(PROGRAM, dir).args(["--watch", "run"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "run/report.html\n");
    child
}

fn page(dir: &Path) -> String {
    let page = fs::read_to_string(dir.join("run/report.html")).unwrap();
    check(&page);
    page
}

#[test]
fn a_watched_page_is_written_again_until_its_run_has_finished() {
    let dir = empty();
    write_run(dir.path(), "run", &[step("adapt", 1, 64)]);
    let mut watching = watch(dir.path());
    let first = page(dir.path());
    assert!(first.contains(REFRESH) && !first.contains(">1234</td>"), "{first}");
    write_run(dir.path(), "run", &[step("adapt", 1, 64), step("adapt", 2, 1234)]);
    fs::write(dir.path().join("run/summary.json"), SUMMARY).unwrap();
    assert_eq!(watching.wait().unwrap().code(), Some(0));
    let last = page(dir.path());
    assert!(last.contains(">1234</td>") && !last.contains("http-equiv=\"refresh\""), "{last}");
    // A finished run has a single page.
    let shown = success(program(PROGRAM, dir.path()).args(["--watch", "run"]));
    assert_eq!(shown, "run/report.html\nrun/run.svg\n");
    assert!(!page(dir.path()).contains("http-equiv=\"refresh\""));
}

#[test]
fn a_signal_ends_watching_with_a_page_that_stays() {
    let dir = empty();
    write_run(dir.path(), "run", &[step("adapt", 1, 64)]);
    for signal in ["-INT", "-TERM"] {
        let mut watching = watch(dir.path());
        assert!(page(dir.path()).contains(REFRESH));
        let killed = Command::new("kill").args([signal, &watching.id().to_string()]).status();
        assert!(killed.unwrap().success());
        assert_eq!(watching.wait().unwrap().code(), Some(0));
        assert!(!page(dir.path()).contains("http-equiv=\"refresh\""));
    }
}
