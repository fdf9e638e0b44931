//! Values that begin with a hyphen: every option takes a negative number.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use support::options::take_negative_numbers;

mod support;

#[test]
fn every_option_takes_a_negative_number_for_its_value() {
    let dir = tempfile::tempdir().unwrap();
    let options = take_negative_numbers(env!("CARGO_BIN_EXE_moh-eval"), &[], dir.path());
    assert!(options >= 15, "{options}");
}
