//! The README shows the example of the crate's front page, which is compiled and run.

#![allow(clippy::unwrap_used)]

use std::path::Path;

/// Returns the lines of the example that a reader sees.
fn example(source: &str) -> String {
    let page = source.lines().map_while(|line| line.strip_prefix("//!"));
    let code = page.skip_while(|line| line.trim() != "```").skip(1);
    let code = code.take_while(|line| line.trim() != "```").map(|line| line.trim_start());
    let seen = code.filter(|line| !line.starts_with('#'));
    seen.map(|line| if line.is_empty() { "\n".into() } else { format!("    {line}\n") }).collect()
}

#[test]
fn the_readme_shows_the_example_that_is_tested() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let example = example(&std::fs::read_to_string(here.join("src/lib.rs")).unwrap());
    assert!(example.lines().count() >= 10, "{example}");
    let readme = std::fs::read_to_string(here.join("../../README.md")).unwrap();
    assert!(readme.contains(&example), "README.md does not have these lines:\n{example}");
}
