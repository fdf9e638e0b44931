//! Stories that only the voyage has: maps, crews, storms, bottles, log books and signals.

use crate::Setting;
use crate::frame::{close, close_alone, open};
use crate::lexicon::DAYS;
use crate::story_builder::{Person, StoryBuilder, a, count, number, say};

/// A map gives three steps, which are then followed.
pub(crate) fn island_map(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let steps = [t.between(3, 12), t.between(3, 12)].map(number);
    let [far, near] = steps;
    let (rock, tree) = (t.colour(), t.colour());
    let treasure = t.counted();
    let amount = t.between(2, 12);
    let found = count(amount, treasure);
    let one_his = one.his;
    open(t, setting, one);
    say!(t, "{one} had an old map of the island.", "In a chest {one} found an old map.",);
    say!(
        t,
        "\"Walk {far} steps north from the {rock} rock,\" it said, \"then {near} steps east to the {tree} tree.\"",
        "The map said: from the {rock} rock {far} steps north, and from there {near} steps east to a {tree} tree.",
    );
    say!(
        t,
        "\"Come with me, {two}!\" said {one}, and they went ashore.",
        "{one} showed it to {two}, and they took the small boat to the island.",
    );
    t.paragraph();
    say!(
        t,
        "They soon found the {rock} rock.",
        "\"There is the rock, and it is {rock}!\" said {two}.",
    );
    say!(
        t,
        "{one} counted {far} steps north.",
        "\"How many steps north?\" asked {two}. \"{far},\" said {one}.",
    );
    say!(
        t,
        "Then they went {near} steps east, and there stood the {tree} tree.",
        "\"And now {near} steps east,\" said {one}, and they came to the {tree} tree.",
    );
    say!(
        t,
        "Under the {tree} tree they found {found}.",
        "{two} dug under the tree and found {found}.",
    );
    say!(
        t,
        "{one} put the {treasure} into {one_his} bag and the map back into the chest.",
        "\"{found}!\" cried {two}. \"The map was right.\"",
    );
    close(t, one, two);
    one
}

/// Everybody on board has a place; in the fog each is called by it.
pub(crate) fn crew(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let three = t.person();
    let places = [t.place(), t.place(), t.place()].map(|place| place.at);
    let [here, there, yonder] = &places;
    let thing = t.thing();
    let asked = t.below(3);
    let (who, at) = ([one, two, three][asked], &places[asked]);
    let he = who.he;
    open(t, setting, one);
    say!(
        t,
        "\"{one}, you wait {here},\" said the captain. \"{two}, you wait {there}, and {three} waits {yonder}.\"",
        "The captain sent {one} to wait {here}, {two} to wait {there} and {three} to wait {yonder}.",
    );
    say!(t, "They did as they were told.", "\"Yes, captain!\" said all three.");
    say!(
        t,
        "Then the fog came, and nobody could see the others.",
        "It grew dark, and soon nobody could see anything.",
    );
    t.paragraph();
    say!(
        t,
        "\"I need the {thing},\" said the captain. \"{who} has it.\"",
        "The captain asked for the {thing}, which {who} had.",
    );
    say!(
        t,
        "\"Where is {who}?\" asked the cook. \"{who} is {at},\" said the captain.",
        "\"I sent {who} to wait {at},\" said the captain to the cook.",
    );
    say!(
        t,
        "So the cook went with a lamp and found {who} {at}.",
        "The cook looked {at}, and there was {who}.",
    );
    say!(
        t,
        "{who} gave the cook the {thing}, and {he} stayed where {he} was.",
        "\"Take the {thing} to the captain,\" said {who}.",
    );
    say!(
        t,
        "When the fog was gone, {one} was still {here}, {two} {there}, and {three} {yonder}.",
        "In the morning they all came back, and {three} was so tired that nobody could wake {three}.",
    );
    close(t, one, who_else(one, two, three, asked));
    one
}

/// Somebody other than the first to end the story with.
fn who_else(one: Person, two: Person, three: Person, asked: usize) -> Person {
    let who = [one, two, three][asked];
    if who.name == one.name { two } else { who }
}

/// A bottle carries a message over the sea.
pub(crate) fn bottle(t: &mut StoryBuilder, setting: Setting) -> Person {
    let one = t.person();
    let two = t.person();
    let place = t.place();
    let at = place.at;
    let animal = t.animal();
    let animal_a = a(animal);
    let food = t.food();
    let days = number(t.between(2, 9));
    let colour = t.colour();
    let (he, two_him) = (one.he, two.him);
    open(t, setting, one);
    say!(
        t,
        "{one} saw a {colour} bottle in the water and pulled it out.",
        "A {colour} bottle came swimming, and {one} took it from the sea.",
    );
    say!(
        t,
        "Inside was a message: \"I am {at} with {animal_a}, and I have {food} for {days} days. {two}.\"",
        "In it was a paper that said, \"My name is {two}. I wait {at} with {animal_a}. My {food} will last {days} days.\"",
    );
    say!(
        t,
        "\"Captain!\" called {one}. \"{two} is {at} and needs help!\"",
        "{one} ran to the captain and said, \"We must find {two}!\"",
    );
    say!(
        t,
        "\"For how long will the {food} last?\" asked the captain. \"{days} days,\" said {one}.",
        "\"Where is {two}?\" asked the captain. \"It says {at},\" said {one}.",
    );
    t.paragraph();
    say!(
        t,
        "They sailed as fast as they could.",
        "The ship turned at once, and the wind was good.",
    );
    say!(
        t,
        "Before the {days} days were over, they saw somebody {at}.",
        "After a day they heard the {animal}, and then they saw {two} {at}.",
    );
    say!(
        t,
        "It was {two}, and beside {two_him} was the {animal}.",
        "\"Are you {two}?\" asked {one}. \"Yes, and this is my {animal}!\"",
    );
    say!(
        t,
        "\"I have eaten nothing but {food},\" said {two}, and everybody laughed.",
        "\"Did you find my {colour} bottle?\" asked {two}. \"Yes,\" said {one}, and {he} showed it.",
    );
    close(t, one, two);
    one
}

/// A storm takes some of the load.
pub(crate) fn storm(t: &mut StoryBuilder, setting: Setting) -> Person {
    let one = t.person();
    let (first, second) = (t.counted(), t.counted());
    let (many, few) = (t.between(4, 12), t.between(2, 9));
    // Two at least, lost and left: the sentences speak of several.
    let lost = t.between(2, many - 2);
    let (load, rest) = (count(many, first), count(many - lost, first));
    let (other, gone) = (count(few, second), count(lost, first));
    let day = t.new_of(DAYS);
    let (he, his) = (one.he, one.his);
    open(t, setting, one);
    say!(t, "The ship carried {load} and {other}.", "On board were {load}, and {other} as well.",);
    say!(
        t,
        "{one} had counted them and written it in a book.",
        "It was the work of {one} to count them every day.",
    );
    say!(
        t,
        "On {day} there was a storm, and the waves were as high as the mast.",
        "Then, on {day}, a storm came from the west.",
    );
    say!(t, "A wave took {gone} over the rail.", "The ship rolled, and {gone} fell into the sea.",);
    t.paragraph();
    say!(
        t,
        "When the sea was calm again, the captain asked, \"What have we lost, {one}?\"",
        "After the storm {one} counted again.",
    );
    say!(
        t,
        "\"We had {load},\" said {one}, \"and we have lost {gone}.\"",
        "{one} opened {his} book: there had been {load}, and {gone} were gone.",
    );
    say!(t, "\"So {rest} are left,\" said the captain.", "Now there were {rest} on board.",);
    say!(
        t,
        "\"And the {second}?\" \"All {other} are here,\" said {one}.",
        "But of the {second} none was lost: there were still {other}.",
    );
    say!(
        t,
        "In the harbour they sold {rest} and {other}.",
        "\"You count well, {one},\" said the captain, and {he} was proud.",
    );
    close_alone(t, one);
    one
}

/// A log book: entries by day, and a question about one of them.
pub(crate) fn log_book(t: &mut StoryBuilder, setting: Setting) -> Person {
    let one = t.person();
    let days = [t.new_of(DAYS), t.new_of(DAYS), t.new_of(DAYS)];
    let animals = [t.animal(), t.animal(), t.animal()];
    let place = t.place();
    let at = place.at;
    let food = t.food();
    let [first, second, third] = days;
    let [seal, gull, crab] = animals.map(a);
    let asked = t.below(3);
    let (day, animal) = (days[asked], animals[asked]);
    let animal_a = a(animal);
    let (he, his) = (one.he, one.his);
    open(t, setting, one);
    say!(
        t,
        "Every day {one} wrote a line in the log book.",
        "{one} kept the log book of the ship.",
    );
    say!(t, "{first}: good wind. We saw {seal}.", "{first}: we saw {seal} in the morning.",);
    say!(t, "{second}: rain. We saw {gull}.", "{second}: no wind. {gull} followed the ship.");
    say!(
        t,
        "{third}: clear sky. We saw {crab} {at}.",
        "{third}: we ate {food}. Later we saw {crab}.",
    );
    t.paragraph();
    say!(
        t,
        "A week later the captain asked, \"When did we see the {animal}?\"",
        "\"I want to draw the {animal},\" said the captain. \"On which day did we see it?\"",
    );
    say!(
        t,
        "{one} opened the book and read. \"It was on {day}.\"",
        "\"On {day},\" said {one}, for {he} had written it down.",
    );
    say!(
        t,
        "\"{day},\" said the captain, \"that is right.\"",
        "The captain drew {animal_a} and wrote \"{day}\" under it.",
    );
    let next = (asked + 1) % 3;
    let (other_day, other) = (days[next], animals[next]);
    say!(
        t,
        "\"And on {other_day}?\" \"On {other_day} it was the {other},\" said {one}.",
        "\"Then the {other} came on {other_day},\" said the captain, and {one} nodded.",
    );
    say!(
        t,
        "{one} was glad that {he} had {his} book.",
        "\"A good log forgets nothing,\" said the captain.",
    );
    close_alone(t, one);
    one
}

/// Flags have meanings, which are told first and used later.
pub(crate) fn signals(t: &mut StoryBuilder, setting: Setting) -> Person {
    let (one, two) = t.pair();
    let colours = [t.colour(), t.colour(), t.colour()];
    let [stop, come, food] = colours;
    let meanings = ["stop", "come to us", "we need water"];
    let asked = t.below(3);
    let (colour, meaning) = (colours[asked], meanings[asked]);
    let colour_a = a(&format!("{colour} flag"));
    let two_he = two.he;
    open(t, setting, one);
    say!(
        t,
        "The captain taught {one} and {two} the signals.",
        "{one} and {two} had to learn the flags of the ships.",
    );
    say!(
        t,
        "A {stop} flag means \"stop\", a {come} flag means \"come to us\", and a {food} flag means \"we need water\".",
        "\"{stop} means stop,\" said the captain. \"{come} means come to us. {food} means we need water.\"",
    );
    say!(
        t,
        "\"{stop}, {come}, {food},\" said {two}, and {two_he} tried to remember.",
        "{one} wrote it down, and {two} learned it by heart.",
    );
    t.paragraph();
    say!(
        t,
        "The next day another ship came near with {colour_a}.",
        "At noon they saw {colour_a} on a small ship.",
    );
    say!(
        t,
        "\"What does {colour} mean, {two}?\" asked {one}.",
        "\"It is {colour}!\" said {one}. \"What does it mean?\"",
    );
    say!(t, "\"It means: {meaning},\" said {two}.", "{two} knew it at once: \"{meaning}\".",);
    match asked {
        0 => say!(t, "So the ship stopped.", "The captain took down the sails, and they stopped."),
        1 => say!(t, "So they sailed to the other ship.", "The ship turned, and they came closer."),
        _ => say!(
            t,
            "So they gave the other ship two barrels of water.",
            "They had enough water and gave some of it away.",
        ),
    }
    say!(
        t,
        "\"Thank you,\" called the sailors under the {colour} flag.",
        "Then the {colour} flag came down again.",
    );
    say!(
        t,
        "The captain was proud of {two}, and so was {one}.",
        "\"You know your flags, {two},\" said the captain.",
    );
    close(t, one, two);
    one
}
