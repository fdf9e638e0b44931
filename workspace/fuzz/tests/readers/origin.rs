//! The card or README of a model that is converted or trained further.

use moh_fuzz::Target;
use moh_hf::model_card::{of_origin, text};
use moh_hf::{Base, ConfigFile, Origin};

use crate::{ALLOCATOR, outcome, repository};

#[test]
fn a_mutated_card_gives_a_card_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("README.md");
    let config = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes/quickstart");
    let config = ConfigFile::read(&config).unwrap().config;
    let origin = Origin {
        bases: vec![Base { name: "org/name".to_owned(), is_hub_id: true }],
        licence: vec![("license", "llama3".to_owned())],
        made: vec!["`moh-train` did.".to_owned()],
        ..Origin::default()
    };
    let seeds = [
        text(&origin, &config).into_bytes(),
        of_origin(&origin).into_bytes(),
        repository("README.md"),
    ];
    let target = Target { name: "origin", seeds: &seeds, memory: 16 << 20, allocator: &ALLOCATOR };
    target.run(|input| {
        std::fs::write(&path, input).unwrap();
        let read = Origin::read(Some("other"), dir.path());
        if let Ok(origin) = &read {
            // What is read of anyone's file is fit for a card.
            let card = text(origin, &config);
            std::fs::write(&path, card).unwrap();
            let again = Origin::read(None, dir.path()).unwrap();
            assert_eq!((&again.licence, &again.bases), (&origin.licence, &origin.bases));
        }
        outcome(read)
    });
}
