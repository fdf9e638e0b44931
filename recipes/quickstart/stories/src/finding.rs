//! Stories of search: where a thing was put early decides where it is found late.

use crate::Setting;
use crate::frame::{close, close_alone, meet, open};
use crate::story_builder::{Person, StoryBuilder, a, say};

/// A thing is hidden, looked for in wrong places, and found.
pub(crate) fn hidden_thing(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let thing = t.thing();
    let thing_a = a(&thing);
    let (right, wrong, other) = (t.spot(), t.spot(), t.spot());
    let (one_he, one_his, two_he) = (one.he, one.his, two.he);
    open(t, setting, one);
    meet(t, one, two);
    say!(
        t,
        "{one} had {thing_a} and wanted to play a game.",
        "\"I will hide my {thing}, and you must find it, {two},\" said {one}.",
    );
    say!(
        t,
        "{two} closed both eyes, and {one} put the {thing} {right}.",
        "While {two} looked away, {one} hid the {thing} {right}.",
    );
    say!(
        t,
        "First {two} looked {wrong}, but it was not there.",
        "\"Is it {wrong}?\" asked {two}. \"No,\" said {one}.",
    );
    say!(
        t,
        "Then {two} looked {other}, and it was not there, either.",
        "\"Is it {other}?\" asked {two}. \"No,\" said {one}, and {one_he} laughed.",
    );
    t.paragraph();
    if t.once_in(2) {
        say!(
            t,
            "At last {two} looked {right}, and there was the {thing}.",
            "\"Then it must be {right}!\" said {two}, and {two_he} was right.",
        );
        say!(t, "{two} held up the {thing} and danced.", "\"I found your {thing}!\" cried {two}.",);
        say!(t, "Now it was the turn of {two} to hide it.", "\"Well done, {two},\" said {one}.");
    } else {
        say!(
            t,
            "{two} could not find it and gave up.",
            "\"I do not know where it is,\" said {two} after a while.",
        );
        say!(
            t,
            "\"It is {right},\" said {one}, and {one_he} took the {thing} out.",
            "{one} took {one_his} friend by the hand and showed the {thing} {right}.",
        );
        say!(
            t,
            "\"I looked {wrong} and {other},\" said {two}, \"but not {right}!\"",
            "\"Next time I will look {right} first,\" said {two}.",
        );
    }
    close(t, one, two);
    one
}

/// Something is lost on a way through three places, and the way is walked back.
pub(crate) fn lost_on_the_way(t: &mut StoryBuilder, setting: Setting) -> Person {
    let one = t.person();
    let thing = t.thing();
    let (first, second, third) = (t.place(), t.place(), t.place());
    let (first_at, second_at, third_at) = (&first.at, &second.at, &third.at);
    let elder = t.elder();
    let (he, his) = (one.he, one.his);
    open(t, setting, one);
    say!(
        t,
        "One day {one} took {his} {thing} and went for a walk.",
        "{one} never went out without {his} {thing}.",
    );
    say!(
        t,
        "First {he} was {first_at}, then {second_at}, and at last {third_at}.",
        "{he} went to {first}, from there to {second}, and then to {third}.",
    );
    say!(
        t,
        "When {he} came home, the {thing} was gone.",
        "In the evening {one} saw that {his} {thing} was missing.",
    );
    say!(
        t,
        "\"Where were you today?\" asked the {elder}.",
        "The {elder} saw {one} cry and asked, \"Where did you go?\"",
    );
    say!(
        t,
        "\"I was {first_at}, {second_at} and {third_at},\" said {one}.",
        "{one} thought and said, \"To {first}, to {second} and to {third}.\"",
    );
    t.paragraph();
    say!(
        t,
        "\"Then walk back, and begin with {third},\" said the {elder}.",
        "\"Go back the same way,\" said the {elder}. \"You came from {third}, so look there first.\"",
    );
    match t.below(3) {
        0 => {
            say!(
                t,
                "{he} did not have to go far: the {thing} lay {third_at}.",
                "And {third_at}, on the ground, {he} saw the {thing}.",
            );
        }
        1 => {
            say!(
                t,
                "It was not {third_at}, but {second_at} {one} found the {thing}.",
                "{third_at} there was nothing, so {he} went on to {second}, and there it was.",
            );
        }
        _ => {
            say!(
                t,
                "It was not {third_at}, and it was not {second_at}, but {first_at} {one} found it.",
                "{third_at} and {second_at} there was nothing, so {he} went back to {first}, and there it was.",
            );
        }
    }
    say!(
        t,
        "{one} took the {thing} and ran to the {elder}.",
        "\"I found my {thing}!\" {one} told the {elder}.",
    );
    close_alone(t, one);
    one
}

/// A pet runs away and comes when its name is called.
pub(crate) fn lost_pet(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let (animal, other) = (t.animal(), t.animal());
    let name = t.new_of(t.words.pet_names);
    let colour = t.colour();
    let colour_a = a(colour);
    let (place, wrong) = (t.place(), t.place());
    let (at, wrong_at) = (place.at, wrong.at);
    let (one_he, one_his) = (one.he, one.his);
    open(t, setting, one);
    say!(
        t,
        "{one} had {colour_a} {animal} called {name}.",
        "{one} had a pet, {colour_a} {animal}, and its name was {name}.",
    );
    say!(
        t,
        "Every morning {one} called, \"{name}!\" and the {animal} came.",
        "{name} liked to sit beside {one}.",
    );
    say!(
        t,
        "But one day the {animal} was gone.",
        "One morning {one} called, but no {animal} came.",
    );
    say!(
        t,
        "\"{two}, have you seen {name}?\" asked {one}.",
        "{one} ran to {two} and said, \"I cannot find {name}!\"",
    );
    say!(
        t,
        "\"What does {name} look like?\" asked {two}. \"{name} is {colour_a} {animal},\" said {one}.",
        "\"I have seen {colour_a} {animal} today,\" said {two}. \"Let us look.\"",
    );
    t.paragraph();
    say!(
        t,
        "They looked {wrong_at}, but they saw only an old {other}.",
        "{wrong_at} they met a {other}, but that was not {name}.",
    );
    say!(t, "Then they heard something {at}.", "Next they went to {place} and listened.",);
    say!(
        t,
        "\"{name}! {name}!\" called {one}, and out came the {colour} {animal}.",
        "{one} called the name of the {animal}: \"{name}!\"",
    );
    say!(
        t,
        "{name} jumped into the arms of {one}.",
        "There was {name}, and {one_he} was so glad that {one_he} cried.",
    );
    say!(
        t,
        "\"Stay with me, {name},\" said {one}.",
        "{one} never let {one_his} {animal} out of sight again.",
    );
    close(t, one, two);
    one
}

/// Three boxes hold three things; which is where is told first and needed last.
pub(crate) fn three_boxes(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let colours = [t.colour(), t.colour(), t.colour()];
    let things = [t.noun(), t.noun(), t.noun()];
    let [red, blue, green] = colours;
    let [hat, cup, book] = things.map(a);
    let wanted = t.below(3);
    let (colour, thing) = (colours[wanted], things[wanted]);
    let wrong = (wanted + 1 + t.below(2)) % 3;
    let (wrong_colour, wrong_thing) = (colours[wrong], a(things[wrong]));
    let elder = t.elder();
    open(t, setting, one);
    say!(
        t,
        "The {elder} had three boxes: a {red} one, a {blue} one and a {green} one.",
        "In the room of the {elder} stood a {red} box, a {blue} box and a {green} box.",
    );
    say!(
        t,
        "In the {red} box was {hat}, in the {blue} box was {cup}, and in the {green} box was {book}.",
        "The {red} box held {hat}, the {blue} one held {cup}, and the {green} one held {book}.",
    );
    say!(
        t,
        "{one} had seen what was inside, but {two} had not.",
        "{one} knew the boxes well, but {two} was there for the first time.",
    );
    t.paragraph();
    say!(
        t,
        "\"Please bring me the {thing},\" said the {elder} to {two}.",
        "One day the {elder} asked {two} for the {thing}.",
    );
    say!(
        t,
        "{two} opened the {wrong_colour} box, but in it was {wrong_thing}.",
        "First {two} looked into the {wrong_colour} box and saw {wrong_thing}.",
    );
    say!(
        t,
        "\"Which box is it, {one}?\" asked {two}.",
        "\"{one}, you know the boxes,\" said {two}. \"Help me!\"",
    );
    say!(
        t,
        "\"The {thing} is in the {colour} one,\" said {one}.",
        "{one} pointed at the {colour} box.",
    );
    say!(
        t,
        "So {two} opened the {colour} box and took out the {thing}.",
        "And in the {colour} box, there was the {thing}.",
    );
    say!(
        t,
        "The {elder} got the {thing} and thanked them both.",
        "\"That is the {thing} I wanted,\" said the {elder}.",
    );
    close(t, one, two);
    one
}
