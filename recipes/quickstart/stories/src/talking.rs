//! Stories of speech: what was said is repeated, word for word, to somebody else.

use crate::Setting;
use crate::frame::{close, close_alone, meet, open};
use crate::lexicon::DAYS;
use crate::story_builder::{Person, StoryBuilder, a, say};

/// A message is carried from one to another.
pub(crate) fn message(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let elder = t.elder();
    let thing = t.thing();
    let spot = t.spot();
    let (way, place) = (t.place(), t.place());
    let (way_at, at) = (way.at, place.at);
    let animal = t.animal();
    let animal_a = a(animal);
    let (one_he, two_his) = (one.he, two.his);
    open(t, setting, one);
    say!(
        t,
        "\"{one}, please find {two} and say that the {thing} is {spot},\" said the {elder}.",
        "The {elder} said, \"Tell {two} that the {thing} is {spot}.\"",
    );
    say!(
        t,
        "\"The {thing} is {spot},\" said {one} again and again, so as not to forget it.",
        "{one} nodded and ran off.",
    );
    say!(
        t,
        "{way_at} {one} met {animal_a} and played with it for a while.",
        "On the way {one} saw {animal_a} {way_at}, but {one_he} did not stop.",
        "{way_at} {one_he} fell down, but {one_he} got up again.",
    );
    say!(t, "{at} {one} found {two}.", "{two} was {at}, busy with {two_his} work.");
    t.paragraph();
    say!(
        t,
        "\"The {elder} sends me,\" said {one}. \"The {thing} is {spot}.\"",
        "\"{two}, the {thing} is {spot},\" said {one}. \"The {elder} told me.\"",
    );
    say!(
        t,
        "\"Who told you?\" asked {two}. \"The {elder},\" said {one}.",
        "\"I looked everywhere for the {thing}!\" said {two}.",
    );
    say!(
        t,
        "{two} ran and looked {spot}, and there it was.",
        "They went together, and {spot} they found the {thing}.",
    );
    say!(
        t,
        "{two} took the {thing} to the {elder}.",
        "\"Thank you, {one},\" said {two}, and held the {thing} tight.",
    );
    close(t, one, two);
    one
}

/// A secret word opens a door.
pub(crate) fn secret_word(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let word = t.new_of(t.words.counted);
    let wrong = t.new_of(t.words.counted);
    let colour = t.colour();
    let food = t.food();
    let place = t.place();
    let at = place.at;
    let (one_he, two_he, two_him) = (one.he, two.he, two.him);
    open(t, setting, one);
    say!(
        t,
        "{one} and {two} had a secret room {at}.",
        "{at} there was a small room, and only {one} and {two} knew it.",
    );
    say!(
        t,
        "Its door was {colour}, and to come in you had to say a word.",
        "It had a {colour} door and a secret word.",
    );
    say!(
        t,
        "\"The word is {word},\" said {one}. \"Do not forget it!\"",
        "The secret word was \"{word}\".",
    );
    say!(
        t,
        "{two} said it three times: \"{word}, {word}, {word}.\"",
        "\"{word},\" said {two}. \"That is easy.\"",
    );
    t.paragraph();
    say!(
        t,
        "The next day {two} knocked at the {colour} door.",
        "That evening {two} stood in front of the {colour} door.",
    );
    say!(
        t,
        "\"What is the word?\" asked {one}.",
        "\"Who is there, and what is the word?\" called {one}."
    );
    if t.once_in(2) {
        say!(
            t,
            "\"Is it {wrong}?\" asked {two}. \"No,\" said {one}, \"it is not {wrong}.\"",
            "\"{wrong}!\" said {two}. But the door stayed closed.",
        );
        say!(
            t,
            "{two} thought hard, and then {two_he} knew it.",
            "Then {two} remembered what {one} had said.",
        );
    }
    say!(
        t,
        "\"{word},\" said {two}, and the door opened.",
        "\"The word is {word}!\" said {two}, and {one} let {two_him} in.",
    );
    say!(
        t,
        "Inside they ate {food} and told stories.",
        "{one} had brought some {food}, and {one_he} shared it with {two}.",
    );
    say!(
        t,
        "Nobody else ever learned the word {word}.",
        "Behind the {colour} door they were safe from the rain.",
    );
    close(t, one, two);
    one
}

/// A riddle about things that the story has described.
pub(crate) fn question_game(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let (animal, other) = (t.animal(), t.animal());
    let (colour, other_colour) = (t.colour(), t.colour());
    let (place, other_place) = (t.place(), t.place());
    let (at, other_at) = (place.at, other_place.at);
    let (animal_a, other_a) =
        (a(&format!("{colour} {animal}")), a(&format!("{other_colour} {other}")));
    let ask_first = t.once_in(2);
    let (asked, asked_colour, asked_at) =
        if ask_first { (animal, colour, &at) } else { (other, other_colour, &other_at) };
    let (one_he, two_he) = (one.he, two.he);
    open(t, setting, one);
    meet(t, one, two);
    say!(
        t,
        "One morning they saw {animal_a} {at} and {other_a} {other_at}.",
        "{at} they saw {animal_a}, and {other_at} they saw {other_a}.",
    );
    say!(
        t,
        "The {animal} looked at them, and the {other} ran away.",
        "The {other} was bigger than the {animal}.",
        "They watched the {animal} for an hour, and then they watched the {other}.",
    );
    t.paragraph();
    say!(
        t,
        "At home {two} said, \"Let us see what you remember, {one}.\"",
        "In the evening {two} wanted to play a game with questions.",
    );
    say!(
        t,
        "\"What colour was the {asked}?\" asked {two}. \"It was {asked_colour},\" said {one}.",
        "\"Was the {asked} {colour} or {other_colour}?\" asked {two}. \"{asked_colour},\" said {one}.",
    );
    say!(
        t,
        "\"And where was it?\" \"It was {asked_at},\" said {one}.",
        "\"Where did we see it?\" asked {two}, and {one_he} said, \"It was {asked_at}.\"",
    );
    say!(
        t,
        "\"That is right,\" said {two}, and {two_he} clapped.",
        "\"You know everything, {one}!\" said {two}.",
    );
    let (rest, rest_colour) = if ask_first { (other, other_colour) } else { (animal, colour) };
    say!(
        t,
        "\"And the {rest} was {rest_colour},\" said {one}.",
        "Then {one} asked about the {rest}, and {two} said that it was {rest_colour}.",
    );
    close(t, one, two);
    one
}

/// A letter says something, and its reader repeats it.
pub(crate) fn letter(t: &mut StoryBuilder, setting: Setting) -> Person {
    let one = t.person();
    let two = t.person();
    let day = t.new_of(DAYS);
    let place = t.place();
    let at = place.at;
    let thing = t.thing();
    let thing_a = a(&thing);
    let elder = t.elder();
    let (he, his, two_he) = (one.he, one.his, two.he);
    open(t, setting, one);
    say!(
        t,
        "One day a letter came from {two}.",
        "The {elder} brought {one} a letter. It was from {two}.",
    );
    say!(
        t,
        "\"Dear {one},\" it said, \"meet me {at} on {day}, and bring {thing_a}. Your friend {two}.\"",
        "It said, \"Come on {day}, {one}. I will be {at}. I need {thing_a}. {two}\"",
    );
    say!(
        t,
        "{one} read the letter twice.",
        "{one} was glad, because {two} had been away for a long time.",
    );
    say!(
        t,
        "\"What does {two} write?\" asked {his} mother.",
        "\"Who is it from?\" asked {his} father. \"It is from {two},\" said {one}.",
    );
    t.paragraph();
    say!(
        t,
        "\"On {day} I must be {at},\" said {one}, \"with {thing_a}.\"",
        "\"I must find {thing_a} before {day},\" said {one}.",
    );
    say!(
        t,
        "The {elder} had a {thing} and gave it to {one}.",
        "{one} looked for a long time, and then {he} had {thing_a}.",
    );
    say!(
        t,
        "When {day} came, {one} took the {thing} and went to {place}.",
        "So on {day} {one} was {at}, and {he} had the {thing}.",
    );
    say!(
        t,
        "\"{one}! You got my letter,\" said {two}, \"and you have the {thing}!\"",
        "There stood {two}, and {two_he} laughed when {two_he} saw the {thing}.",
    );
    if t.once_in(2) {
        close(t, one, two);
    } else {
        close_alone(t, one);
    }
    one
}
