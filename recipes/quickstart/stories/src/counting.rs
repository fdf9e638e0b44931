//! Stories with numbers: what is left, what it adds up to, and who has more.

use crate::Setting;
use crate::frame::{close, close_alone, meet, open};
use crate::story_builder::{Person, StoryBuilder, count, number, say, singular};

/// Some of the things are taken away, perhaps twice.
pub(crate) fn some_are_taken(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let things = t.counted();
    let total = t.between(4, 12);
    let given = t.between(1, total - 2);
    let left = total - given;
    let (all, some, rest) = (count(total, things), count(given, things), count(left, things));
    let (some_word, rest_word) = (number(given), number(left));
    let animal = t.animal();
    let place = t.place();
    let at = place.at;
    let (one_he, two_he) = (one.he, two.he);
    open(t, setting, one);
    say!(
        t,
        "{one} had {all} in a basket.",
        "{at} {one} found {all}.",
        "One morning {one} put {all} into a bag.",
    );
    say!(
        t,
        "Then {two} came, and {one} gave {two} {some}.",
        "{two} asked for some, so {one} gave away {some}.",
        "\"May I have some?\" asked {two}. {one} counted and gave {two} {some}.",
    );
    say!(
        t,
        "Now {one} had {rest} left.",
        "After that, {rest} were left for {one}.",
        "\"I had {all},\" said {one}. \"You took {some_word}, so I have {rest_word}.\"",
    );
    t.paragraph();
    if left > 2 && t.once_in(2) {
        let eaten = t.between(1, left - 1);
        let stolen = count(eaten, things);
        let (end, end_word) = (count(left - eaten, things), number(left - eaten));
        say!(
            t,
            "Later {one} fell asleep {at}, and a hungry {animal} carried off {stolen}.",
            "Then a {animal} ran past and took {stolen}.",
        );
        say!(
            t,
            "{one} counted again: only {end}!",
            "\"Where are my {things}?\" cried {one}. \"There were {rest_word}, and now there are {end_word}.\"",
        );
        say!(
            t,
            "\"The {animal} was here,\" said {two}, and {two_he} laughed.",
            "{two} had seen the {animal}, but it was too late.",
        );
        say!(
            t,
            "So {one} went home with {end}, and {two} went home with {some}.",
            "In the end {one} had {end}, {two} had {some}, and the {animal} had {stolen}.",
        );
    } else {
        say!(
            t,
            "{two} took {some} home, and {one} took {rest} home.",
            "In the evening {two} still had {some}, and {one} had {rest}.",
        );
        say!(
            t,
            "\"How many {things} did you have in the morning?\" asked the mother of {one}. \"{all},\" {one_he} said.",
            "\"How many did you give to {two}?\" asked the father of {one}. \"{some_word},\" {one_he} said. \"And I have {rest_word}.\"",
        );
    }
    close(t, one, two);
    one
}

/// A number grows.
pub(crate) fn more_are_found(t: &mut StoryBuilder, setting: Setting) -> Person {
    let one = t.person();
    let things = t.counted();
    // Two at least: the sentences speak of several.
    let (start, more) = (t.between(2, 7), t.between(2, 7));
    let sum = start + more;
    let (first, second, all) = (count(start, things), count(more, things), count(sum, things));
    let (start_word, more_word, sum_word) = (number(start), number(more), number(sum));
    let (here, there) = (t.place(), t.place());
    let (here_at, there_at) = (here.at, there.at);
    let elder = t.elder();
    let (he, his) = (one.he, one.his);
    open(t, setting, one);
    say!(
        t,
        "The {elder} needed {things}, and {one} wanted to help.",
        "\"Can you bring me some {things}?\" asked the {elder}. {one} nodded and went.",
    );
    say!(
        t,
        "{here_at} {one} found {first}.",
        "First {one} looked {here_at}, and there {he} found {first}.",
    );
    say!(
        t,
        "Then {he} went on, and {there_at} {he} found {second} more.",
        "{there_at} {he} found {second}.",
    );
    t.paragraph();
    say!(
        t,
        "{one} put everything together and counted: {start_word} and {more_word} make {sum_word}.",
        "\"{start_word} and {more_word},\" said {one}, \"that makes {sum_word}!\"",
    );
    say!(t, "{one} brought {all} to the {elder}.", "The {elder} was surprised to see {all}.",);
    say!(
        t,
        "\"Where did you find them?\" asked the {elder}.",
        "\"So many {things}!\" said the {elder}. \"Where were they?\"",
    );
    say!(
        t,
        "\"{first} were {here_at}, and {second} were {there_at},\" said {one}.",
        "{one} said that {first} came from {here} and {second} from {there}.",
    );
    say!(
        t,
        "The {elder} took the {things} and gave {one} a hug.",
        "The {elder} thanked {one} for the {sum_word} {things}, and {he} ran back to {his} friends.",
    );
    close_alone(t, one);
    one
}

/// Two or three share, and everybody gets the same.
pub(crate) fn shared_equally(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let three = t.person();
    let things = t.counted();
    let each = t.between(1, 4);
    let in_three = t.once_in(2);
    let total = each * if in_three { 3 } else { 2 };
    let (all, part) = (count(total, things), count(each, things));
    let each_word = number(each);
    let place = t.place();
    let at = place.at;
    open(t, setting, one);
    meet(t, one, two);
    say!(t, "{at} they found a bag with {all} in it.", "Together they picked {all} {at}.",);
    if in_three {
        say!(
            t,
            "Just then {three} came by and looked at the {things}.",
            "\"{three} helped us yesterday,\" said {two}. \"{three} must have some as well.\"",
        );
        say!(
            t,
            "So there were three children and {all}.",
            "\"We are three,\" said {one}, \"and we have {all}.\"",
        );
        t.paragraph();
        say!(
            t,
            "Each of the three got {part}: {each_word} for {one}, {each_word} for {two} and {each_word} for {three}.",
            "{one} got {part}, {two} got {part}, and {three} got {part}.",
        );
        say!(
            t,
            "{three} had not hoped for so much and thanked {one} and {two}.",
            "\"Thank you, {one}! Thank you, {two}!\" said {three}.",
        );
    } else {
        say!(
            t,
            "\"We are two,\" said {two}, \"and we have {all}.\"",
            "{two} wanted to share them, and so did {one}.",
        );
        t.paragraph();
        say!(
            t,
            "Each of them got {part}: {each_word} for {one} and {each_word} for {two}.",
            "{one} got {part}, and {two} got {part}.",
        );
        say!(
            t,
            "{three} saw them and asked, \"How many did you find?\" \"{all},\" said {two}.",
            "Nobody had more, and nobody had less.",
        );
    }
    say!(
        t,
        "That was fair, because {one} and {two} both had {each_word}.",
        "\"{each_word} for everybody,\" said {two}. \"That is fair.\"",
    );
    let one_thing = singular(things);
    say!(
        t,
        "{one} kept one {one_thing} for a long time.",
        "They sat down {at} and looked at their {things}.",
    );
    close(t, one, two);
    one
}

/// Two people compare.
pub(crate) fn who_has_more(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let things = t.counted();
    let fewer = t.between(1, 6);
    let gap = t.between(1, 4);
    let one_wins = t.once_in(2);
    let (winner, loser) = if one_wins { (one, two) } else { (two, one) };
    let many = count(fewer + gap, things);
    let few = count(fewer, things);
    let (of_one, of_two) = if one_wins { (&many, &few) } else { (&few, &many) };
    let gap_word = number(gap);
    let (loser_he, winner_his) = (loser.he, winner.his);
    let (here, there) = (t.place(), t.place());
    let (here_at, there_at) = (here.at, there.at);
    open(t, setting, one);
    meet(t, one, two);
    say!(
        t,
        "\"Let us see who finds more {things},\" said {two}.",
        "They wanted to know who could find more {things}.",
    );
    say!(
        t,
        "{one} looked {here_at}, and {two} looked {there_at}.",
        "So {one} went to {here}, and {two} went to {there}.",
    );
    say!(
        t,
        "{one} came back with {of_one}, and {two} came back with {of_two}.",
        "After an hour {two} had {of_two}, and {one} had {of_one}.",
    );
    t.paragraph();
    say!(
        t,
        "\"{winner} has more,\" said {loser}.",
        "{winner} had {gap_word} more than {loser}.",
        "So {winner} had won.",
    );
    say!(
        t,
        "{loser} had only {few}, but {loser_he} was not sad.",
        "\"I have {few},\" said {loser}, \"and you have {many}.\"",
    );
    say!(
        t,
        "\"Where did you find {many}?\" asked {loser}.",
        "{loser} asked {winner} about the place.",
    );
    let winner_at = if one_wins { &here_at } else { &there_at };
    say!(
        t,
        "\"I was {winner_at},\" said {winner}, and {winner} showed {winner_his} friend the way.",
        "{winner} said that all {many} had been {winner_at}.",
    );
    close(t, winner, loser);
    one
}
