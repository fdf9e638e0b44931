//! The two libraries against each other, and pieces against wholes, for every kind of tokenizer.

mod kinds;

use std::sync::LazyLock;

use moh_data::TextTokenizer;
use proptest::prelude::*;
use tokenizers_1::pipeline::PipelineToken;

use super::{Encoder, Part};

/// Every kind with its name; trained once.
static KINDS: LazyLock<Vec<(&str, TextTokenizer)>> = LazyLock::new(|| {
    let kinds = kinds::all(1500, &kinds::text(200_000, 1));
    kinds.iter().map(|kind| (kind.name, kind.load())).collect()
});
static ENCODERS: LazyLock<Vec<(&str, &TextTokenizer, Encoder<'_>)>> = LazyLock::new(|| {
    let load = |(name, tokenizer): &'static (&'static str, TextTokenizer)| {
        (*name, tokenizer, Encoder::new(tokenizer).unwrap())
    };
    KINDS.iter().map(load).collect()
});

/// A text of fragments in which tokenizers are apt to differ.
fn texts() -> impl Strategy<Value = String> {
    let fragment = prop_oneof![
        4 => "[a-zA-Z]{1,12}",
        4 => Just(" ".to_owned()),
        2 => "[a-z]{1,8} [a-z]{1,8}",
        1 => "[ \t\n\r\u{a0}\u{2003}\u{3000}\u{85}\u{200b}]{1,5}",
        1 => "[0-9\u{661}-\u{669}\u{bd}\u{2167}]{1,7}",
        1 => "['\u{2019}](s|S|\u{17f}|t|T|re|Re|ve|m|ll|LL|lL|d|x)?",
        1 => "[\u{300}-\u{36f}\u{591}-\u{5bd}\u{93e}-\u{94d}]{1,3}",
        1 => "[\u{4e00}-\u{4e20}\u{3041}-\u{3060}\u{ac00}-\u{ac20}\u{3001}\u{3002}\u{ff0c}]{1,6}",
        1 => "[\u{5d0}-\u{5ea}\u{627}-\u{64a}\u{430}-\u{44f}\u{391}-\u{3a9}\u{1c5}\u{2b0}\u{212a}]{1,6}",
        1 => "[!-/:-@\\[-`{-~]{1,5}",
        1 => "(\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}|\u{1f600}|\u{2764}\u{fe0f}|\u{1f1e9}\u{1f1ea}|\u{1f3fd})",
        1 => "\u{2581}{1,3}",
        1 => proptest::sample::select(vec![
            "<s>", "</s>", "<unk>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>",
            "<tool_call>", "[INST]", "<0x41>", "<|eot|>", "na\u{ef}ve", "caf\u{e9}",
        ]).prop_map(str::to_owned),
        2 => any::<char>().prop_map(String::from),
    ];
    proptest::collection::vec(fragment, 0..30).prop_map(|fragments| fragments.concat())
}

/// Checks that both libraries give the same ids for a text, and the encoder those ids.
fn check(text: &str) {
    for (name, tokenizer, encoder) in ENCODERS.iter() {
        let expected = tokenizer.encode_without_special_tokens(text).unwrap();
        let library = encoder.library.as_ref().unwrap();
        let mut ids = Vec::new();
        assert!(library.append(text, &mut ids), "{name}: fails for {text:?}");
        assert_eq!(PipelineToken::cast_slice(&ids), expected, "{name}: {text:?}");
        let encoded = encoder.encode(text, Part::Whole).unwrap();
        assert_eq!(encoded.ids, tokenizer.encode(text).unwrap(), "{name}: {text:?}");
        let special: Vec<u32> = tokenizer.special_ids().collect();
        let named: Vec<u32> = expected.into_iter().filter(|id| special.contains(id)).collect();
        assert_eq!(encoded.special_in_text, named, "{name}: {text:?}");
    }
}

/// Checks that the ids of a text are those of its pieces, of at most `limits` bytes in turn.
fn check_pieces(text: &str, limits: &[usize]) {
    for (name, tokenizer, encoder) in ENCODERS.iter() {
        let mut ids = Vec::new();
        let (mut rest, mut part, mut limits) = (text, Part::First, limits.iter().cycle());
        let mut pieces = 1;
        for limit in limits.by_ref().take(2 * text.len()) {
            let head = &rest[..rest.floor_char_boundary(*limit)];
            if let Some(end) = encoder.cut(head) {
                ids.extend(encoder.encode(&rest[..end], part).unwrap().ids);
                (rest, part) = (&rest[end..], Part::Middle);
                pieces += 1;
            }
        }
        let last = if pieces == 1 { Part::Whole } else { Part::Last };
        ids.extend(encoder.encode(rest, last).unwrap().ids);
        assert_eq!(ids, tokenizer.encode(text).unwrap(), "{name}: {pieces} pieces of {text:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    #[test]
    fn ids_are_those_of_the_slower_library(text in texts()) {
        check(&text);
    }

    #[test]
    fn ids_of_pieces_are_those_of_the_whole(
        text in texts(),
        limits in proptest::collection::vec(3..60_usize, 1..8),
    ) {
        check_pieces(&text, &limits);
    }
}

#[test]
fn every_kind_is_encoded_by_the_faster_library_and_can_be_cut() {
    for (name, _, encoder) in ENCODERS.iter() {
        assert_eq!(encoder.fallback(), None, "{name}");
        let cut = encoder.cut("one two three");
        assert!(cut == Some("one two".len()) || *name == "spanning", "{name}: {cut:?}");
        assert_eq!(encoder.cut("one  2. \u{e9} x"), None, "{name}");
        assert_eq!(encoder.cut(""), None, "{name}");
    }
}
