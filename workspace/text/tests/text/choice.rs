//! Which documents are written, and what becomes of records that are none.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use moh_data::TokenFile;
use moh_text::TextTokenizer;
use moh_text::prepare::{
    BadRecords, Counts, Error, Observer, Prepare, Prepared, Progress, Sample, Selection, prepare,
};
use serde_json::json;

use moh_testkit::small_tokenizer::{WORDS, write_tokenizer};

/// A directory with a tokenizer and inputs of JSON lines.
struct Place {
    dir: tempfile::TempDir,
    tokenizer: TextTokenizer,
    inputs: Vec<PathBuf>,
}

impl Place {
    fn new(inputs: &[String]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_tokenizer(&dir.path().join("tok"), &WORDS);
        let tokenizer = TextTokenizer::load(&dir.path().join("tok")).unwrap();
        let path = |number| dir.path().join(format!("{number}.jsonl"));
        for (number, text) in inputs.iter().enumerate() {
            fs::write(path(number), text).unwrap();
        }
        let inputs = (0..inputs.len()).map(path).collect();
        Self { dir, tokenizer, inputs }
    }

    fn prefix(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    fn options<'a>(&'a self, prefix: &'a Path) -> Prepare<'a> {
        Prepare { overwrite: true, ..Prepare::new(&self.tokenizer, &self.inputs, prefix) }
    }

    /// Prepares with a change of the options, and returns the texts that were written too.
    fn run(&self, change: impl FnOnce(&mut Prepare<'_>)) -> Result<(Prepared, Vec<String>), Error> {
        let prefix = self.prefix();
        let mut options = self.options(&prefix);
        change(&mut options);
        let prepared = prepare(options, &AtomicBool::new(false), &mut ())?.unwrap();
        Ok((prepared, self.texts()))
    }

    /// The texts of the token file.
    fn texts(&self) -> Vec<String> {
        let file = TokenFile::open(&self.prefix()).unwrap();
        let text = |number| {
            let range = file.document(number).unwrap();
            let mut ids = vec![0; (range.end - range.start) as usize];
            file.read(range.start, &mut ids).unwrap();
            self.tokenizer.decode(&ids, true).unwrap()
        };
        (0..file.num_documents()).map(text).collect()
    }
}

fn lines<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    texts.into_iter().map(|text| format!("{}\n", json!({"text": text}))).collect()
}

#[test]
fn short_and_long_documents_are_left_out() {
    let place = Place::new(&[lines(["one", "one two", "one two three", "one two three one"])]);
    // Two tokens begin and end each document, and each word is one.
    let selection = Selection { min_tokens: Some(4), max_tokens: Some(5), ..Selection::default() };
    let (prepared, texts) = place.run(|options| options.selection = selection).unwrap();
    assert_eq!(texts, ["one two", "one two three"]);
    let expected = Counts { records: 4, short: 1, long: 1, ..Counts::default() };
    assert_eq!(prepared.counts, expected);
    let selection = Selection { min_tokens: Some(100), ..Selection::default() };
    let error = place.run(|options| options.selection = selection).unwrap_err().to_string();
    assert!(error.contains("no document is left: the options leave all of them out"), "{error}");
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
    let forth = lines(texts.iter().map(String::as_str));
    let back = lines(texts.iter().rev().map(String::as_str));
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
    // A larger share has the smaller one's documents.
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
    let list: Vec<serde_json::Value> =
        list.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(list.len(), 3);
    assert_eq!((&list[0]["line"], &list[2]["line"]), (&json!(2), &json!(4)));
    assert!(list[1]["reason"].as_str().unwrap().contains("broken JSON"), "{}", list[1]);
    assert!(list[0]["path"].as_str().unwrap().ends_with("0.jsonl"));

    let error = place.run(|options| options.bad_records = skip(0.5)).unwrap_err().to_string();
    assert!(error.contains("3 of 5 records are bad, 60.000% and more than --max-bad 50%"));
    let error = place.run(|_| {}).unwrap_err().to_string();
    assert!(error.contains("0.jsonl:2: the field \"text\" is not a string"), "{error}");
}

/// Stops a preparation after some batches.
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
        if progress.reading.bytes == 0 {
            // Nothing has arrived yet.
            return;
        }
        self.batches = self.batches.saturating_sub(1);
        self.stop.store(self.batches == 0, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Inputs of several batches: long and short documents, some twice, some bad.
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
        done = prepare(options, &stop, &mut observer).unwrap();
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
    // The paths in the list are those of two directories.
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
    assert!(prepare(options, &stop, &mut observer).unwrap().is_none());
    let again = |options| prepare(options, &AtomicBool::new(false), &mut ());
    let error = again(Prepare { field: "body", ..options }).unwrap_err().to_string();
    assert!(error.contains("another field (\"text\", not \"body\")"), "{error}");
    let text = fs::read_to_string(&place.inputs[0]).unwrap();
    fs::write(&place.inputs[0], format!("{text}{}", lines(["one"]))).unwrap();
    let error = again(options).unwrap_err().to_string();
    assert!(error.contains("0.jsonl: has changed since the interrupted preparation"), "{error}");
    let prepared = again(Prepare { begin_anew: true, ..options }).unwrap().unwrap();
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
    // The name of the index is taken when the others have theirs.
    struct Take(PathBuf);
    impl Observer for Take {
        fn note(&mut self, _: &str) {}
        fn progress(&mut self, _: Progress) {
            fs::create_dir_all(&self.0).unwrap();
        }
    }
    let taken = place.dir.path().join("out.idx");
    let error = prepare(options, &AtomicBool::new(false), &mut Take(taken.clone())).unwrap_err();
    assert!(error.to_string().contains("out.idx: already exists"), "{error}");
    fs::remove_dir(&taken).unwrap();
    let prepared = prepare(options, &AtomicBool::new(false), &mut ()).unwrap().unwrap();
    assert_eq!((prepared.counts.records, prepared.counts.bad), (3, 1));
    assert_eq!(fs::read_to_string(prepared.bad_list.unwrap()).unwrap().lines().count(), 1);
    assert_eq!(place.texts(), ["one", "two"]);
    assert!(!place.dir.path().join("out.prepare").exists());
}
