//! Short English stories, made by a grammar: what the repository's own small model learns to
//! write. Their point is that words depend on earlier words, often of another sentence: who has
//! what after it was given away, how many are left, where a thing was hidden, who said which
//! words. A model without attention cannot tell them.
//!
//! A story is a pure function of setting, seed and number. The two settings share their grammar
//! and most words; [`Setting::Voyage`] is the new text that an adapted model must learn.

mod counting;
mod finding;
mod frame;
mod giving;
mod lexicon;
mod random;
mod sailing;
mod talking;
mod teller;
mod working;

use std::path::Path;

use crate::pending::{Pending, refuse_existing};
use crate::{Error, Result};

use lexicon::{VILLAGE, VOYAGE};
use random::Random;
use teller::{Person, Teller};

/// Words of the shortest story.
pub const FEWEST_WORDS: usize = 60;
/// Words of the longest story.
pub const MOST_WORDS: usize = 200;

/// What the stories are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Setting {
    /// Children in a village.
    #[default]
    Village,
    /// Children on a ship and among islands.
    Voyage,
}

/// Tells a story and returns its main person.
type Template = fn(&mut Teller, Setting) -> Person;

/// Told in both settings.
const SHARED: &[Template] = &[
    giving::gift_passed_on,
    giving::trade,
    giving::lent_and_returned,
    giving::mixed_up,
    giving::promise,
    counting::some_are_taken,
    counting::more_are_found,
    counting::shared_equally,
    counting::who_has_more,
    finding::hidden_thing,
    finding::lost_on_the_way,
    finding::lost_pet,
    finding::three_boxes,
    talking::message,
    talking::secret_word,
    talking::question_game,
    talking::letter,
    working::who_did_what,
    working::shopping_list,
    working::painted,
    working::race,
    working::tallest,
];

/// Told at sea only.
const SAILING: &[Template] = &[
    sailing::island_map,
    sailing::crew,
    sailing::bottle,
    sailing::storm,
    sailing::log_book,
    sailing::signals,
];

/// Story `number` of a seed: 60 to 200 words.
pub fn story(setting: Setting, seed: u64, number: u64) -> String {
    let (words, place) = match setting {
        Setting::Village => (&VILLAGE, 0),
        Setting::Voyage => (&VOYAGE, 1),
    };
    let mut teller = Teller::new(words, Random::new(&[seed, place, number]));
    let extra = if setting == Setting::Voyage { SAILING } else { &[] };
    let chosen = teller.below(SHARED.len() + extra.len());
    let template = SHARED.iter().chain(extra).nth(chosen).unwrap_or(&SHARED[0]);
    let who = template(&mut teller, setting);
    while teller.num_words() < FEWEST_WORDS {
        frame::linger(&mut teller, who);
    }
    teller.into_text()
}

/// Writes stories 0 to `count` of a seed as JSON lines, `{"text": ...}` each, and calls
/// `progress` with the number written and in all.
///
/// Fails when the file is there already and not to be overwritten, when it cannot be written, and
/// when `count` is 0.
pub fn write_stories(
    setting: Setting,
    seed: u64,
    count: u64,
    path: &Path,
    overwrite: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    if count == 0 {
        return Err(Error::Empty { reason: "no story: ask for at least one".to_owned() });
    }
    refuse_existing(path, overwrite)?;
    let mut file = Pending::create(path)?;
    for number in 0..count {
        let line = serde_json::json!({"text": story(setting, seed, number)});
        file.write(format!("{line}\n").as_bytes())?;
        progress(number + 1, count);
    }
    file.publish(overwrite)
}

#[cfg(test)]
mod tests;
