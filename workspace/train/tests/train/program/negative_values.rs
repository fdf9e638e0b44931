//! Values that begin with a hyphen: every option takes a negative number, and says what it expects.

use super::PROGRAM;
use moh_testkit::options::take_negative_numbers;
use moh_testkit::programs::{exits, program};

#[test]
fn every_option_takes_a_negative_number_for_its_value() {
    let dir = tempfile::tempdir().unwrap();
    let options = take_negative_numbers(PROGRAM, &[], dir.path());
    assert!(options >= 15, "{options}");
}

#[test]
fn an_error_names_the_values_that_an_option_takes() {
    let dir = tempfile::tempdir().unwrap();
    for (arguments, expected) in [
        (&["--resume-step", "-1"][..], "a whole number of at least 1"),
        (&["--rendezvous-timeout", "-1"], "a whole number from 1 to 2592000"),
        (&["--plan", "--ranks", "0"], "'--ranks <N>': must be a whole number of at least 1"),
        (&["--trace", "last"], "\"last\": expected steps, as in 3,10-12"),
        (&["--time-limit", "-1h"], "expected a time such as 90m"),
        (&["checkpoints", "run", "prune", "--keep", "-1"], "a whole number of at least 1"),
    ] {
        let (_, text) = exits(program(PROGRAM, dir.path()).args(arguments), 2);
        assert!(text.contains(expected), "{arguments:?}: {text}");
    }
}
