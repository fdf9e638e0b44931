//! Preparation: from files of text to a token file, the selection of documents, and records that are not documents.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use moh_data::{DocumentEnd, Error as DataError, TokenFile, TokenFileInfo};
use moh_text::TextTokenizer;
use moh_text::prepare::{
    AppendEos, BadRecords, Counts, Error, Format, Observer, Prepare, Prepared, PreparedFile,
    Progress, Sample, Selection,
};
use serde_json::{Value, json};

use moh_testkit::assert_refused;
use moh_testkit::programs::{edit_json, figure, fixtures, read_json};
use moh_testkit::small_tokenizer::{BEGIN_OF_TEXT, END_OF_TEXT, WORDS};
use moh_testkit::texts::small_tokenizer;

fn tokenizer(dir: &Path) -> TextTokenizer {
    small_tokenizer(dir, &WORDS)
}

fn prepare(options: Prepare<'_>) -> Result<Prepared, Error> {
    Ok(moh_text::prepare::prepare(options, &AtomicBool::new(false), &mut ())?.unwrap())
}

fn only(options: Prepare<'_>) -> Result<TokenFileInfo, Error> {
    let mut files = prepare(options)?.files;
    assert_eq!(files.len(), 1);
    Ok(files.remove(0).info)
}

struct Place {
    dir: tempfile::TempDir,
    tokenizer: TextTokenizer,
    inputs: Vec<PathBuf>,
}

impl Place {
    /// Creates a place with inputs of JSON lines.
    fn new(inputs: &[String]) -> Self {
        let name = |(number, text)| (format!("{number}.jsonl"), text);
        Self::of(inputs.iter().enumerate().map(name))
    }

    fn of(files: impl IntoIterator<Item = (impl AsRef<Path>, impl AsRef<[u8]>)>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tokenizer = tokenizer(dir.path());
        let write = |(name, text): (_, _)| {
            let path = dir.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let inputs = files.into_iter().map(write).collect();
        Self { dir, tokenizer, inputs }
    }

    fn prefix(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    fn options<'a>(&'a self, prefix: &'a Path) -> Prepare<'a> {
        Prepare { overwrite: true, ..Prepare::new(&self.tokenizer, &self.inputs, prefix) }
    }

    /// Prepares with a change of the options. Also returns the texts that were written.
    fn run(&self, change: impl FnOnce(&mut Prepare<'_>)) -> Result<(Prepared, Vec<String>), Error> {
        let prefix = self.prefix();
        let mut options = self.options(&prefix);
        change(&mut options);
        let prepared = prepare(options)?;
        Ok((prepared, texts(&self.tokenizer, &prefix)))
    }
}

fn lines(texts: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    texts.into_iter().map(|text| format!("{}\n", json!({"text": text.as_ref()}))).collect()
}

fn documents(prefix: &Path) -> Vec<Vec<u32>> {
    let file = TokenFile::open(prefix).unwrap();
    let ids = |number| file.ids(file.document(number).unwrap()).unwrap();
    (0..file.num_documents()).map(ids).collect()
}

fn texts(tokenizer: &TextTokenizer, prefix: &Path) -> Vec<String> {
    documents(prefix).iter().map(|ids| tokenizer.decode(ids, true).unwrap()).collect()
}

#[test]
fn documents_keep_their_order_over_many_batches() {
    let mut expected: Vec<String> =
        (0..40_000).map(|number| format!("document {number}")).collect();
    let json = lines(&expected);
    let place = Place::of([("a.jsonl", &json[..]), ("b.txt", "the last\none")]);
    expected.push("the last\none".to_owned());
    struct Seen(Vec<(u64, u64)>);
    impl Observer for Seen {
        fn note(&mut self, sentence: &str) {
            panic!("{sentence}");
        }
        fn progress(&mut self, progress: Progress) {
            self.0.push((progress.bytes, progress.total_bytes));
        }
    }
    let mut seen = Seen(Vec::new());
    let (prefix, tokenizer) = (place.prefix(), &place.tokenizer);
    let stop = AtomicBool::new(false);
    moh_text::prepare::prepare(place.options(&prefix), &stop, &mut seen).unwrap();
    let seen = seen.0;
    let info = TokenFile::open(&prefix).unwrap().info().unwrap().clone();
    assert_eq!(info.documents, 40_001);
    let text_bytes: usize = expected.iter().map(String::len).sum();
    assert_eq!(info.text_bytes, text_bytes as u64);
    assert_eq!(info.vocabulary_size, tokenizer.vocab_size() as u64);
    assert_eq!(info.tokenizer_hash.as_deref(), Some(tokenizer.hash()));
    assert_eq!(info.sources.len(), 2);
    let total = json.len() as u64 + 12;
    assert_eq!(seen[seen.len() - 1], (total, total));
    assert!(seen.len() > 1 && seen.is_sorted());
    assert!(texts(tokenizer, &prefix) == expected);
    assert!(documents(&prefix).iter().all(|ids| (ids[0], ids[ids.len() - 1]) == (0, 1)));
}

#[test]
fn faults_leave_nothing_behind() {
    let bad = "{\"text\": \"fine\"}\n{\"text\": 3}\n";
    let place = Place::of([("good.txt", "good"), ("bad.jsonl", bad), ("empty.jsonl", "\n")]);
    let [good, bad, empty] = &place.inputs[..] else { panic!() };
    let [out, missing] = ["out", "missing.txt"].map(|name| place.dir.path().join(name));
    fs::create_dir(&out).unwrap();
    let run = |inputs: &[PathBuf], prefix: &Path| {
        prepare(Prepare::new(&place.tokenizer, inputs, prefix)).unwrap_err().to_string()
    };
    for (inputs, expected) in [
        (&[good.clone(), bad.clone()][..], "bad.jsonl:2: "),
        (&[good.clone(), missing], "missing.txt: "),
        (std::slice::from_ref(&out), "out: the directory has no file that ends in "),
        (std::slice::from_ref(empty), "the inputs contain no text"),
        (&[], "no input: name at least one file"),
    ] {
        let error = run(inputs, &out.join("p"));
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
    run(std::slice::from_ref(good), &good.join("p"));
}

#[test]
fn outputs_are_overwritten_only_when_told() {
    let place = Place::of([("p.json", "{\"text\": \"one\"}")]);
    let run = |name: &str, overwrite| {
        let prefix = place.dir.path().join(name);
        prepare(Prepare { overwrite, ..place.options(&prefix) })
    };
    run("q", false).unwrap();
    assert!(matches!(run("q", false), Err(Error::Data(DataError::Exists { .. }))));
    run("q", true).unwrap();
    let clash = run("p", true).unwrap_err().to_string();
    assert!(clash.ends_with("p.json: is both an input and an output: choose another output"));
    assert_eq!(fs::read_to_string(&place.inputs[0]).unwrap(), "{\"text\": \"one\"}");
}

#[test]
#[ignore = "needs the fixtures beside the repository"]
fn the_stories_of_the_fixtures_have_their_number_of_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let tokenizer = TextTokenizer::load(&fixtures().join("stories260K")).unwrap();
    let inputs = [fixtures().join("data/stories-valid.jsonl")];
    let count = |name, of_stories| figure(name, of_stories) as u64;
    let (stories, tokens) = (count("documents", 261.0), count("tokens", 93_392.0));
    // The tokenizer adds BOS to each story, and preparation EOS.
    for (append_eos, added) in [(AppendEos::Never, stories), (AppendEos::Default, 2 * stories)] {
        let prefix = dir.path().join(format!("p{added}"));
        let options = Prepare { append_eos, ..Prepare::new(&tokenizer, &inputs, &prefix) };
        let info = only(options).unwrap();
        assert_eq!((info.documents, info.tokens), (stories, tokens + added));
    }
}

/// Prepares two documents, and returns the tokens of each and the record of their end.
fn ended(
    dir: &Path,
    tokenizer: &TextTokenizer,
    append_eos: AppendEos<'_>,
) -> Result<(Vec<Vec<u32>>, DocumentEnd), Error> {
    let input = dir.join("two.jsonl");
    fs::write(&input, lines(["one", ""])).unwrap();
    let (inputs, prefix) = ([input], dir.join("two"));
    let options =
        Prepare { append_eos, overwrite: true, ..Prepare::new(tokenizer, &inputs, &prefix) };
    only(options)?;
    let end = TokenFile::open(&prefix).unwrap().info().unwrap().eos_token.clone();
    Ok((documents(&prefix), end))
}

/// Returns a tokenizer with this post-processor, and these other files in its directory.
fn with_post_processor(
    dir: &Path,
    template: Option<&[&str]>,
    files: &[(&str, &str)],
) -> TextTokenizer {
    tokenizer(dir);
    let mut json = read_json(&dir.join("tok/tokenizer.json"));
    let piece = |name: &&str| match *name {
        "text" => json!({"Sequence": {"id": "A", "type_id": 0}}),
        name => json!({"SpecialToken": {"id": name, "type_id": 0}}),
    };
    json["post_processor"] = template.map_or(Value::Null, |names| {
        let pieces: Vec<_> = names.iter().map(piece).collect();
        let token = |name: &str, id| json!({"id": name, "ids": [id], "tokens": [name]});
        json!({
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
    // An empty document without tokens is skipped, with its end.
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
    assert!(!dir.join("two.bin").exists());
    // A token that a file beside the tokenizer names is added to it.
    let other = ("special_tokens_map.json", r#"{"eos_token": {"content": "<eod>"}}"#);
    let tokenizer = with_post_processor(dir, Some(&[BEGIN_OF_TEXT, "text"]), &[other]);
    assert!(tokenizer.remarks()[0].contains("has no token \"<eod>\""), "{:?}", tokenizer.remarks());
    let (documents, end) = ended(dir, &tokenizer, AppendEos::Default).unwrap();
    assert_eq!(end, DocumentEnd::Token("<eod>".to_owned()));
    assert_eq!(documents[0].last(), tokenizer.id("<eod>").as_ref());
}

#[test]
fn older_token_files_have_no_record_of_their_end() {
    let dir = tempfile::tempdir().unwrap();
    let trained = tokenizer(dir.path());
    ended(dir.path(), &trained, AppendEos::Default).unwrap();
    let path = dir.path().join("two.json");
    edit_json(&path, |json| {
        assert_eq!(json.as_object_mut().unwrap().remove("eos_token").unwrap(), END_OF_TEXT);
    });
    let end =
        || TokenFile::open(&dir.path().join("two")).unwrap().info().unwrap().eos_token.clone();
    assert_eq!(end(), DocumentEnd::Unknown);
    edit_json(&path, |json| json["eos_token"] = Value::Null);
    assert_eq!(end(), DocumentEnd::Nothing);
    edit_json(&path, |json| json["eos_token"] = json!(1));
    assert_refused(TokenFile::open(&dir.path().join("two")), "two.json: not a valid token file");
}

#[test]
fn a_split_shares_no_document_and_loses_none() {
    let text = |number: u64| format!("document {number}");
    let place = Place::new(&[lines((0..20_000).map(text))]);
    let Place { dir, tokenizer, inputs } = &place;
    let prefix = place.prefix();
    let split = Some("0.99,0.01".parse().unwrap());
    let options = Prepare { split, overwrite: false, ..place.options(&prefix) };
    let prepared = prepare(options).unwrap().files;
    let names = ["out-train", "out-validation"].map(|name| dir.path().join(name));
    assert_eq!(prepared.iter().map(|part| part.prefix.clone()).collect::<Vec<_>>(), names);
    assert_eq!((prepared[0].info.documents, prepared[1].info.documents), (19_800, 200));
    let mut found = Vec::new();
    for PreparedFile { prefix, info } in &prepared {
        let part = texts(tokenizer, prefix);
        assert_eq!(info.text_bytes, part.iter().map(String::len).sum::<usize>() as u64);
        // Each part keeps the order of the documents.
        let number = |text: &String| text["document ".len()..].parse::<u64>().unwrap();
        assert!(part.is_sorted_by_key(number));
        found.extend(part);
    }
    found.sort();
    let mut expected: Vec<_> = (0..20_000).map(text).collect();
    expected.sort();
    assert_eq!(found, expected);

    // The same documents give the same files. If one file exists, neither is written.
    let bin = fs::read(dir.path().join("out-validation.bin")).unwrap();
    fs::remove_file(dir.path().join("out-train.bin")).unwrap();
    assert!(matches!(prepare(options), Err(Error::Data(DataError::Exists { .. }))));
    assert!(!dir.path().join("out-train.bin").exists());
    prepare(Prepare { overwrite: true, ..options }).unwrap();
    assert_eq!(fs::read(dir.path().join("out-validation.bin")).unwrap(), bin);

    fs::write(&inputs[0], lines([text(0)])).unwrap();
    let options = Prepare { overwrite: true, ..options };
    assert_refused(prepare(options), ": would have no document, of 1 in all: --format paragraphs ");
    assert_eq!(fs::read(dir.path().join("out-validation.bin")).unwrap(), bin);
}

#[test]
fn special_tokens_in_a_text_are_counted_or_encoded_as_text() {
    let text = format!("one {END_OF_TEXT} two{BEGIN_OF_TEXT}{END_OF_TEXT}");
    let mut place = Place::of([("a.txt", &text)]);
    let prefix = place.prefix();
    let ids = || documents(&prefix).concat();
    let info = only(place.options(&prefix)).unwrap();
    let counts = [(BEGIN_OF_TEXT.to_owned(), 1), (END_OF_TEXT.to_owned(), 2)];
    assert_eq!(info.special_tokens_in_text, Some(counts.into()));
    // BOS and EOS of the document itself are not in its text.
    let special = |ids: &[u32]| ids.iter().filter(|&&id| id < 2).count();
    assert_eq!(special(&ids()), 5);
    assert_eq!(TokenFile::open(&prefix).unwrap().info(), Some(&info));

    place.tokenizer = place.tokenizer.split_special_tokens(true);
    let split = only(place.options(&prefix)).unwrap();
    assert_eq!(split.special_tokens_in_text, Some([].into()));
    assert!(split.split_special_tokens && !info.split_special_tokens);
    let ids = ids();
    assert_eq!((special(&ids), ids[0], ids[ids.len() - 1]), (2, 0, 1));
    assert_eq!(place.tokenizer.decode(&ids, true).unwrap(), text);
}

#[test]
fn a_book_is_split_by_its_paragraphs() {
    let paragraphs: Vec<String> = (0..20).map(|number| format!("one {number}\ntwo")).collect();
    let place = Place::of([("book.txt", paragraphs.join("\n\n"))]);
    let (prefix, inputs) = (place.prefix(), &place.inputs);
    let split = Some("0.9,0.1".parse().unwrap());
    let options = Prepare { split, ..place.options(&prefix) };
    let error = prepare(options).unwrap_err().to_string();
    let remedy = "of 1 in all: --format paragraphs makes each paragraph of a text a document";
    assert!(error.ends_with(remedy), "{error}");
    fs::write(&inputs[0], &paragraphs[0]).unwrap();
    let options = Prepare { format: Some(Format::Paragraphs), ..options };
    assert_refused(prepare(options), "of 1 in all: add documents");
    fs::write(&inputs[0], paragraphs.join("\n\n")).unwrap();
    let prepared = prepare(options).unwrap().files;
    let documents: Vec<u64> = prepared.iter().map(|part| part.info.documents).collect();
    assert_eq!(documents, [18, 2]);
    // Document 0, as `the_division_is_pinned` has it.
    let validation = texts(&place.tokenizer, &prefix.with_file_name("out-validation"));
    assert_eq!(validation[0], paragraphs[0]);
}

#[test]
fn an_input_that_is_named_twice_is_refused() {
    let mut place = Place::of([("a.txt", "one"), ("b.txt", "one")]);
    // Two files of the same text are two files.
    assert_eq!(place.run(|_| {}).unwrap().0.files[0].info.documents, 2);
    place.inputs.push(place.dir.path().join("./a.txt"));
    assert_refused(place.run(|_| {}), "a.txt: is named twice: name it once");
}

#[test]
fn short_and_long_documents_are_left_out() {
    let place = Place::new(&[lines(["one", "one two", "one two three", "one two three one"])]);
    // Two tokens begin and end each document, and each word is one token.
    let selection = Selection { min_tokens: Some(4), max_tokens: Some(5), ..Selection::default() };
    let (prepared, texts) = place.run(|options| options.selection = selection).unwrap();
    assert_eq!(texts, ["one two", "one two three"]);
    let expected = Counts { records: 4, short: 1, long: 1, ..Counts::default() };
    assert_eq!(prepared.counts, expected);
    let selection = Selection { min_tokens: Some(100), ..Selection::default() };
    assert_refused(
        place.run(|options| options.selection = selection),
        "no document is left: the options leave all of them out",
    );
    assert!(!place.dir.path().join("out.prepare").exists());
}

#[test]
fn a_text_is_written_once_whatever_input_has_it() {
    let place = Place::new(&[lines(["one", "two", "one"]), lines(["two", "three"])]);
    let selection = Selection { exact_dedup: true, ..Selection::default() };
    let (prepared, texts) = place.run(|options| options.selection = selection).unwrap();
    assert_eq!(texts, ["one", "two", "three"]);
    assert_eq!(prepared.counts.duplicates, 2);
}

#[test]
fn a_sample_is_a_share_of_the_texts_wherever_they_lie() {
    let texts: Vec<String> = (0..2000).map(|number| format!("text {number}")).collect();
    let (forth, back) = (lines(&texts), lines(texts.iter().rev()));
    let sample = |text: &String, share, seed| {
        let sample = Some(Sample { share, seed });
        let selection = Selection { sample, ..Selection::default() };
        let place = Place::new(std::slice::from_ref(text));
        let mut texts = place.run(|options| options.selection = selection).unwrap().1;
        texts.sort();
        texts
    };
    let quarter = sample(&forth, 0.25, 1);
    assert!((430..570).contains(&quarter.len()), "{}", quarter.len());
    assert_eq!(sample(&back, 0.25, 1), quarter);
    assert_ne!(sample(&forth, 0.25, 2), quarter);
    // A larger share contains the documents of a smaller share.
    let half = sample(&forth, 0.5, 1);
    assert!(quarter.iter().all(|text| half.contains(text)));
    assert_eq!(sample(&forth, 1.0, 1).len(), 2000);
}

#[test]
fn bad_records_are_skipped_up_to_a_limit_and_listed() {
    let bad = "{\"text\": 1}\nno json\n{\"body\": \"two\"}\n";
    let place = Place::new(&[format!("{}{bad}{}", lines(["one"]), lines(["two"]))]);
    let skip = |max_share| BadRecords::Skip { max_share };
    let (prepared, texts) = place.run(|options| options.bad_records = skip(0.6)).unwrap();
    assert_eq!(texts, ["one", "two"]);
    assert_eq!((prepared.counts.records, prepared.counts.bad), (5, 3));
    let list = fs::read_to_string(prepared.bad_list.unwrap()).unwrap();
    let list: Vec<Value> = list.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(list.len(), 3);
    assert_eq!((&list[0]["line"], &list[2]["line"]), (&json!(2), &json!(4)));
    assert!(list[1]["reason"].as_str().unwrap().contains("broken JSON"), "{}", list[1]);
    assert!(list[0]["path"].as_str().unwrap().ends_with("0.jsonl"));

    assert_refused(
        place.run(|options| options.bad_records = skip(0.5)),
        "3 of 5 records are bad, 60.000% and more than --max-bad 50%",
    );
    assert_refused(place.run(|_| {}), "0.jsonl:2: the field \"text\" is not a string");
}

struct StopAfter<'a> {
    batches: usize,
    stop: &'a AtomicBool,
    notes: Vec<String>,
}

impl Observer for StopAfter<'_> {
    fn note(&mut self, sentence: &str) {
        self.notes.push(sentence.to_owned());
    }

    fn progress(&mut self, progress: Progress) {
        if progress.bytes == 0 {
            // Nothing has arrived yet.
            return;
        }
        self.batches = self.batches.saturating_sub(1);
        self.stop.store(self.batches == 0, Ordering::Relaxed);
    }
}

/// Returns inputs of several batches: long and short documents, some twice, some bad.
fn many() -> Vec<String> {
    let text = |number: usize| format!("one {} ", number % 700).repeat(1 + number * number % 400);
    let file = |file: usize| {
        let line = |number| match number % 97 {
            5 => "no document\n".to_owned(),
            _ => format!("{}\n", json!({"text": text(file * 500 + number)})),
        };
        (0..900).map(line).collect()
    };
    (0..4).map(file).collect()
}

#[test]
fn a_stopped_preparation_continues_and_ends_with_the_same_bytes() {
    let whole = Place::new(&many());
    let change = |options: &mut Prepare<'_>| {
        options.selection =
            Selection { exact_dedup: true, max_tokens: Some(2000), ..Selection::default() };
        options.bad_records = BadRecords::Skip { max_share: 0.1 };
        options.sync_every = Duration::ZERO;
    };
    let (prepared, _) = whole.run(change).unwrap();
    let place = Place::new(&many());
    let prefix = place.prefix();
    let mut options = place.options(&prefix);
    change(&mut options);
    let (mut stops, mut done) = (0, None);
    while done.is_none() {
        let stop = AtomicBool::new(false);
        let mut observer = StopAfter { batches: 1 + stops % 3, stop: &stop, notes: Vec::new() };
        done = moh_text::prepare::prepare(options, &stop, &mut observer).unwrap();
        let continued = observer.notes.iter().any(|note| note.starts_with("continues after"));
        assert_eq!(continued, stops > 0, "{:?}", observer.notes);
        stops += 1;
    }
    assert!(stops > 2, "{stops}");
    assert_eq!(done.unwrap().counts, prepared.counts);
    let read = |place: &Place, name: &str| fs::read(place.dir.path().join(name)).unwrap();
    for name in ["out.bin", "out.idx"] {
        assert!(read(&whole, name) == read(&place, name), "{name} differs");
    }
    // The lists have paths of two directories.
    let list = |place: &Place| {
        let text = String::from_utf8(read(place, "out.bad.jsonl")).unwrap();
        text.replace(&place.dir.path().display().to_string(), "")
    };
    assert_eq!(list(&whole), list(&place));
}

#[test]
fn an_input_that_changed_meanwhile_is_named_and_so_is_another_option() {
    let place = Place::new(&many());
    let prefix = place.prefix();
    let options = Prepare {
        bad_records: BadRecords::Skip { max_share: 0.1 },
        sync_every: Duration::ZERO,
        ..place.options(&prefix)
    };
    let stop = AtomicBool::new(false);
    let mut observer = StopAfter { batches: 2, stop: &stop, notes: Vec::new() };
    assert!(moh_text::prepare::prepare(options, &stop, &mut observer).unwrap().is_none());
    assert_refused(
        prepare(Prepare { field: "body", ..options }),
        "another field (\"text\", not \"body\")",
    );
    let text = fs::read_to_string(&place.inputs[0]).unwrap();
    fs::write(&place.inputs[0], format!("{text}{}", lines(["one"]))).unwrap();
    assert_refused(prepare(options), "0.jsonl: has changed since the interrupted preparation");
    let prepared = prepare(Prepare { begin_anew: true, ..options }).unwrap();
    assert!(prepared.counts.records > 3600);
}

#[test]
fn a_preparation_that_lacks_only_names_gets_them() {
    let place = Place::new(&[lines(["one", "two"]) + "no document\n"]);
    let prefix = place.prefix();
    let options = Prepare {
        bad_records: BadRecords::Skip { max_share: 0.5 },
        overwrite: false,
        ..place.options(&prefix)
    };
    // The name of the index is taken after the other files got their names.
    struct Take(PathBuf);
    impl Observer for Take {
        fn note(&mut self, _: &str) {}
        fn progress(&mut self, _: Progress) {
            fs::create_dir_all(&self.0).unwrap();
        }
    }
    let taken = place.dir.path().join("out.idx");
    let (stop, mut take) = (AtomicBool::new(false), Take(taken.clone()));
    let refused = moh_text::prepare::prepare(options, &stop, &mut take);
    assert_refused(refused, "out.idx: already exists");
    fs::remove_dir(&taken).unwrap();
    let prepared = prepare(options).unwrap();
    assert_eq!((prepared.counts.records, prepared.counts.bad), (3, 1));
    assert_eq!(fs::read_to_string(prepared.bad_list.unwrap()).unwrap().lines().count(), 1);
    assert_eq!(texts(&place.tokenizer, &prefix), ["one", "two"]);
    assert!(!place.dir.path().join("out.prepare").exists());
}
