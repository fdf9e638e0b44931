//! The words of the two settings. Most sentences are shared; what they are about differs.

/// Words of one setting. Each list is longer than the number of different words that any template
/// needs.
pub(crate) struct Lexicon {
    pub(crate) girls: &'static [&'static str],
    pub(crate) boys: &'static [&'static str],
    /// Things that are carried, given and lost; each takes a colour.
    pub(crate) things: &'static [&'static str],
    /// Things that are counted, in the plural.
    pub(crate) counted: &'static [&'static str],
    /// Where people go: preposition, and the place with its article.
    pub(crate) places: &'static [(&'static str, &'static str)],
    /// Where things are hidden.
    pub(crate) spots: &'static [&'static str],
    pub(crate) animals: &'static [&'static str],
    pub(crate) pet_names: &'static [&'static str],
    /// Grown-ups, by what they do.
    pub(crate) elders: &'static [&'static str],
    /// Food and drink, as uncountable nouns.
    pub(crate) foods: &'static [&'static str],
    /// Work: "swept the floor", "sweep the floor".
    pub(crate) jobs: &'static [(&'static str, &'static str)],
    /// What the weather did.
    pub(crate) weather: &'static [&'static str],
}

/// Colours of both settings.
pub(crate) const COLOURS: &[&str] =
    &["red", "blue", "green", "yellow", "white", "black", "brown", "orange", "pink", "grey"];

/// Numbers in words, from 0.
pub(crate) const NUMBERS: &[&str] = &[
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen",
];

pub(crate) const DAYS: &[&str] =
    &["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

pub(crate) const VILLAGE: Lexicon = Lexicon {
    girls: &[
        "Anna", "Clara", "Emma", "Grace", "Ida", "Lucy", "Mia", "Nora", "Rosa", "Vera", "Zoe",
        "Ella",
    ],
    boys: &[
        "Ben", "David", "Finn", "Henry", "Jack", "Max", "Oscar", "Paul", "Sam", "Tom", "Will",
        "Noah",
    ],
    things: &[
        "ball", "kite", "hat", "cup", "book", "bag", "scarf", "box", "drum", "lamp", "coat",
        "blanket", "bell", "bucket", "basket", "spoon", "umbrella",
    ],
    counted: &[
        "apples", "pears", "eggs", "stones", "coins", "buttons", "cakes", "carrots", "candles",
        "flowers", "nuts", "leaves",
    ],
    places: &[
        ("at", "the mill"),
        ("in", "the garden"),
        ("by", "the river"),
        ("in", "the barn"),
        ("at", "the market"),
        ("on", "the hill"),
        ("in", "the kitchen"),
        ("by", "the well"),
        ("at", "the school"),
        ("by", "the bridge"),
        ("in", "the forest"),
        ("at", "the bakery"),
    ],
    spots: &[
        "under the bench",
        "behind the door",
        "in the old basket",
        "on the top shelf",
        "under the bed",
        "behind the clock",
        "in the tall grass",
        "beside the stove",
        "under the stairs",
        "behind the curtain",
    ],
    animals: &["cat", "dog", "goat", "hen", "duck", "horse", "rabbit", "owl", "mouse", "sheep"],
    pet_names: &["Pip", "Dot", "Moss", "Star", "Biscuit", "Shadow", "Button", "Clover"],
    elders: &["baker", "farmer", "teacher", "miller", "doctor", "gardener", "shepherd"],
    foods: &["bread", "soup", "cheese", "honey", "milk", "jam", "butter", "tea"],
    jobs: &[
        ("swept the floor", "sweep the floor"),
        ("fed the hens", "feed the hens"),
        ("painted the fence", "paint the fence"),
        ("washed the cups", "wash the cups"),
        ("baked the bread", "bake the bread"),
        ("picked the beans", "pick the beans"),
        ("carried the water", "carry the water"),
        ("cut the wood", "cut the wood"),
    ],
    weather: &[
        "The sun was warm that day",
        "A soft rain fell on the roofs",
        "The wind blew from the hills",
        "There was snow on the roofs",
        "The sky was clear and bright",
        "Fog lay over the fields",
    ],
};

pub(crate) const VOYAGE: Lexicon = Lexicon {
    girls: &[
        "Carmen", "Elena", "Greta", "Iris", "Kira", "Mara", "Olga", "Rita", "Tara", "Yuna",
        "Selma", "Lena",
    ],
    boys: &[
        "Bruno", "Diego", "Felix", "Hugo", "Jonas", "Leo", "Nico", "Pablo", "Sven", "Victor",
        "Omar", "Anton",
    ],
    things: &[
        "flag", "map", "rope", "lantern", "compass", "net", "hook", "chest", "coat", "cup", "hat",
        "book", "drum", "box", "bell", "blanket", "whistle",
    ],
    counted: &[
        "shells", "barrels", "lemons", "pearls", "coins", "candles", "oranges", "stones", "nails",
        "feathers", "eggs", "bottles",
    ],
    places: &[
        ("on", "the deck"),
        ("in", "the harbour"),
        ("in", "the cabin"),
        ("on", "the island"),
        ("on", "the beach"),
        ("at", "the lighthouse"),
        ("in", "the cave"),
        ("on", "the pier"),
        ("at", "the market"),
        ("by", "the mast"),
        ("on", "the hill"),
        ("by", "the rocks"),
    ],
    spots: &[
        "under the bunk",
        "behind the barrels",
        "in the old chest",
        "on the top shelf",
        "under the sail",
        "behind the ladder",
        "in the small boat",
        "beside the stove",
        "under the table",
        "behind the curtain",
    ],
    animals: &[
        "parrot", "monkey", "seal", "turtle", "crab", "gull", "cat", "dog", "dolphin", "mouse",
    ],
    pet_names: &["Salt", "Coral", "Pepper", "Drift", "Ginger", "Pearl", "Rocket", "Storm"],
    elders: &["captain", "cook", "sailor", "pilot", "doctor", "trader", "fisher"],
    foods: &["rice", "soup", "cheese", "fish", "tea", "bread", "stew", "water"],
    jobs: &[
        ("mended the sail", "mend the sail"),
        ("scrubbed the deck", "scrub the deck"),
        ("painted the rail", "paint the rail"),
        ("washed the cups", "wash the cups"),
        ("cooked the rice", "cook the rice"),
        ("coiled the ropes", "coil the ropes"),
        ("carried the water", "carry the water"),
        ("cleaned the lamps", "clean the lamps"),
    ],
    weather: &[
        "The sea was calm that day",
        "A cold rain fell on the deck",
        "The wind blew from the north",
        "White clouds raced over the mast",
        "The sky was clear and bright",
        "Fog lay over the water",
    ],
};
