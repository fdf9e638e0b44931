use moh_testkit::assert_refused;

use super::*;
use serde_json::{Value, json};

/// Returns a tokenizer with this model, vocabulary and merges, in the form of a `tokenizer.json`.
fn tokenizer(
    pipeline: Value,
    tokens: &[&str],
    merges: &[&str],
    added: &[(u32, &str)],
) -> Tokenizer {
    let mut vocab = serde_json::Map::new();
    for (id, token) in tokens.iter().enumerate() {
        vocab.insert(token.to_string(), json!(id));
    }
    let added: Vec<Value> = added
        .iter()
        .map(|(id, content)| {
            json!({
                "id": id, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true,
            })
        })
        .collect();
    let mut file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": merges,
        },
    });
    for (key, value) in pipeline.as_object().unwrap() {
        match file[key].is_object() {
            true => value.as_object().unwrap().iter().for_each(|(k, v)| file[key][k] = v.clone()),
            false => file[key] = value.clone(),
        }
    }
    file.to_string().parse().unwrap()
}

/// Returns a tokenizer like Llama 3's: bytes as characters (U+0120 is a space).
fn byte_level(tokens: &[&str], merges: &[&str], added: &[(u32, &str)]) -> Tokenizer {
    let pre = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    });
    tokenizer(json!({"pre_tokenizer": pre}), tokens, merges, added)
}

/// Returns a tokenizer like Llama 2's: U+2581 before every word, byte tokens for unknown characters.
fn sentencepiece(tokens: &[&str], merges: &[&str], added: &[(u32, &str)]) -> Tokenizer {
    let normalizer = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u{2581}"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
    ]});
    let model = json!({"byte_fallback": true, "unk_token": "<unk>", "fuse_unk": true});
    tokenizer(json!({"normalizer": normalizer, "model": model}), tokens, merges, added)
}

fn between(old: &Tokenizer, new: &Tokenizer, rows: usize, pad: Option<usize>) -> Expansion {
    Expansion::between(old, new, Path::new("new"), rows, pad).unwrap()
}

#[test]
fn byte_level_tokens_are_spelled_with_their_spaces() {
    let tokens = ["a", "b", "c", "\u{120}", "\u{120}a", "bc"];
    let merges = ["\u{120} a", "b c"];
    let old = byte_level(&tokens, &merges, &[(6, "<s>")]);
    let mut more = tokens.to_vec();
    more.extend(["<pad>", "\u{120}abc", "abc", "\u{120}ab", "cc"]);
    more[6] = "<s>";
    let merges = [&merges[..], &["\u{120}a bc", "a bc", "\u{120}a b", "c c"]].concat();
    let new = byte_level(&more, &merges, &[(6, "<s>"), (11, "<t>"), (12, "b a")]);
    let expansion = between(&old, &new, 7, None);
    assert_eq!((expansion.num_kept(), expansion.num_rows()), (7, 13));
    assert_eq!(expansion.spelling(7), [4, 5], "space belongs to the token");
    assert_eq!(expansion.spelling(8), [0, 5], "no space");
    assert_eq!(expansion.spelling(9), [4, 1]);
    assert_eq!(expansion.spelling(10), [2, 2]);
    assert_eq!(expansion.spelling(11), [0u32; 0], "no old token has its characters");
    assert_eq!(expansion.spelling(12), [1, 4], "an added token is text");
}

#[test]
fn sentencepiece_tokens_are_spelled_with_their_spaces() {
    let tokens = ["<unk>", "<s>", "<0x0A>", "\u{2581}", "f", "o", "\u{2581}f", "oo", "\n", "-"];
    let merges = ["\u{2581} f", "o o"];
    let old = sentencepiece(&tokens, &merges, &[(0, "<unk>"), (1, "<s>")]);
    let mut more = tokens.to_vec();
    more.extend(["\u{2581}foo", "foo", "\u{2581}of", "\u{e9}", "<0xFF>", "<0x2D>", "o f"]);
    let merges = [&merges[..], &["\u{2581}f oo", "f oo"]].concat();
    let new = sentencepiece(&more, &merges, &[(0, "<unk>"), (1, "<s>"), (17, "f oo")]);
    let expansion = between(&old, &new, 10, None);
    assert_eq!(expansion.spelling(10), [6, 7], "with its leading space");
    assert_eq!(expansion.spelling(11), [4, 7], "without one");
    assert_eq!(expansion.spelling(12), [3, 5, 4]);
    assert_eq!(expansion.spelling(13), [0u32; 0], "unknown to the old tokenizer");
    assert_eq!(expansion.spelling(14), [0u32; 0], "a byte that is no character");
    assert_eq!(expansion.spelling(15), [9], "the byte of a hyphen");
    assert_eq!(expansion.spelling(17), [4, 3, 7], "text without a space before it");
}

#[test]
fn a_token_that_moves_is_refused_by_name() {
    let old = byte_level(&["a", "b", "c"], &[], &[]);
    for (tokens, expected) in [
        (&["a", "c", "b"][..], "token \"b\" has id 1 in the model's tokenizer and has id 2 in the"),
        (
            &["a", "b"][..],
            "token \"c\" has id 2 in the model's tokenizer and is not in the new one",
        ),
    ] {
        let new = byte_level(tokens, &[], &[]);
        let error = Expansion::between(&old, &new, Path::new("new"), 3, None).unwrap_err();
        let message = error.to_string();
        assert!(message.starts_with("new/tokenizer.json: "), "{message}");
        assert!(message.contains(expected), "{message}");
    }
}

/// Writes row `id` of the old model: (id, id squared).
fn old_row(id: u32, out: &mut [f32]) {
    out.copy_from_slice(&[id as f32, (id * id) as f32]);
}

fn row(expansion: &Expansion, row: usize) -> [f32; 2] {
    let mut out = [0.0; 2];
    expansion.rows(2, &old_row).read(row, &mut out);
    out
}

#[test]
fn new_rows_are_means_and_padding_is_the_mean_of_all() {
    let old = byte_level(&["a", "b", "c"], &[], &[]);
    let new = byte_level(&["a", "b", "c", "ab", "abc"], &["a b", "ab c"], &[]);
    let expansion = between(&old, &new, 3, Some(4));
    assert_eq!(expansion.num_rows(), 8);
    assert_eq!(row(&expansion, 2), [2.0, 4.0]);
    assert_eq!(row(&expansion, 3), [0.5, 0.5]);
    assert_eq!(row(&expansion, 4), [1.0, 5.0 / 3.0]);
    assert_eq!(row(&expansion, 7), [1.0, 5.0 / 3.0]);

    let padding = Expansion::padding(3, 128).unwrap();
    assert_eq!((padding.num_kept(), padding.num_rows()), (3, 128));
    assert_eq!(row(&padding, 127), [1.0, 5.0 / 3.0]);
    assert!(Expansion::padding(256, 128).unwrap().is_identity());
    for multiple in [0, usize::MAX, 1 << 40] {
        assert_refused(Expansion::padding(3, multiple), "cannot be padded to a multiple");
    }
}

#[test]
fn rows_that_no_token_owned_are_reused_and_never_averaged() {
    let old = byte_level(&["a", "b", "c"], &[], &[]);
    let new = byte_level(&["a", "b", "c", "ab"], &["a b"], &[]);
    // Rows 3 to 5 of the model are padding. Row 3 becomes a token's row, the others are unchanged.
    let expansion = between(&old, &new, 6, Some(4));
    assert_eq!((expansion.num_kept(), expansion.num_rows()), (3, 8));
    assert_eq!(row(&expansion, 3), [0.5, 0.5]);
    assert_eq!((row(&expansion, 4), row(&expansion, 5)), ([4.0, 16.0], [5.0, 25.0]));
    assert_eq!(row(&expansion, 6), [1.0, 5.0 / 3.0]);
    // The tokens beyond the rows of a smaller model are new to it.
    let expansion = between(&old, &new, 2, None);
    assert_eq!(
        (expansion.num_kept(), expansion.spelling(2), expansion.spelling(3)),
        (2, vec![], vec![0, 1])
    );
}

#[test]
fn the_same_tokenizer_changes_nothing() {
    let old = byte_level(&["a", "b", "c"], &[], &[(3, "<s>")]);
    assert!(between(&old, &old, 4, None).is_identity());
    assert!(between(&old, &old, 8, Some(8)).is_identity());
}

#[test]
fn tokenizers_that_cannot_be_read_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let plan = || Expansion::plan(dir.path(), dir.path(), 3, None).unwrap_err().to_string();
    assert!(plan().contains("contains no tokenizer.json"), "{}", plan());
    std::fs::write(dir.path().join("tokenizer.json"), "{\"model\": 3}").unwrap();
    assert!(plan().contains("not a valid tokenizer") && !plan().contains('\n'), "{}", plan());
}

proptest::proptest! {
    /// The joined spelling of a new token is the token. Its row is the mean of the spelling's rows.
    #[test]
    fn spellings_spell(words in proptest::collection::btree_set("[abc]{2,6}", 1..12)) {
        let tokens = ["a", "b", "c", "ab", "cab"];
        let merges = ["a b", "c ab"];
        let old = byte_level(&tokens, &merges, &[]);
        let fresh: Vec<&str> =
            words.iter().map(String::as_str).filter(|word| !tokens.contains(word)).collect();
        let more = [&tokens[..], &fresh[..]].concat();
        let new = byte_level(&more, &merges, &[]);
        let expansion = between(&old, &new, tokens.len(), None);
        proptest::prop_assert_eq!(expansion.num_rows(), more.len());
        for (id, word) in more.iter().enumerate() {
            let spelling = expansion.spelling(id);
            let spelled: String = spelling.iter().map(|id| tokens[*id as usize]).collect();
            proptest::prop_assert_eq!(&spelled, word);
            let mean = spelling.iter().sum::<u32>() as f64 / spelling.len() as f64;
            proptest::prop_assert_eq!(row(&expansion, id)[0], mean as f32);
        }
    }
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn the_fixtures_tokenizer_spells_with_and_without_a_space() {
    let old = TextTokenizer::load(&moh_testkit::programs::fixtures().join("stories260K")).unwrap();
    let speller = Speller::new(old.library());
    let text = |ids: Vec<u32>| -> String { ids.iter().map(|id| old.token(*id).unwrap()).collect() };
    for entry in ["\u{2581}elephants", "elephants", "\u{2581}", "x\u{2581}y"] {
        assert_eq!(text(speller.spell_token(entry)), entry);
    }
    assert_eq!(text(speller.spell_text("two words")), "two\u{2581}words");
    assert_eq!(text(speller.spell_text("<|end|>")).replace("<0x7C>", "|"), "<|end|>");
}

#[test]
fn files_that_disagree_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = byte_level(&["a", "b"], &[], &[]).to_string(false).unwrap();
    std::fs::write(dir.path().join(TOKENIZER_FILE), tokenizer).unwrap();
    let remarks = || Expansion::plan(dir.path(), dir.path(), 2, None).unwrap().remarks;
    assert!(remarks().is_empty());
    let config = json!({"tokenizer_class": "Qwen2Tokenizer"});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    assert!(remarks()[1].contains("by its tokenizer_class Qwen2Tokenizer, transformers 5"));
}
