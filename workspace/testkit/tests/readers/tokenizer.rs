//! `tokenizer.json`.

use moh_testkit::fuzz::Target;
use moh_text::TextTokenizer;

use crate::{ALLOCATOR, outcome, repository};

#[test]
fn a_mutated_tokenizer_is_read_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    let target = Target {
        name: "tokenizer",
        seeds: &[repository("recipes/quickstart/tokenizer.json")],
        memory: 64 << 20,
        allocator: &ALLOCATOR,
    };
    target.run(|input| {
        std::fs::write(&path, input).unwrap();
        let tokenizer = TextTokenizer::load(&path).map_err(|error| error.to_string())?;
        outcome(tokenizer.encode("One day, a boat."))
    });
}
