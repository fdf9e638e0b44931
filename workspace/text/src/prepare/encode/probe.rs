//! Texts for which the two libraries are compared before the faster library is used.

use moh_data::TokenizerJson;

use super::spelling::Spelling;

/// Texts in which tokenizers of different versions are apt to differ: white space of every kind and place, line
/// ends, digits, contractions with characters that only case folding makes ASCII, combining marks, scripts,
/// directions, joined emoji, private and unassigned characters, and the space mark itself.
const TEXTS: [&str; 12] = [
    "",
    " ",
    "\n",
    "  Two spaces, a\ttab and\u{a0}no break.\r\n\r\n  \n\tIndented  \n",
    "\nIt's HERE'S we'LL they'Re I'm you'd 'tis rock'n'roll's \u{2019}s '\u{17f}x \u{212a}'s x'\u{17f} ''S",
    "0 12 345 6789 1234567890 3.14159e-10 1,000,000 \u{661}\u{662}\u{663} \u{bd} \u{2168} x2y33z444 \u{1d7d8}",
    "na\u{ef}ve nai\u{308}ve e\u{301}\u{323}\u{327} \u{301}\u{302} x\u{301} 1\u{301} \u{1e9b}\u{323} \u{212b} \u{ac00} \u{1100}\u{1161}\u{11a8} \u{915}\u{94d}\u{937}\u{93f} \u{e01}\u{e33}",
    "\u{4f60}\u{597d}\u{ff0c}\u{4e16}\u{754c}\u{3002}\u{3053}\u{3093}\u{306b}\u{3061}\u{306f} \u{43f}\u{440}\u{438}\u{432}\u{435}\u{442} \u{645}\u{631}\u{62d}\u{628}\u{627} \u{5e9}\u{5dc}\u{5d5}\u{5dd} \u{200f}\u{202b}x\u{202c} \u{3b1}\u{3b2}\u{3b3} \u{1c5}\u{2b0}\u{aa}",
    "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467} \u{1f1e9}\u{1f1ea} \u{270c}\u{1f3fd} \u{2764}\u{fe0f} \u{1f600}\u{1f600} \u{feff}\u{0}\u{1}\u{7f}\u{85}\u{ad}\u{2028}\u{3000}\u{e000}\u{fffd}\u{10ffff}\u{378}",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # !?\n\n\n<p class=\"a\">&amp;</p>//\r///\n---===>>>   <<<",
    "\u{2581}mark \u{2581}\u{2581} a\u{2581}b <0x0A> \u{120}x \u{10a}",
    "ThisIsCamelCase HTTPServer iPhone \u{c9}COLE \u{c9}cole aVeryLongWordThatNoVocabularyHasAsAWholeAntidisestablishmentarianism",
];

/// Returns the texts for a tokenizer: the texts above, all of its added tokens amid other text, and every character
/// with a token in the vocabulary. The faster library encodes such a character without merges.
pub(super) fn texts(json: &TokenizerJson, spelling: &Spelling) -> Vec<String> {
    let mut texts: Vec<String> = TEXTS.map(str::to_owned).to_vec();
    texts.push(TEXTS.join("x y"));
    let mut named = String::new();
    for token in json.fields["added_tokens"].as_array().into_iter().flatten() {
        let content = token["content"].as_str().unwrap_or_default();
        texts.push(content.to_owned());
        named.extend([content, "a", content, " b ", content, content, "\n c", content, "  "]);
    }
    texts.push(named);
    texts.extend(spelling.characters());
    texts
}
