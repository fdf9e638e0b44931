//! Stories in which things change hands: who has what at the end follows from who gave what.

use crate::Setting;
use crate::frame::{close, meet, open};
use crate::lexicon::DAYS;
use crate::story_builder::{Person, StoryBuilder, a, say};

/// A thing goes from hand to hand.
pub(crate) fn gift_passed_on(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let three = t.person();
    let thing = t.thing();
    let (thing_a, noun) = (a(&thing), thing.split(' ').next_back().unwrap_or("thing"));
    let (place, later) = (t.place(), t.place());
    let (at, later_at) = (place.at, later.at);
    let (one_he, two_he, two_his) = (one.he, two.he, two.his);
    open(t, setting, one);
    meet(t, one, two);
    say!(
        t,
        "One day {one} found {thing_a} {at}.",
        "{one} had {thing_a}, and {one_he} took it everywhere.",
        "{one} got {thing_a} from the people {at}.",
    );
    say!(
        t,
        "{one} gave the {thing} to {two}.",
        "\"This is for you, {two},\" said {one}, and {one_he} gave the {noun} to {two}.",
        "But {two} liked it so much that {one} gave {two} the {thing}.",
    );
    say!(
        t,
        "{two} was glad and held the {noun} in both hands.",
        "{two} said, \"Thank you, {one}! I always wanted {thing_a}.\"",
        "{two} took the {noun} to {later} and showed it to everybody.",
    );
    t.paragraph();
    if t.once_in(3) {
        say!(
            t,
            "The next day {three} asked, \"{two}, where did you get that {thing}?\"",
            "Then {three} came by and asked about the {thing}.",
        );
        say!(
            t,
            "\"{one} gave it to me,\" said {two}.",
            "{two} answered that {one} had given it away.",
        );
        say!(t, "So the {thing} stayed with {two}.", "{two} kept the {thing} for many years.");
    } else {
        say!(
            t,
            "The next day {two} met {three}, who was sad and sat alone {later_at}.",
            "Then {two} saw {three}, who had nothing to play with.",
        );
        say!(
            t,
            "{two} thought for a while, and then {two_he} gave the {thing} to {three}.",
            "So {two} gave {three} the {noun} that came from {one}.",
        );
        say!(
            t,
            "\"Who has the {noun} now?\" asked {one}. \"{three} has it,\" said {two}.",
            "When {one} asked {two} about the {noun}, {two} said, \"{three} has it now.\"",
        );
        say!(
            t,
            "{one} was not angry, for {three} was happy with the {thing}.",
            "\"Good,\" said {one}. \"{three} needs the {thing} more than we do.\"",
            "{three} never lost the {thing}, and {two} kept {two_his} new friend.",
        );
    }
    close(t, one, two);
    one
}

/// Two people swap things.
pub(crate) fn trade(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let (first, second) = (t.thing(), t.thing());
    let (first_a, second_a) = (a(&first), a(&second));
    let place = t.place();
    let at = place.at;
    let (one_he, one_his, two_his) = (one.he, one.his, two.his);
    open(t, setting, one);
    say!(
        t,
        "{one} had {first_a}, but {one_he} wanted something else.",
        "The only thing {one} owned was {first_a}.",
        "{one} carried {first_a} under {one_his} arm.",
    );
    say!(
        t,
        "{at} {one} met {two}, who had {second_a}.",
        "{two} sat {at} with {second_a}.",
        "One morning {two} came by with {second_a}.",
    );
    say!(
        t,
        "\"That is a fine {second},\" said {one}. \"And I like your {first},\" said {two}.",
        "{one} looked at the {second}, and {two} looked at the {first}.",
    );
    say!(
        t,
        "\"Shall we trade?\" asked {two}. \"Yes, {two},\" said {one}.",
        "\"Let us trade, {two},\" said {one}, and {two} agreed.",
    );
    t.paragraph();
    say!(
        t,
        "So {one} gave {two} the {first} and got the {second}.",
        "{two} took the {first}, and {one} took the {second}.",
    );
    if t.once_in(3) {
        say!(
            t,
            "But at night {one} missed the {first}, and {two} missed the {second}.",
            "The next day {two} was sorry, because the {second} had been a gift from {two_his} mother.",
        );
        say!(t, "They met again {at} and traded back.", "So they gave everything back {at}.");
        say!(
            t,
            "Now {one} had the {first} again, and {two} had the {second}.",
            "In the end {two} had the {second}, just as before, and {one} had the {first}.",
        );
    } else {
        say!(
            t,
            "Now {one} had the {second}, and {two} had the {first}.",
            "{two} ran home with the {first}, and {one} ran home with the {second}.",
        );
        say!(
            t,
            "\"Where is your {first}?\" asked {one_his} mother. \"{two} has it,\" said {one}. \"I have {second_a} now.\"",
            "When {one_his} father asked about the {first}, {one} showed the {second} and said, \"I traded with {two}.\"",
        );
    }
    close(t, one, two);
    one
}

/// A thing is lent, and comes back.
pub(crate) fn lent_and_returned(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let thing = t.thing();
    let place = t.place();
    let at = place.at;
    let (from, until) = (t.new_of(DAYS), t.new_of(DAYS));
    let (one_he, two_he, two_him) = (one.he, two.he, two.him);
    open(t, setting, one);
    meet(t, one, two);
    say!(
        t,
        "On {from} {two} asked, \"{one}, may I borrow your {thing}?\"",
        "{two} needed the {thing} that belonged to {one}, and on {from} {two_he} asked for it.",
    );
    say!(
        t,
        "\"Yes, but I need it back on {until},\" said {one}.",
        "{one} said, \"You may have it until {until}.\"",
    );
    say!(
        t,
        "\"Then I will bring it back on {until},\" said {two}.",
        "{two} promised to bring it back on {until}.",
    );
    say!(
        t,
        "{two} took the {thing} and used it {at}.",
        "All day {two} worked with the {thing} {at}.",
    );
    t.paragraph();
    say!(
        t,
        "When {until} came, {two} had forgotten where the {thing} was.",
        "Then {until} came, and {one} waited for {two}.",
        "Soon it was {until}, and {two} looked for the {thing}.",
    );
    say!(
        t,
        "It was still {at}, so {two} ran there and took it.",
        "{two} had left it {at}, and {two_he} ran to get it.",
    );
    say!(
        t,
        "\"Here is your {thing}, {one},\" said {two}.",
        "{two} gave the {thing} back to {one}.",
    );
    say!(
        t,
        "\"It is {until}, and you kept your word,\" said {one}, and {one_he} thanked {two_him}.",
        "\"You promised to come on {until}, and you came,\" said {one}.",
    );
    close(t, one, two);
    one
}

/// Two things are mixed up, and each goes back to its owner.
pub(crate) fn mixed_up(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let noun = t.noun();
    let (first, second) = (t.colour(), t.colour());
    let (first_a, second_a) = (a(first), a(second));
    let elder = t.elder();
    let place = t.place();
    let at = place.at;
    let (one_his, two_his) = (one.his, two.his);
    open(t, setting, one);
    meet(t, one, two);
    say!(
        t,
        "{one} had {first_a} {noun}, and {two} had {second_a} one.",
        "The {noun} of {one} was {first}, and the {noun} of {two} was {second}.",
        "Each of them had a {noun}: the one of {one} was {first}, the one of {two} was {second}.",
    );
    say!(t, "They left both {at} and went to eat.", "{at} they put both down and ran a race.",);
    say!(
        t,
        "Then the {elder} came and took both to a dry place.",
        "When they came back, both were gone.",
    );
    t.paragraph();
    say!(
        t,
        "\"I have found a {first} one and a {second} one,\" said the {elder}. \"Whose are they?\"",
        "The {elder} held them up and asked, \"Which one is yours?\"",
    );
    if t.once_in(2) {
        say!(
            t,
            "\"The {first} one is mine,\" said {one}. \"And the {second} one is mine,\" said {two}.",
            "{one} pointed at the {first} one, and {two} pointed at the {second} one.",
        );
    } else {
        say!(
            t,
            "\"Mine is {second},\" said {two}. \"And mine is {first},\" said {one}.",
            "{two} asked for the {second} one, so the {first} one was left for {one}.",
        );
    }
    say!(
        t,
        "So {one} got the {first} {noun} back, and {two} got the {second} {noun}.",
        "The {elder} gave the {second} {noun} to {two} and the {first} {noun} to {one}.",
    );
    say!(
        t,
        "{one} wrote {one_his} name on the {first} {noun}, and {two} wrote {two_his} name on the {second} one.",
        "They never mixed them up again.",
    );
    close(t, one, two);
    one
}

/// A promise of a thing is kept.
pub(crate) fn promise(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let thing = t.thing();
    let thing_a = a(&thing);
    let day = t.new_of(DAYS);
    let (food, place) = (t.food(), t.place());
    let at = place.at;
    let (one_he, two_he, two_him) = (one.he, two.he, two.him);
    open(t, setting, one);
    say!(
        t,
        "{two} was ill and had to stay in bed.",
        "{two}, a good friend of {one}, had hurt a foot and could not walk.",
    );
    say!(
        t,
        "\"What would you like, {two}?\" asked {one}.",
        "{one} went to see {two} and asked, \"What can I bring you?\"",
    );
    say!(
        t,
        "\"I would like {thing_a} and some {food},\" said {two}.",
        "{two} wished for some {food} and {thing_a}.",
    );
    say!(
        t,
        "\"I will bring them on {day},\" promised {one}.",
        "{one} promised to come back on {day}.",
    );
    t.paragraph();
    say!(
        t,
        "First {one} asked for the {food}, and then {one_he} found the {thing} {at}.",
        "The {thing} was easy to find, it lay {at}, but the {food} had to be made first.",
    );
    say!(
        t,
        "On {day} {one} stood at the bed of {two}.",
        "When {day} came, {one} went back to {two}.",
    );
    say!(
        t,
        "\"Here is the {thing}, and here is the {food},\" said {one}.",
        "{one} had the {food} in one hand and the {thing} in the other.",
    );
    say!(
        t,
        "{two} ate the {food} and put the {thing} beside the bed.",
        "\"You remembered the {thing} and the {food}!\" said {two}.",
    );
    say!(
        t,
        "Soon {two} could walk again, and {one} was the first to visit {two_him}.",
        "The {food} helped, and after two days {two_he} was well.",
    );
    close(t, one, two);
    one
}
