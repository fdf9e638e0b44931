//! Invariants of every story, and of the stream of stories.

use std::collections::{BTreeSet, HashSet};

use super::*;

fn many(setting: Setting) -> Vec<String> {
    (0..4000).map(|number| story(setting, 7, number)).collect()
}

#[test]
fn lengths_are_within_their_limits() {
    for setting in [Setting::Village, Setting::Voyage] {
        for text in many(setting) {
            let words = text.split_whitespace().count();
            assert!((MIN_WORDS..=MAX_WORDS).contains(&words), "{words}: {text}");
        }
    }
}

#[test]
fn text_is_clean() {
    for setting in [Setting::Village, Setting::Voyage] {
        for text in many(setting) {
            assert!(text.is_ascii() && !text.contains(['{', '}', '\\']), "{text}");
            for wrong in ["  ", " .", " ,", "..", "one leaves", "a an ", " an b", " a e", " a o"] {
                assert!(!text.contains(wrong), "{wrong:?} in {text}");
            }
            assert_eq!(text.matches('"').count() % 2, 0, "{text}");
            for plural in VILLAGE.counted.iter().chain(VOYAGE.counted) {
                let one = format!("one {}", story_builder::singular(plural)).to_lowercase();
                for verb in ["were", "are"] {
                    assert!(!text.to_lowercase().contains(&format!("{one} {verb}")), "{text}");
                }
            }
            for line in text.lines() {
                assert!(line.ends_with(['.', '!', '?', '"']), "{line}");
                let first = line.trim_start_matches('"').chars().next().unwrap();
                assert!(first.is_uppercase(), "{line}");
            }
        }
    }
}

#[test]
fn sentences_start_with_a_capital() {
    for text in many(Setting::Voyage).iter().chain(&many(Setting::Village)) {
        let joined = text.replace('\n', " ");
        for end in [". ", "! ", "? "] {
            for rest in joined.split(end).skip(1) {
                let first = rest.trim_start_matches('"').chars().next().unwrap();
                assert!(first.is_uppercase(), "{rest:?} in {text}");
            }
        }
    }
}

#[test]
fn a_story_depends_on_seed_and_number_alone() {
    let backwards: Vec<String> =
        (0..50).rev().map(|number| story(Setting::Village, 3, number)).collect();
    let forwards: Vec<String> = (0..50).map(|number| story(Setting::Village, 3, number)).collect();
    assert!(backwards.iter().rev().eq(&forwards));
    assert_ne!(story(Setting::Village, 3, 0), story(Setting::Village, 4, 0));
    assert_ne!(story(Setting::Village, 3, 0), story(Setting::Voyage, 3, 0));
}

#[test]
fn stories_differ() {
    for setting in [Setting::Village, Setting::Voyage] {
        let texts = many(setting);
        let different: HashSet<&String> = texts.iter().collect();
        assert_eq!(different.len(), texts.len());
    }
}

#[test]
fn the_vocabulary_is_small_and_mostly_shared() {
    let words = |setting| -> BTreeSet<String> {
        many(setting)
            .iter()
            .flat_map(|text| text.split(|letter: char| !letter.is_alphabetic()))
            .map(str::to_lowercase)
            .collect()
    };
    let (village, voyage) = (words(Setting::Village), words(Setting::Voyage));
    let shared = village.intersection(&voyage).count();
    assert!((400..1200).contains(&village.len()), "{}", village.len());
    assert!((400..1200).contains(&voyage.len()), "{}", voyage.len());
    assert!(shared * 10 > voyage.len() * 6, "{shared} of {}", voyage.len());
    assert!(shared * 10 < voyage.len() * 9, "{shared} of {}", voyage.len());
}

#[test]
fn what_is_left_is_what_was_there_without_what_was_given() {
    let number_of = |word: &str| lexicon::NUMBERS.iter().position(|name| *name == word);
    let mut checked = 0;
    for text in many(Setting::Village) {
        // "I had nine apples," said Ben. "You took four, so I have five."
        let Some((before, after)) = text.split_once(". \"You took ") else {
            continue;
        };
        let had = before.rsplit_once("\"I had ").unwrap().1.split(' ').next().unwrap();
        let (took, rest) = after.split_once(", so I have ").unwrap();
        let left = rest.split('.').next().unwrap();
        let [had, took, left] = [had, took, left].map(|word| number_of(word).unwrap());
        assert_eq!(had - took, left, "{text}");
        checked += 1;
    }
    assert!(checked > 10);
}
