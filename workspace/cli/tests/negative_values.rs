//! Values that begin with a hyphen: every option takes a negative number, and says what it expects.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use support::options::take_negative_numbers;
use support::{program, stderr};

mod support;

#[test]
fn every_option_takes_a_negative_number_for_its_value() {
    let dir = tempfile::tempdir().unwrap();
    for (program, at_least) in
        [(env!("CARGO_BIN_EXE_moh-train"), 15), (env!("CARGO_BIN_EXE_moh-eval"), 15)]
    {
        let options = take_negative_numbers(program, &[], dir.path());
        assert!(options >= at_least, "{program}: {options}");
    }
}

#[test]
fn an_error_names_the_values_that_an_option_takes() {
    let dir = tempfile::tempdir().unwrap();
    let train = env!("CARGO_BIN_EXE_moh-train");
    for (arguments, expected) in [
        (&["--resume-step", "-1"][..], "a whole number of at least 1"),
        (&["--rendezvous-timeout", "-1"], "a whole number from 1 to 2592000"),
        (&["--time-limit", "-1h"], "expected a time such as 90m"),
        (&["checkpoints", "run", "prune", "--keep", "-1"], "a whole number of at least 1"),
    ] {
        let output = program(train, dir.path()).args(arguments).output().unwrap();
        let text = stderr(&output);
        assert!(text.contains(expected), "{arguments:?}: {text}");
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
    }
}
