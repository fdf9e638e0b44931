//! Stories of work and play: who did what, what was forgotten, who came first, who is tallest.

use crate::Setting;
use crate::frame::{close, close_alone, meet, open};
use crate::story_builder::{Person, StoryBuilder, a, say};

/// Three people do three kinds of work; later somebody asks.
pub(crate) fn who_did_what(t: &mut StoryBuilder, setting: Setting) -> Person {
    let people = [t.person(), t.person(), t.person()];
    let jobs = [t.job(), t.job(), t.job()];
    let [one, two, three] = people;
    let [(first, first_do), (second, second_do), (third, third_do)] = jobs;
    let elder = t.elder();
    let food = t.food();
    open(t, setting, one);
    say!(
        t,
        "{one}, {two} and {three} wanted to help the {elder}.",
        "The {elder} had much work, so {one}, {two} and {three} came to help.",
    );
    say!(
        t,
        "\"Please {first_do}, {one},\" said the {elder}. \"{two}, please {second_do}. And you, {three}, please {third_do}.\"",
        "There was a lot to do: {first_do}, {second_do} and {third_do}.",
    );
    say!(
        t,
        "{one} {first}, {two} {second}, and {three} {third}.",
        "So {one} {first}. {two} {second}, and {three} {third}.",
    );
    t.paragraph();
    let asked = t.below(3);
    let (who, (past, _)) = (people[asked], jobs[asked]);
    say!(
        t,
        "When everything was done, the {elder} came back.",
        "In the evening the {elder} looked at their work.",
    );
    say!(
        t,
        "\"Who {past}?\" asked the {elder}. \"It was {who},\" said the others.",
        "\"That is good work,\" said the {elder}. \"Who {past}?\" \"I did,\" said {who}.",
    );
    let next = (asked + 1) % 3;
    let (other, (other_past, _)) = (people[next], jobs[next]);
    say!(
        t,
        "\"And what did you do, {other}?\" \"I {other_past},\" said {other}.",
        "\"And who {other_past}?\" \"{other} did,\" said {who}.",
    );
    say!(
        t,
        "The {elder} thanked {one}, {two} and {three} and gave them {food}.",
        "Then they all sat down and had some {food}.",
    );
    let last = people[(asked + 2) % 3];
    let (last_past, _) = jobs[(asked + 2) % 3];
    say!(
        t,
        "{last}, who {last_past}, got the most, for that was the hardest work.",
        "{last} was so tired that nobody asked who {last_past}.",
    );
    one
}

/// Three things are to be brought, and one is forgotten.
pub(crate) fn shopping_list(t: &mut StoryBuilder, setting: Setting) -> Person {
    let one = t.person();
    let foods = [t.food(), t.food(), t.food()];
    let [bread, soup, milk] = foods;
    let missing = t.below(3);
    let forgotten = foods[missing];
    let (kept, also) = (foods[(missing + 1) % 3], foods[(missing + 2) % 3]);
    let elder = t.elder();
    let place = t.place();
    let at = place.at;
    let (he, his, him) = (one.he, one.his, one.him);
    open(t, setting, one);
    say!(
        t,
        "\"Please get me {bread}, {soup} and {milk},\" said the {elder} to {one}.",
        "The {elder} needed three things: {bread}, {soup} and {milk}. {one} went to get them.",
    );
    say!(
        t,
        "\"{bread}, {soup}, {milk},\" said {one} all the way.",
        "{one} took a basket and went off at once.",
    );
    say!(
        t,
        "{at} {he} met {his} friends and stayed for a while.",
        "On the way {he} stopped {at} to look at the birds.",
    );
    say!(
        t,
        "Then {he} got the {kept} and the {also} and went back.",
        "{one} put the {also} and the {kept} into the basket.",
    );
    t.paragraph();
    say!(
        t,
        "\"Here is the {kept}, and here is the {also},\" said {one}.",
        "The {elder} looked into the basket and saw the {kept} and the {also}.",
    );
    say!(
        t,
        "\"But where is the {forgotten}?\" asked the {elder}.",
        "\"And the {forgotten}?\" asked the {elder}. {one} turned red.",
    );
    say!(
        t,
        "\"I forgot the {forgotten}!\" said {one}, and {he} ran back.",
        "{one} had forgotten the {forgotten}, so {he} had to go again.",
    );
    say!(
        t,
        "Soon {he} came back with the {forgotten}.",
        "This time {he} thought only of the {forgotten}, and {he} brought it.",
    );
    say!(
        t,
        "Now the {elder} had {bread}, {soup} and {milk}, and gave {him} some of each.",
        "\"{bread}, {soup} and {milk},\" said the {elder}. \"Now we can eat.\"",
    );
    close_alone(t, one);
    one
}

/// Things are painted, and their new colours matter.
pub(crate) fn painted(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let (first, second) = (t.noun(), t.noun());
    let (old, new, other) = (t.colour(), t.colour(), t.colour());
    let first_a = a(&format!("{old} {first}"));
    let second_a = a(&format!("{old} {second}"));
    let elder = t.elder();
    open(t, setting, one);
    say!(
        t,
        "{one} had {first_a}, and {two} had {second_a}.",
        "The {first} of {one} was {old}, and so was the {second} of {two}.",
    );
    say!(
        t,
        "\"I do not like {old} any more,\" said {one}.",
        "Everything was {old}, and they wanted other colours.",
    );
    say!(
        t,
        "The {elder} had some {new} paint and some {other} paint.",
        "They asked the {elder}, who gave them {new} paint and {other} paint.",
    );
    say!(
        t,
        "{one} took the {new} paint for the {first}, and {two} took the {other} paint for the {second}.",
        "So {one} painted the {first} {new}, and {two} painted the {second} {other}.",
    );
    t.paragraph();
    say!(t, "The next day everything was dry.", "They waited until the paint was dry.",);
    say!(
        t,
        "Now {one} had a {new} {first}, and {two} had a {other} {second}.",
        "The {first} was {new} now, and the {second} was {other}.",
    );
    say!(
        t,
        "\"Is that the {old} {first}?\" asked the {elder}. \"It was {old},\" said {one}, \"but now it is {new}.\"",
        "\"Where is your {old} {second}?\" asked the {elder}. \"Here it is,\" said {two}. \"It is {other} now.\"",
    );
    say!(
        t,
        "There was {new} paint on the nose of {one}, and {two} laughed about it.",
        "{two} had {other} paint on both hands, and {one} laughed about it.",
    );
    close(t, one, two);
    one
}

/// A race: the order at the end is asked for.
pub(crate) fn race(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let three = t.person();
    let runners = [one, two, three];
    let first = t.below(3);
    let second = (first + 1 + t.below(2)) % 3;
    let third = 3 - first - second;
    let (winner, next, last) = (runners[first], runners[second], runners[third]);
    let (start, end) = (t.place(), t.place());
    let prize = t.thing();
    let prize_a = a(&prize);
    let elder = t.elder();
    let (winner_he, last_he) = (winner.he, last.he);
    open(t, setting, one);
    say!(
        t,
        "{one}, {two} and {three} wanted to run a race from {start} to {end}.",
        "There was a race from {start} to {end}, and {one} ran against {two} and {three}.",
    );
    say!(
        t,
        "\"The winner gets {prize_a},\" said the {elder}.",
        "The {elder} held up {prize_a} for the winner.",
    );
    say!(
        t,
        "At first {last} was in front, but then {last_he} fell.",
        "{next} ran fast, but {winner} ran faster.",
        "\"One, two, three!\" called the {elder}, and they ran.",
    );
    say!(
        t,
        "{winner} came to {end} first, {next} was second, and {last} was third.",
        "First came {winner}, then {next}, and then {last}.",
    );
    t.paragraph();
    say!(
        t,
        "\"Who was first?\" asked the {elder}. \"{winner} was!\" said {last}.",
        "\"{winner} has won!\" called the {elder}.",
    );
    say!(
        t,
        "So {winner} got the {prize}.",
        "The {elder} gave the {prize} to {winner}, and {winner_he} was proud.",
    );
    say!(
        t,
        "\"And who was second?\" asked {winner}. \"I was,\" said {next}.",
        "\"I was behind {winner},\" said {next}, \"but in front of {last}.\"",
    );
    say!(
        t,
        "{last} was last, but {last_he} wanted to try again.",
        "\"Next time I will not be third,\" said {last}.",
    );
    close(t, winner, last);
    one
}

/// Three are compared in pairs, and the tallest follows.
pub(crate) fn tallest(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let three = t.person();
    let mut order = [one, two, three];
    let swap = t.below(3);
    order.swap(0, swap);
    if t.once_in(2) {
        order.swap(1, 2);
    }
    let [tall, middle, small] = order;
    let spot = t.spot();
    let thing = t.thing();
    let place = t.place();
    let at = place.at;
    let (tall_he, small_he) = (tall.he, small.he);
    open(t, setting, one);
    meet(t, one, two);
    say!(t, "With them was {three}.", "They often played with {three} {at}.",);
    if t.once_in(2) {
        say!(t, "{tall} was taller than {middle}.", "{middle} was not as tall as {tall}.");
        say!(t, "{middle} was taller than {small}.", "{small} was not as tall as {middle}.");
    } else {
        say!(t, "{small} was not as tall as {middle}.", "{middle} was taller than {small}.");
        say!(t, "But {tall} was taller than {middle}.", "{middle} was not as tall as {tall}.");
    }
    t.paragraph();
    say!(
        t,
        "One day they wanted to hang a {thing} on a high branch {at}.",
        "{at} a {thing} was stuck high up in a tree.",
    );
    say!(
        t,
        "\"Who is the tallest of us?\" asked {small}. \"{tall} is,\" said {middle}.",
        "\"{tall} must do it,\" said {small}, \"{tall} is the tallest.\"",
    );
    say!(
        t,
        "So {tall} stood up straight and reached the {thing}.",
        "{tall} could reach it, because {tall_he} was the tallest.",
    );
    say!(
        t,
        "Then they heard a mouse {spot}, where there was little room.",
        "After that a small ball rolled {spot}.",
    );
    say!(
        t,
        "\"Who is the smallest?\" asked {tall}. \"I am,\" said {small}.",
        "\"Now {small} must help,\" said {middle}, \"for {small} is the smallest.\"",
    );
    say!(
        t,
        "{small} looked {spot}, and {small_he} fitted in easily.",
        "So {small} went to look {spot}.",
    );
    close(t, tall, small);
    one
}
