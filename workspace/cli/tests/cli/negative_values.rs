//! Values that begin with a hyphen: every option takes a negative number.

use moh_testkit::options::take_negative_numbers;

#[test]
fn every_option_takes_a_negative_number_for_its_value() {
    let dir = tempfile::tempdir().unwrap();
    let options = take_negative_numbers(env!("CARGO_BIN_EXE_moh-eval"), &[], dir.path());
    assert!(options >= 15, "{options}");
}
