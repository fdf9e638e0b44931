//! The README of a model that is converted or trained further.

use std::path::Path;

use moh_hf::{ConfigFile, ModelCard};

use crate::{outcome, repository, target};

#[test]
fn a_mutated_readme_gives_a_card() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("README.md");
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/quickstart");
    let config = ConfigFile::read(&config).unwrap().config;
    let card = ModelCard {
        source: Some("name".to_owned()),
        base_models: vec!["org/name".to_owned(), "org/other".to_owned()],
        licence: vec![("license", "llama3".to_owned())],
        made: vec!["`moh-train` did.".to_owned()],
        ..ModelCard::default()
    };
    let seeds =
        [card.text(&config).into_bytes(), card.kept_readme().into_bytes(), repository("README.md")];
    target("model_card", &seeds, 16).run(|input| {
        std::fs::write(&path, input).unwrap();
        let read = || ModelCard::of_source(Path::new("other"), dir.path());
        let found = read();
        if let Ok(card) = &found {
            // Values from an untrusted file are valid in a card.
            std::fs::write(&path, card.text(&config)).unwrap();
            assert_eq!(read().unwrap(), *card);
        }
        outcome(found)
    });
}
