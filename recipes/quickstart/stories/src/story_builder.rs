//! Builds a story: selects unused words, tracks pronouns and joins sentences to a text. The
//! templates define the plot.

use std::fmt;

use crate::lexicon::{COLOURS, Lexicon, NUMBERS};
use crate::random::Random;

/// Adds one of several sentences, with variables as in `format!`.
macro_rules! say {
    ($story:expr, $($line:literal),+ $(,)?) => {{
        let lines = [$(format!($line)),+];
        $story.add_one_of(&lines);
    }};
}
pub(crate) use say;

/// A person with pronouns. Displays as the name.
#[derive(Clone, Copy)]
pub(crate) struct Person {
    pub(crate) name: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) he: &'static str,
    pub(crate) him: &'static str,
    pub(crate) his: &'static str,
}

impl fmt::Display for Person {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name)
    }
}

/// A place. Displays with its article; `at` includes the preposition.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) at: At,
}

/// A location: "in the garden".
#[derive(Clone, Copy)]
pub(crate) struct At {
    preposition: &'static str,
    name: &'static str,
}

impl fmt::Display for At {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}", self.preposition, self.name)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.at.name)
    }
}

/// A story being built.
pub(crate) struct StoryBuilder {
    pub(crate) words: &'static Lexicon,
    random: Random,
    used: Vec<&'static str>,
    text: String,
    /// The next sentence starts a paragraph.
    fresh: bool,
}

impl StoryBuilder {
    pub(crate) fn new(words: &'static Lexicon, random: Random) -> Self {
        Self { words, random, used: Vec::new(), text: String::new(), fresh: true }
    }

    /// The number of words of the text.
    pub(crate) fn num_words(&self) -> usize {
        self.text.split_whitespace().count()
    }

    pub(crate) fn into_text(self) -> String {
        self.text
    }

    /// A random integer below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.random.below(n)
    }

    /// A random integer from `low` to `high`, both included.
    pub(crate) fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high + 1 - low)
    }

    /// True with probability 1 / `n`.
    pub(crate) fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// A random element of a list.
    pub(crate) fn any<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.random.below(list.len())]
    }

    /// A random element of a list that this story has not used yet.
    pub(crate) fn new_of(&mut self, list: &[&'static str]) -> &'static str {
        let mut at = self.random.below(list.len());
        // Lists are longer than any template needs; otherwise a word would repeat.
        for _ in 0..list.len() {
            if !self.used.contains(&list[at]) {
                break;
            }
            at = (at + 1) % list.len();
        }
        self.used.push(list[at]);
        list[at]
    }

    pub(crate) fn girl(&mut self) -> Person {
        let name = self.new_of(self.words.girls);
        Person { name, kind: "girl", he: "she", him: "her", his: "her" }
    }

    pub(crate) fn boy(&mut self) -> Person {
        let name = self.new_of(self.words.boys);
        Person { name, kind: "boy", he: "he", him: "him", his: "his" }
    }

    pub(crate) fn person(&mut self) -> Person {
        if self.once_in(2) { self.girl() } else { self.boy() }
    }

    /// A girl and a boy in random order, so that pronouns tell them apart.
    pub(crate) fn pair(&mut self) -> (Person, Person) {
        let (girl, boy) = (self.girl(), self.boy());
        if self.once_in(2) { (girl, boy) } else { (boy, girl) }
    }

    /// A thing with a colour, without an article: "red ball".
    pub(crate) fn thing(&mut self) -> String {
        let colour = self.new_of(COLOURS);
        let noun = self.new_of(self.words.things);
        format!("{colour} {noun}")
    }

    pub(crate) fn noun(&mut self) -> &'static str {
        self.new_of(self.words.things)
    }

    pub(crate) fn colour(&mut self) -> &'static str {
        self.new_of(COLOURS)
    }

    pub(crate) fn counted(&mut self) -> &'static str {
        self.new_of(self.words.counted)
    }

    pub(crate) fn spot(&mut self) -> &'static str {
        self.new_of(self.words.spots)
    }

    pub(crate) fn animal(&mut self) -> &'static str {
        self.new_of(self.words.animals)
    }

    pub(crate) fn elder(&mut self) -> &'static str {
        self.new_of(self.words.elders)
    }

    pub(crate) fn food(&mut self) -> &'static str {
        self.new_of(self.words.foods)
    }

    pub(crate) fn place(&mut self) -> Place {
        let names: Vec<_> = self.words.places.iter().map(|place| place.1).collect();
        let name = self.new_of(&names);
        let found = self.words.places.iter().find(|place| place.1 == name);
        let preposition = found.map_or("at", |place| place.0);
        Place { at: At { preposition, name } }
    }

    /// Work, as told ("swept the floor") and as asked for ("sweep the floor").
    pub(crate) fn job(&mut self) -> (&'static str, &'static str) {
        let told: Vec<_> = self.words.jobs.iter().map(|job| job.0).collect();
        let past = self.new_of(&told);
        let found = self.words.jobs.iter().find(|job| job.0 == past);
        (past, found.map_or(past, |job| job.1))
    }

    /// Adds one of these sentences.
    pub(crate) fn add_one_of(&mut self, lines: &[String]) {
        let line = &lines[self.random.below(lines.len())];
        if !self.text.is_empty() {
            self.text.push(if self.fresh { '\n' } else { ' ' });
        }
        self.fresh = false;
        self.text.push_str(&raised(&with_articles(line)));
    }

    /// Starts a new paragraph.
    pub(crate) fn paragraph(&mut self) {
        self.fresh = true;
    }
}

/// A noun phrase with its indefinite article; [`with_articles`] corrects it to "an".
pub(crate) fn a(phrase: &str) -> String {
    format!("a {phrase}")
}

/// Replaces "a" by "an" before vowels.
fn with_articles(line: &str) -> String {
    let mut text = String::with_capacity(line.len() + 8);
    let mut words = line.split(' ').peekable();
    while let Some(word) = words.next() {
        text.push_str(word);
        let Some(next) = words.peek() else { break };
        let article = word.trim_start_matches('"').eq_ignore_ascii_case("a");
        if article && next.starts_with(['a', 'e', 'i', 'o', 'u']) {
            text.push('n');
        }
        text.push(' ');
    }
    text
}

/// Capitalises the start of each sentence, quoted ones included.
fn raised(line: &str) -> String {
    let mut text = String::with_capacity(line.len());
    // A letter is capitalised at the start and after the end of a sentence. A question or an
    // exclamation in quotes may continue in lower case: "Where?" asked Ben.
    let mut raise = true;
    for letter in line.chars() {
        if letter == '"' {
            // A quote after a quote opens the next speaker's sentence.
            raise |= text.ends_with("?\" ") || text.ends_with("!\" ");
        }
        if letter == ' ' {
            raise |= text.ends_with(['.', '!', '?']) || text.ends_with(".\"");
        }
        if raise && letter.is_alphabetic() {
            text.extend(letter.to_uppercase());
            raise = false;
        } else {
            text.push(letter);
        }
    }
    text
}

/// A counted noun: "three eggs", "one egg", "no eggs".
pub(crate) fn count(number: usize, plural: &str) -> String {
    let word = NUMBERS.get(number).copied().unwrap_or("many");
    if number == 1 { format!("one {}", singular(plural)) } else { format!("{word} {plural}") }
}

/// The number in words.
pub(crate) fn number(number: usize) -> &'static str {
    NUMBERS.get(number).copied().unwrap_or("many")
}

/// One of the counted things.
pub(crate) fn singular(plural: &str) -> &str {
    if plural == "leaves" { "leaf" } else { plural.strip_suffix('s').unwrap_or(plural) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn articles_fit_the_next_word() {
        assert_eq!(
            with_articles("a owl saw \"a egg\" and a hen"),
            "an owl saw \"an egg\" and a hen"
        );
    }

    #[test]
    fn sentences_are_raised_and_questions_go_on() {
        assert_eq!(
            raised(
                "\"six?\" asked Ben. \"no,\" said Ida. \"how?\" \"so!\" he sat. \"i.\" she ran."
            ),
            "\"Six?\" asked Ben. \"No,\" said Ida. \"How?\" \"So!\" he sat. \"I.\" She ran."
        );
    }
}
