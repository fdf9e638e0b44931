//! Inputs from an object store on the loopback interface, by `moh-data` as a process: with the feature
//! `object-store`, and without it the error that names the feature.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

const PROGRAM: &str = env!("CARGO_BIN_EXE_moh-data");

/// A bucket `b`, with what its server does.
#[derive(Default)]
struct Bucket {
    objects: BTreeMap<String, Vec<u8>>,
    /// What is behind the tag of every object.
    version: u32,
    /// Connections that end in the middle of an object.
    breaks: usize,
    /// The beginning of the request after which all objects are other ones.
    changes_after: Option<&'static str>,
    /// Whether an answer has half of an object, as if that were all of it.
    halves: bool,
    is_forbidden: bool,
    log: Vec<String>,
}

struct Place {
    dir: tempfile::TempDir,
    endpoint: String,
    bucket: Arc<Mutex<Bucket>>,
}

fn lines(name: &str, count: usize) -> Vec<u8> {
    let line = |n: usize| format!("{{\"text\": \"{name} one two three {n}\"}}\n");
    (0..count).map(line).collect::<String>().into_bytes()
}

impl Place {
    fn new(names: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let objects = names.iter().map(|name| ((*name).to_owned(), lines(name, 500))).collect();
        let bucket = Arc::new(Mutex::new(Bucket { objects, ..Bucket::default() }));
        let shared = Arc::clone(&bucket);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                std::thread::spawn(move || answer(stream, &shared));
            }
        });
        let place = Self { dir: tempfile::tempdir().unwrap(), endpoint, bucket };
        fs::write(place.dir.path().join("words.jsonl"), lines("words", 200)).unwrap();
        assert!(place.run("tokenizer --vocab-size 300 --out tok words.jsonl").status.success());
        place
    }

    fn run(&self, line: &str) -> Output {
        let mut command = Command::new(PROGRAM);
        command.current_dir(self.dir.path()).args(line.split_whitespace());
        command.env("AWS_ENDPOINT", &self.endpoint).env("AWS_ALLOW_HTTP", "true");
        command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "secret");
        command.env("AWS_REGION", "us-east-1").env_remove("AWS_SESSION_TOKEN").output().unwrap()
    }

    /// Prepares the token file `out`, and returns the error's sentence if it fails.
    fn prepare(&self, inputs: &str) -> Result<(), String> {
        let output = self.run(&format!("prepare --tokenizer tok --force --out out {inputs}"));
        let text = String::from_utf8(output.stderr).unwrap();
        match output.status.success() {
            true => Ok(()),
            false => Err(text.trim_end().lines().last().unwrap().to_owned()),
        }
    }
}

/// Lists, in S3's version 2, and serves objects, from a byte on if a range is asked for.
fn answer(mut stream: TcpStream, bucket: &Mutex<Bucket>) -> Option<()> {
    let mut reader = BufReader::new(stream.try_clone().ok()?);
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim() {
            "" => break,
            line => head.push(line.to_owned()),
        }
    }
    let mut request = head.first()?.split(' ');
    let (method, target) = (request.next()?, request.next()?);
    let header = |name: &str| {
        let found = head.iter().find(|line| line.to_lowercase().starts_with(name))?;
        Some(found.split_once(": ")?.1.to_owned())
    };
    let from: Option<usize> = header("range:")
        .and_then(|range| range.strip_prefix("bytes=")?.trim_end_matches('-').parse().ok());
    let mut bucket = bucket.lock().unwrap();
    bucket.log.push(format!("{method} {target} {from:?}"));
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let tag = format!("\"{}\"", bucket.version);
    let is_changed = header("if-match:").is_some_and(|wanted| wanted != tag);
    let name = path.strip_prefix("/b")?.trim_start_matches('/');
    let len = |bytes: &[u8]| if bucket.halves { bytes.len() / 2 } else { bytes.len() };
    let (status, body) = match bucket.objects.get(name) {
        _ if bucket.is_forbidden => (403, b"<Error><Code>AccessDenied</Code></Error>".to_vec()),
        Some(_) if is_changed => (412, Vec::new()),
        Some(bytes) if from.is_some_and(|from| from >= len(bytes)) => (416, Vec::new()),
        Some(bytes) => (from.map_or(200, |_| 206), bytes[from.unwrap_or(0)..len(bytes)].to_vec()),
        None if name.is_empty() => (200, list(&bucket, query, &tag).into_bytes()),
        None => (404, b"<Error><Code>NoSuchKey</Code></Error>".to_vec()),
    };
    let mut sent = body.len();
    if method == "GET" && !name.is_empty() && status < 300 && bucket.breaks > 0 {
        bucket.breaks -= 1;
        sent /= 2;
    }
    let request = format!("{method} {target}");
    if bucket.changes_after.is_some_and(|start| request.starts_with(start)) {
        bucket.changes_after = None;
        bucket.version += 1;
        bucket.objects.values_mut().for_each(|bytes| *bytes = lines("other", 300));
    }
    let range = from.filter(|_| status == 206).map_or(String::new(), |from| {
        let total = from + body.len();
        format!("Content-Range: bytes {from}-{}/{total}\r\n", total - 1)
    });
    drop(bucket);
    let head = format!(
        "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\nETag: {tag}\r\n{range}\
         Last-Modified: Wed, 21 Oct 2026 07:28:00 GMT\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).ok()?;
    if method != "HEAD" {
        stream.write_all(&body[..sent]).ok()?;
    }
    stream.flush().ok()
}

/// The objects whose names begin with the query's `prefix`, but for those below with a `delimiter`.
fn list(bucket: &Bucket, query: &str, tag: &str) -> String {
    let value = |name: &str| {
        let found = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        found.unwrap_or("").replace("%2F", "/")
    };
    let (prefix, has_delimiter) = (value("prefix"), !value("delimiter").is_empty());
    let objects = bucket.objects.iter().filter(|(name, _)| {
        let rest = name.strip_prefix(&prefix);
        rest.is_some_and(|rest| !has_delimiter || !rest.contains('/'))
    });
    let entry = |(name, bytes): (&String, &Vec<u8>)| {
        format!(
            "<Contents><Key>{name}</Key><LastModified>2026-10-21T07:28:00.000Z</LastModified>\
             <ETag>{}</ETag><Size>{}</Size></Contents>",
            tag.replace('"', "&quot;"),
            bytes.len()
        )
    };
    format!("<ListBucketResult>{}</ListBucketResult>", objects.map(entry).collect::<String>())
}

#[cfg(not(feature = "object-store"))]
#[test]
fn without_the_feature_an_error_names_it() {
    let place = Place::new(&["data/a.jsonl"]);
    for name in ["s3://b/data/*.jsonl", "gs://b/x", "az://b/x", "abfs://b/x"] {
        let error = place.prepare(name).unwrap_err();
        let expected =
            format!("error: {name}: this program was built without object stores: build it with");
        assert!(
            error.starts_with(&expected) && error.contains("--features object-store"),
            "{error}"
        );
    }
    let bucket = place.bucket.lock().unwrap();
    assert!(bucket.log.is_empty() && bucket.objects.len() == 1);
}

#[cfg(feature = "object-store")]
mod with_the_feature {
    use std::path::Path;

    use super::*;

    #[test]
    fn objects_are_read_as_files_and_removed_after_use() {
        let names =
            ["data/a.jsonl", "data/b.jsonl", "data/deep/c.jsonl", "data/README.md", "x.jsonl"];
        let place = Place::new(&names);
        let path = |name: &str| place.dir.path().join(name);
        place.bucket.lock().unwrap().breaks = 2;
        place.prepare("words.jsonl s3://b/data/*.jsonl").unwrap();
        let record: serde_json::Value =
            serde_json::from_slice(&fs::read(path("out.json")).unwrap()).unwrap();
        assert_eq!(
            record["sources"],
            serde_json::json!(["words.jsonl", "s3://b/data/a.jsonl", "s3://b/data/b.jsonl"])
        );
        let remote = fs::read(path("out.bin")).unwrap();
        for name in ["a.jsonl", "b.jsonl"] {
            fs::write(path(name), &place.bucket.lock().unwrap().objects[&format!("data/{name}")])
                .unwrap();
        }
        place.prepare("words.jsonl a.jsonl b.jsonl").unwrap();
        assert_eq!(fs::read(path("out.bin")).unwrap(), remote);
        assert!(!path("out.prepare").exists());
        // A name below which objects are stands for those with data, and one object for itself.
        place.prepare("s3://b/data").unwrap();
        place.prepare("s3://b/x.jsonl").unwrap();
        let log = &place.bucket.lock().unwrap().log;
        assert!(log.iter().any(|line| line.contains("data/deep/c.jsonl")));
        assert!(!log.iter().any(|line| line.starts_with("GET /b/data/README.md")));
    }

    /// The files in and below a directory; none if it is not there.
    fn files_below(dir: &Path) -> Vec<String> {
        let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
        let paths = entries.map(|entry| entry.unwrap().path());
        paths
            .flat_map(|path| match path.is_dir() {
                true => files_below(&path),
                false => vec![path.file_name().unwrap().to_str().unwrap().to_owned()],
            })
            .collect()
    }

    /// Prepares objects of a bucket that fails, and returns the sentence; then those of one that does not.
    fn fails_once(place: &Place, repair: impl Fn(&mut Bucket)) -> String {
        let path = |name: &str| place.dir.path().join(name);
        for ending in ["bin", "idx", "json"] {
            // Of an earlier preparation.
            let _ = fs::remove_file(path(&format!("out.{ending}")));
        }
        let error = place.prepare("s3://b/data/*.jsonl").unwrap_err();
        for ending in ["bin", "idx", "json"] {
            assert!(!path(&format!("out.{ending}")).exists(), "{error}");
        }
        let left = files_below(&path("out.prepare/downloads"));
        assert!(left.iter().all(|name| name.ends_with(".incomplete")), "{error}: {left:?}");
        repair(&mut place.bucket.lock().unwrap());
        place.prepare("s3://b/data/*.jsonl").unwrap();
        let remote = fs::read(path("out.bin")).unwrap();
        fs::write(path("a.jsonl"), &place.bucket.lock().unwrap().objects["data/a.jsonl"]).unwrap();
        place.prepare("a.jsonl").unwrap();
        assert!(fs::read(path("out.bin")).unwrap() == remote, "{error}");
        assert!(!path("out.prepare").exists());
        error
    }

    #[test]
    fn an_object_that_changes_after_it_was_listed_is_named() {
        for (changes_after, breaks) in [("GET /b?", 0), ("GET /b/data/a.jsonl", 1)] {
            let place = Place::new(&["data/a.jsonl"]);
            let mut bucket = place.bucket.lock().unwrap();
            (bucket.changes_after, bucket.breaks) = (Some(changes_after), breaks);
            drop(bucket);
            let error = fails_once(&place, |bucket| assert_eq!(bucket.version, 1));
            let expected = "error: s3://b/data/a.jsonl: has changed since it was listed: give the same command again";
            assert_eq!(error, expected, "{changes_after}");
        }
    }

    #[test]
    fn an_answer_that_ends_early_is_no_object() {
        let place = Place::new(&["data/a.jsonl"]);
        place.bucket.lock().unwrap().halves = true;
        let size = place.bucket.lock().unwrap().objects["data/a.jsonl"].len();
        let error = fails_once(&place, |bucket| bucket.halves = false);
        let reason =
            format!("has {} bytes instead of {size}: give the same command again", size / 2);
        assert_eq!(error, format!("error: s3://b/data/a.jsonl: {reason}"));
        // Nor is one whose connection ends, but what has arrived is continued.
        let mut bucket = place.bucket.lock().unwrap();
        bucket.breaks = usize::MAX;
        bucket.objects.insert("data/a.jsonl".to_owned(), lines("a", 2));
        drop(bucket);
        let error = fails_once(&place, |bucket| (bucket.breaks, bucket.log) = (0, Vec::new()));
        assert!(error.starts_with("error: s3://b/data/a.jsonl: Generic S3 error: "), "{error}");
        assert!(error.ends_with("the network, and give the same command again"), "{error}");
        let log = &place.bucket.lock().unwrap().log;
        let of_object = |line: &&String| line.starts_with("GET /b/data/a.jsonl");
        assert!(log.iter().filter(of_object).all(|line| line.contains("Some(")), "{log:?}");
    }

    #[test]
    fn what_a_bucket_lacks_is_one_sentence() {
        let place = Place::new(&["data/a.jsonl"]);
        let error = place.prepare("s3://b/data/*.txt").unwrap_err();
        let expected =
            "error: s3://b/data/*.txt: the pattern matches no object: data has data/a.jsonl";
        assert_eq!(error, expected);
        let error = place.prepare("s3://b/none").unwrap_err();
        assert!(
            error
                .contains("there is no such object, nor data below that name: none has no objects"),
            "{error}"
        );
        place.bucket.lock().unwrap().is_forbidden = true;
        let error = place.prepare("s3://b/data/*.jsonl").unwrap_err();
        assert!(
            error
                .starts_with("error: s3://b/data/*.jsonl: access is denied: set AWS_ACCESS_KEY_ID"),
            "{error}"
        );
    }
}
