//! What all templates share: openings, meetings, endings, and sentences that lengthen a short
//! story.

use crate::Setting;
use crate::lexicon::{COLOURS, DAYS};
use crate::story_builder::{Person, StoryBuilder, number, say};

/// Introduces the first person.
pub(crate) fn open(t: &mut StoryBuilder, setting: Setting, who: Person) {
    let (kind, he) = (who.kind, who.he);
    let weather = t.any(t.words.weather);
    let day = t.new_of(DAYS);
    match setting {
        Setting::Village => say!(
            t,
            "Once upon a time there was a {kind} named {who}.",
            "In a small village lived a {kind} named {who}.",
            "{who} was a little {kind} who lived near the hills.",
            "It was {day}, and a {kind} named {who} was up early.",
            "There once was a {kind} whose name was {who}.",
        ),
        Setting::Voyage => {
            let colour = t.any(COLOURS);
            let days = number(t.between(2, 12));
            say!(
                t,
                "On a ship with {colour} sails there was a {kind} named {who}.",
                "The ship was {days} days from land when {who}, the youngest {kind} on board, woke up.",
                "A {kind} named {who} had sailed to the islands with the crew.",
                "It was {day} at sea, and a {kind} named {who} was up early.",
                "After {days} days of sailing, a {kind} named {who} saw land.",
            );
        }
    }
    if t.once_in(2) {
        say!(t, "{weather}.", "{weather}, and {he} was glad to be outside.");
    }
}

/// Introduces a second person.
pub(crate) fn meet(t: &mut StoryBuilder, who: Person, friend: Person) {
    let (his, kind) = (who.his, friend.kind);
    say!(
        t,
        "{his} best friend was a {kind} named {friend}.",
        "{who} had a friend named {friend}.",
        "{who} often played with {friend}, a {kind} of the same age.",
        "a {kind} named {friend} was there, too.",
    );
}

/// A last sentence about two people.
pub(crate) fn close(t: &mut StoryBuilder, one: Person, other: Person) {
    say!(
        t,
        "{one} and {other} were happy, and they went home together.",
        "{one} smiled, and {other} smiled, too.",
        "It had been a good day for {one} and {other}.",
        "{one} thanked {other}, and they stayed friends.",
        "From that day on, {one} and {other} were the best of friends.",
    );
}

/// A last sentence about one person.
pub(crate) fn close_alone(t: &mut StoryBuilder, who: Person) {
    let (he, his) = (who.he, who.his);
    say!(
        t,
        "{who} was happy and slept well that night.",
        "{who} told {his} mother all about it before {he} went to bed.",
        "That was the best day {who} had ever had.",
        "{who} laughed, and then {he} went home to eat.",
    );
}

/// Makes a short story a little longer.
pub(crate) fn linger(t: &mut StoryBuilder, who: Person) {
    let (he, his) = (who.he, who.his);
    let food = t.food();
    say!(
        t,
        "In the evening {who} ate some {food} and thought about it all.",
        "Later {who} drank some warm milk and told {his} father what had happened.",
        "Before {he} fell asleep, {who} thought of it once more.",
        "When {who} told the story at home, everybody wanted to hear it twice.",
    );
}
