//! Short English stories, made by a grammar: what the repository's own small model learns to
//! write. Their point is that words depend on earlier words, often of another sentence: who has
//! what after it was given away, how many are left, where a thing was hidden, who said which
//! words. A model without attention cannot tell them.
//!
//!     cargo run --release --bin stories -- --seed 1 --count 2000 --setting village >village.jsonl
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
mod story_builder;
mod talking;
mod working;

use std::io::{BufWriter, Result, Write, stdout};

use clap::{Parser, ValueEnum};
use lexicon::{VILLAGE, VOYAGE};
use random::Random;
use story_builder::{Person, StoryBuilder};

/// Minimum words of a story.
const MIN_WORDS: usize = 60;
/// Maximum words of a story.
#[cfg(test)]
const MAX_WORDS: usize = 200;

/// The setting of a story.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Setting {
    /// Children in a village
    Village,
    /// Children on a ship and among islands: new text for a model trained on the village
    Voyage,
}

/// Write short English stories, JSON lines with the field text, to train a small model on.
#[derive(Parser)]
struct Arguments {
    /// Seed; the same seed gives the same stories
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Number of stories
    #[arg(long)]
    count: u64,
    /// Setting of the stories
    #[arg(long, value_enum, default_value_t = Setting::Village)]
    setting: Setting,
}

fn main() -> Result<()> {
    let Arguments { seed, count, setting } = Arguments::parse();
    let mut out = BufWriter::new(stdout().lock());
    for number in 0..count {
        writeln!(out, "{}", serde_json::json!({ "text": story(setting, seed, number) }))?;
    }
    out.flush()
}

/// Tells a story and returns its main person.
type Template = fn(&mut StoryBuilder, Setting) -> Person;

/// Templates of both settings.
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

/// Templates of the voyage only.
const SAILING: &[Template] = &[
    sailing::island_map,
    sailing::crew,
    sailing::bottle,
    sailing::storm,
    sailing::log_book,
    sailing::signals,
];

/// Story `number` of a seed: 60 to 200 words.
fn story(setting: Setting, seed: u64, number: u64) -> String {
    let (words, place) = match setting {
        Setting::Village => (&VILLAGE, 0),
        Setting::Voyage => (&VOYAGE, 1),
    };
    let mut story = StoryBuilder::new(words, Random::new(&[seed, place, number]));
    let extra = if setting == Setting::Voyage { SAILING } else { &[] };
    let chosen = story.below(SHARED.len() + extra.len());
    let template = SHARED.iter().chain(extra).nth(chosen).unwrap_or(&SHARED[0]);
    let who = template(&mut story, setting);
    while story.num_words() < MIN_WORDS {
        frame::linger(&mut story, who);
    }
    story.into_text()
}

#[cfg(test)]
mod tests;
