//! Preparation: from files of text to a token file.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use moh_data::{DocumentEnd, Error as DataError, TokenFile, TokenFileInfo};
use moh_text::TextTokenizer;
use moh_text::prepare::{
    AppendEos, Error, Format, Observer, Place, Prepare, PreparedFile, Progress,
};

use moh_testkit::small_tokenizer::{BEGIN_OF_TEXT, END_OF_TEXT, WORDS, write_tokenizer};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/fixtures");

fn tokenizer(dir: &Path) -> TextTokenizer {
    write_tokenizer(&dir.join("tok"), &WORDS);
    TextTokenizer::load(&dir.join("tok")).unwrap()
}

/// Writes the token files of `options`.
fn prepare(options: Prepare<'_>) -> Result<Vec<PreparedFile>, Error> {
    let prepared = moh_text::prepare::prepare(options, &AtomicBool::new(false), &mut ())?;
    Ok(prepared.unwrap().files)
}

/// The one token file that was written.
fn only(prepared: Result<Vec<PreparedFile>, Error>) -> Result<TokenFileInfo, Error> {
    prepared.map(|mut prepared| {
        assert_eq!(prepared.len(), 1);
        prepared.remove(0).info
    })
}

fn run(
    tokenizer: &TextTokenizer,
    inputs: &[PathBuf],
    prefix: &Path,
    overwrite: bool,
) -> Result<TokenFileInfo, Error> {
    let options = Prepare { overwrite, ..Prepare::new(tokenizer, inputs, prefix) };
    only(prepare(options))
}

#[test]
fn documents_keep_their_order_over_many_batches() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let lines = dir.path().join("a.jsonl");
    let texts: Vec<String> = (0..40_000).map(|number| format!("document {number}")).collect();
    let json: String =
        texts.iter().map(|text| format!("{}\n", serde_json::json!({"text": text}))).collect();
    fs::write(&lines, &json).unwrap();
    let whole = dir.path().join("b.txt");
    fs::write(&whole, "the last\none").unwrap();
    let prefix = dir.path().join("out");
    let inputs = [lines, whole];
    struct Seen(Vec<(u64, u64)>);
    impl Observer for Seen {
        fn note(&mut self, sentence: &str) {
            panic!("{sentence}");
        }
        fn progress(&mut self, progress: Progress) {
            self.0.push((progress.reading.bytes, progress.reading.total_bytes));
        }
    }
    let mut seen = Seen(Vec::new());
    let options = Prepare::new(&tokenizer, &inputs, &prefix);
    moh_text::prepare::prepare(options, &AtomicBool::new(false), &mut seen).unwrap();
    let seen = seen.0;
    let info = TokenFile::open(&prefix).unwrap().info().unwrap().clone();
    assert_eq!(info.documents, 40_001);
    let text_bytes: usize = texts.iter().map(String::len).sum();
    assert_eq!(info.text_bytes, text_bytes as u64 + 12);
    assert_eq!(info.vocabulary_size, tokenizer.vocab_size() as u64);
    assert_eq!(info.tokenizer_hash.as_deref(), Some(tokenizer.hash()));
    assert_eq!(info.sources.len(), 2);
    let total = json.len() as u64 + 12;
    assert_eq!(seen[seen.len() - 1], (total, total));
    assert!(seen.len() > 1 && seen.is_sorted());
    let file = TokenFile::open(&prefix).unwrap();
    for number in [0, 16_383, 16_384, 39_999, 40_000] {
        let range = file.document(number).unwrap();
        let mut ids = vec![0; (range.end - range.start) as usize];
        file.read(range.start, &mut ids).unwrap();
        let text = texts.get(number as usize).map_or("the last\none", String::as_str);
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
        assert_eq!((ids[0], ids[ids.len() - 1]), (0, 1));
    }
}

#[test]
fn faults_leave_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let prefix = out.join("p");
    let good = dir.path().join("good.txt");
    fs::write(&good, "good").unwrap();
    let bad = dir.path().join("bad.jsonl");
    fs::write(&bad, "{\"text\": \"fine\"}\n{\"text\": 3}\n").unwrap();
    let empty = dir.path().join("empty.jsonl");
    fs::write(&empty, "\n").unwrap();
    let missing = dir.path().join("missing.txt");
    let fail = |inputs: &[PathBuf]| run(&tokenizer, inputs, &prefix, false).unwrap_err();
    assert!(matches!(fail(&[good.clone(), bad]), Error::Record { place: Place::Line(2), .. }));
    assert!(matches!(fail(&[good.clone(), missing]), Error::File(_)));
    assert!(matches!(fail(std::slice::from_ref(&out)), Error::Input { .. }));
    assert!(matches!(fail(&[empty]), Error::Options { .. }));
    assert!(matches!(fail(&[]), Error::Options { .. }));
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
    let nowhere = good.join("p");
    assert!(run(&tokenizer, std::slice::from_ref(&good), &nowhere, false).is_err());
}

#[test]
fn outputs_are_overwritten_only_when_told() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let input = dir.path().join("p.json");
    fs::write(&input, "{\"text\": \"one\"}").unwrap();
    let prefix = dir.path().join("q");
    let inputs = [input.clone()];
    run(&tokenizer, &inputs, &prefix, false).unwrap();
    assert!(matches!(
        run(&tokenizer, &inputs, &prefix, false),
        Err(Error::Data(DataError::Exists { .. }))
    ));
    run(&tokenizer, &inputs, &prefix, true).unwrap();
    let clash = run(&tokenizer, &inputs, &dir.path().join("p"), true);
    let clash = clash.unwrap_err().to_string();
    assert!(clash.ends_with("p.json: is both an input and an output: choose another output"));
    assert_eq!(fs::read_to_string(&input).unwrap(), "{\"text\": \"one\"}");
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn the_stories_of_the_fixtures_have_their_number_of_tokens() {
    let fixtures = Path::new(FIXTURES);
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = TextTokenizer::load(&fixtures.join("stories260K")).unwrap();
    let inputs = [fixtures.join("data/stories-valid.jsonl")];
    // 93.4 K tokens of text; the tokenizer adds BOS to each story, and preparation EOS.
    for (append_eos, added) in [(AppendEos::Never, 261), (AppendEos::Default, 2 * 261)] {
        let prefix = dir.path().join(format!("p{added}"));
        let options = Prepare { append_eos, ..Prepare::new(&tokenizer, &inputs, &prefix) };
        let info = only(prepare(options)).unwrap();
        assert_eq!((info.documents, info.tokens), (261, 93_392 + added));
    }
}

/// Prepares two documents, and returns the tokens of each and the record of their end.
fn ended(
    dir: &Path,
    tokenizer: &TextTokenizer,
    append_eos: AppendEos<'_>,
) -> Result<(Vec<Vec<u32>>, DocumentEnd), Error> {
    let input = dir.join("two.jsonl");
    fs::write(&input, "{\"text\": \"one\"}\n{\"text\": \"\"}\n").unwrap();
    let (inputs, prefix) = ([input], dir.join("two"));
    let options =
        Prepare { append_eos, overwrite: true, ..Prepare::new(tokenizer, &inputs, &prefix) };
    only(prepare(options))?;
    let file = TokenFile::open(&prefix).unwrap();
    let documents = (0..file.num_documents()).map(|number| {
        let range = file.document(number).unwrap();
        let mut ids = vec![0; (range.end - range.start) as usize];
        file.read(range.start, &mut ids).unwrap();
        ids
    });
    Ok((documents.collect(), file.info().unwrap().eos_token.clone()))
}

/// A directory whose tokenizer has this post-processor, and these other files.
fn with_post_processor(
    dir: &Path,
    template: Option<&[&str]>,
    files: &[(&str, &str)],
) -> TextTokenizer {
    tokenizer(dir);
    let text = fs::read_to_string(dir.join("tok/tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let piece = |name: &&str| match *name {
        "text" => serde_json::json!({"Sequence": {"id": "A", "type_id": 0}}),
        name => serde_json::json!({"SpecialToken": {"id": name, "type_id": 0}}),
    };
    json["post_processor"] = template.map_or(serde_json::Value::Null, |names| {
        let pieces: Vec<_> = names.iter().map(piece).collect();
        let token = |name: &str, id| serde_json::json!({"id": name, "ids": [id], "tokens": [name]});
        serde_json::json!({
            "type": "TemplateProcessing", "single": pieces, "pair": pieces,
            "special_tokens": {
                BEGIN_OF_TEXT: token(BEGIN_OF_TEXT, 0), END_OF_TEXT: token(END_OF_TEXT, 1),
            },
        })
    });
    let other = dir.join("other");
    let _ = fs::remove_dir_all(&other);
    fs::create_dir(&other).unwrap();
    fs::write(other.join("tokenizer.json"), json.to_string()).unwrap();
    for (name, contents) in files {
        fs::write(other.join(name), contents).unwrap();
    }
    TextTokenizer::load(&other).unwrap()
}

const NAMES_EOS: (&str, &str) = ("tokenizer_config.json", r#"{"eos_token": "<|end_of_text|>"}"#);

#[test]
fn each_document_ends_with_one_eos_token() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let end = || DocumentEnd::Token(END_OF_TEXT.to_owned());
    let trained = tokenizer(dir);
    let expected = ended(dir, &trained, AppendEos::Default).unwrap();
    assert_eq!(expected.1, end());
    for document in &expected.0 {
        assert_eq!((document[0], document[document.len() - 1]), (0, 1));
        assert_eq!(document.iter().filter(|&&id| id < 2).count(), 2);
    }
    let framing: &[&str] = &[BEGIN_OF_TEXT, "text", END_OF_TEXT];
    let bos: &[&str] = &[BEGIN_OF_TEXT, "text"];
    let choices = [
        // A post-processor that frames documents, with and without a name for EOS.
        (framing, &[NAMES_EOS][..], AppendEos::Default),
        (framing, &[], AppendEos::Default),
        (framing, &[], AppendEos::Never),
        (framing, &[], AppendEos::Token(END_OF_TEXT)),
        (bos, &[NAMES_EOS], AppendEos::Default),
        (bos, &[], AppendEos::Token(END_OF_TEXT)),
    ];
    for (template, files, choice) in choices {
        let tokenizer = with_post_processor(dir, Some(template), files);
        assert_eq!(ended(dir, &tokenizer, choice).unwrap(), expected, "{template:?} {choice:?}");
    }
    // An empty document of no token is left out, with its end.
    let plain = with_post_processor(dir, None, &[NAMES_EOS]);
    let (documents, found) = ended(dir, &plain, AppendEos::Default).unwrap();
    assert_eq!((documents, found), (vec![expected.0[0][1..].to_vec()], end()));
    let (documents, found) = ended(dir, &plain, AppendEos::Never).unwrap();
    let text = &expected.0[0][1..expected.0[0].len() - 1];
    assert_eq!((documents, found), (vec![text.to_vec()], DocumentEnd::Nothing));
}

#[test]
fn an_unknown_eos_token_is_an_error_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let refuse = |files: &[(&str, &str)], choice| {
        let tokenizer = with_post_processor(dir, Some(&[BEGIN_OF_TEXT, "text"]), files);
        ended(dir, &tokenizer, choice).unwrap_err().to_string()
    };
    let error = refuse(&[], AppendEos::Default);
    assert!(error.contains("--eos-token") && error.contains("--no-append-eos"), "{error}");
    let error = refuse(&[NAMES_EOS], AppendEos::Token("<eod>"));
    assert!(error.contains("has no token \"<eod>\", which --eos-token names"), "{error}");
    let other = ("special_tokens_map.json", r#"{"eos_token": {"content": "<eod>"}}"#);
    let error = refuse(&[other], AppendEos::Default);
    assert!(error.contains("eos_token of special_tokens_map.json"), "{error}");
    assert!(!dir.join("two.bin").exists());
}

#[test]
fn older_token_files_have_no_record_of_their_end() {
    let dir = tempfile::tempdir().unwrap();
    let trained = tokenizer(dir.path());
    ended(dir.path(), &trained, AppendEos::Default).unwrap();
    let path = dir.path().join("two.json");
    let mut json: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!(json["eos_token"], END_OF_TEXT);
    json.as_object_mut().unwrap().remove("eos_token");
    fs::write(&path, json.to_string()).unwrap();
    let end =
        || TokenFile::open(&dir.path().join("two")).unwrap().info().unwrap().eos_token.clone();
    assert_eq!(end(), DocumentEnd::Unknown);
    json["eos_token"] = serde_json::Value::Null;
    fs::write(&path, json.to_string()).unwrap();
    assert_eq!(end(), DocumentEnd::Nothing);
    json["eos_token"] = serde_json::json!(1);
    fs::write(&path, json.to_string()).unwrap();
    let error = TokenFile::open(&dir.path().join("two")).unwrap_err().to_string();
    assert!(error.contains("two.json: not a valid token file"), "{error}");
}

#[test]
fn a_split_shares_no_document_and_loses_none() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let input = dir.path().join("a.jsonl");
    let text = |number: u64| format!("document {number}");
    let lines =
        |count| (0..count).map(|number| format!("{}\n", serde_json::json!({"text": text(number)})));
    fs::write(&input, lines(20_000).collect::<String>()).unwrap();
    let (inputs, prefix) = ([input.clone()], dir.path().join("out"));
    let split = Some("0.99,0.01".parse().unwrap());
    let options = Prepare { split, ..Prepare::new(&tokenizer, &inputs, &prefix) };
    let prepared = prepare(options).unwrap();
    let names = ["out-train", "out-validation"].map(|name| dir.path().join(name));
    assert_eq!(prepared.iter().map(|part| part.prefix.clone()).collect::<Vec<_>>(), names);
    assert_eq!((prepared[0].info.documents, prepared[1].info.documents), (19_800, 200));
    let mut texts = Vec::new();
    for PreparedFile { prefix, info } in &prepared {
        let file = TokenFile::open(prefix).unwrap();
        let first = texts.len();
        for number in 0..info.documents {
            let range = file.document(number).unwrap();
            let mut ids = vec![0; (range.end - range.start) as usize];
            file.read(range.start, &mut ids).unwrap();
            texts.push(tokenizer.decode(&ids, true).unwrap());
        }
        let bytes: usize = texts[first..].iter().map(String::len).sum();
        assert_eq!(info.text_bytes, bytes as u64);
        // Each part keeps the order of the documents.
        let number = |text: &String| text["document ".len()..].parse::<u64>().unwrap();
        assert!(texts[first..].is_sorted_by_key(number));
    }
    texts.sort();
    let mut expected: Vec<_> = (0..20_000).map(text).collect();
    expected.sort();
    assert_eq!(texts, expected);

    // The same documents give the same files, and one that exists keeps both.
    let bin = fs::read(dir.path().join("out-validation.bin")).unwrap();
    fs::remove_file(dir.path().join("out-train.bin")).unwrap();
    assert!(matches!(prepare(options), Err(Error::Data(DataError::Exists { .. }))));
    assert!(!dir.path().join("out-train.bin").exists());
    prepare(Prepare { overwrite: true, ..options }).unwrap();
    assert_eq!(fs::read(dir.path().join("out-validation.bin")).unwrap(), bin);

    fs::write(&input, lines(1).collect::<String>()).unwrap();
    let options = Prepare { overwrite: true, ..options };
    let error = prepare(options).unwrap_err().to_string();
    assert!(
        error.contains(": would have no document, of 1 in all: --format paragraphs "),
        "{error}"
    );
    assert_eq!(fs::read(dir.path().join("out-validation.bin")).unwrap(), bin);
}

#[test]
fn special_tokens_in_a_text_are_counted_or_encoded_as_text() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let input = dir.path().join("a.txt");
    fs::write(&input, format!("one {END_OF_TEXT} two{BEGIN_OF_TEXT}{END_OF_TEXT}")).unwrap();
    let prefix = dir.path().join("p");
    let ids = |info: &TokenFileInfo| {
        let mut ids = vec![0; info.tokens as usize];
        TokenFile::open(&prefix).unwrap().read(0, &mut ids).unwrap();
        ids
    };
    let info = run(&tokenizer, std::slice::from_ref(&input), &prefix, false).unwrap();
    let counts = [(BEGIN_OF_TEXT.to_owned(), 1), (END_OF_TEXT.to_owned(), 2)];
    assert_eq!(info.special_tokens_in_text, Some(counts.into()));
    // BOS and EOS of the document itself are not in its text.
    let special = |ids: &[u32]| ids.iter().filter(|&&id| id < 2).count();
    assert_eq!(special(&ids(&info)), 5);
    assert_eq!(TokenFile::open(&prefix).unwrap().info(), Some(&info));

    let tokenizer = tokenizer.split_special_tokens(true);
    let split = run(&tokenizer, std::slice::from_ref(&input), &prefix, true).unwrap();
    assert_eq!(split.special_tokens_in_text, Some([].into()));
    assert!(split.split_special_tokens && !info.split_special_tokens);
    let ids = ids(&split);
    assert_eq!((special(&ids), ids[0], ids[ids.len() - 1]), (2, 0, 1));
    let text = fs::read_to_string(&input).unwrap();
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
}

#[test]
fn a_book_is_split_by_its_paragraphs() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let input = dir.path().join("book.txt");
    let paragraphs: Vec<String> = (0..20).map(|number| format!("one {number}\ntwo")).collect();
    fs::write(&input, paragraphs.join("\n\n")).unwrap();
    let (inputs, prefix) = ([input], dir.path().join("out"));
    let split = Some("0.9,0.1".parse().unwrap());
    let options = Prepare { split, ..Prepare::new(&tokenizer, &inputs, &prefix) };
    let error = prepare(options).unwrap_err().to_string();
    let remedy = "of 1 in all: --format paragraphs makes each paragraph of a text a document";
    assert!(error.ends_with(remedy), "{error}");
    fs::write(&inputs[0], &paragraphs[0]).unwrap();
    let options = Prepare { format: Some(Format::Paragraphs), ..options };
    let error = prepare(options).unwrap_err().to_string();
    assert!(error.contains("of 1 in all: add documents"), "{error}");
    fs::write(&inputs[0], paragraphs.join("\n\n")).unwrap();
    let prepared = prepare(options).unwrap();
    let documents: Vec<u64> = prepared.iter().map(|part| part.info.documents).collect();
    assert_eq!(documents, [18, 2]);
    let file = TokenFile::open(&prefix.with_file_name("out-validation")).unwrap();
    let range = file.document(0).unwrap();
    let mut ids = vec![0; (range.end - range.start) as usize];
    file.read(range.start, &mut ids).unwrap();
    // Document 0, as `the_division_is_pinned` has it.
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), paragraphs[0]);
}

#[test]
fn an_input_that_is_named_twice_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = tokenizer(dir.path());
    let (one, two) = (dir.path().join("a.txt"), dir.path().join("b.txt"));
    fs::write(&one, "one").unwrap();
    fs::write(&two, "one").unwrap();
    let prefix = dir.path().join("p");
    let again = dir.path().join("./a.txt");
    let inputs = [one.clone(), two.clone(), again];
    let error = run(&tokenizer, &inputs, &prefix, false).unwrap_err().to_string();
    assert!(error.contains("a.txt: is named twice: name it once"), "{error}");
    // Two files of the same text are two files.
    assert_eq!(run(&tokenizer, &[one, two], &prefix, false).unwrap().documents, 2);
}
