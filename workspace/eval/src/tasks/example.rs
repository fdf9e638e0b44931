//! Task files: JSON lines with one example each, multiple choice or cloze (docs/formats.md).

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use moh_data::{JsonLine, JsonLines};
use serde_json::{Map, Value};

use crate::Error;

/// Maximum bytes of a line.
const MAX_LINE_BYTES: u64 = 16 << 20;
/// Maximum bytes of the lines of a file, which are in memory at once.
const MAX_FILE_BYTES: u64 = 4 << 30;
/// The text between context and choice where a line has no `target_delimiter`.
const DELIMITER: &str = " ";

/// The kinds of examples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskKind {
    /// The right one of several choices.
    MultipleChoice,
    /// The text that continues the context.
    Cloze,
}

impl TaskKind {
    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            TaskKind::MultipleChoice => "multiple_choice",
            TaskKind::Cloze => "cloze",
        }
    }
}

/// An example of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// The number of its line, counted from 1.
    pub line: u64,
    /// The text before each choice.
    pub context: String,
    /// The text between context and choice.
    pub delimiter: String,
    /// The choices, none of them empty; of a cloze, the answer alone.
    pub choices: Vec<String>,
    /// The right choice, counted from 0.
    pub answer: usize,
}

/// The examples of a task file, at least one, all of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskFile {
    /// The file.
    pub path: PathBuf,
    /// Their kind.
    pub kind: TaskKind,
    /// The examples.
    pub examples: Vec<Example>,
}

impl TaskFile {
    /// Reads a task file; only the first `limit` examples, if there is a limit.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is larger than 4 GiB, for a line that is no example or
    /// is of another kind than the first, and without examples.
    pub fn read(path: &Path, limit: Option<usize>) -> Result<Self, Error> {
        let io = |source| Error::from(moh_files::io(path)(source));
        let refuse = |reason: String| Err(Error::from(moh_files::unusable(path, reason)));
        let file = File::open(path).map_err(io)?;
        let mut lines = JsonLines::new(path, BufReader::new(file), MAX_LINE_BYTES);
        let (mut bytes, mut kind, mut examples) = (0, None, Vec::new());
        while limit.is_none_or(|limit| examples.len() < limit) {
            let Some(JsonLine { line, input_bytes, fields }) = lines.next_object()? else { break };
            bytes += input_bytes;
            if bytes > MAX_FILE_BYTES {
                return refuse(format!("larger than {MAX_FILE_BYTES} bytes: split it"));
            }
            let (found, example) = parse(line, fields).map_err(|reason| lines.fault(reason))?;
            match kind.replace(found) {
                Some(first) if first != found => {
                    let reason = format!(
                        "{} after {}: a file has examples of one kind",
                        found.name(),
                        first.name()
                    );
                    return Err(lines.fault(reason).into());
                }
                _ => examples.push(example),
            }
        }
        match kind {
            Some(kind) => Ok(TaskFile { path: path.to_owned(), kind, examples }),
            None => refuse("contains no examples".to_owned()),
        }
    }
}

/// The example that the fields of a line describe.
fn parse(line: u64, mut fields: Map<String, Value>) -> Result<(TaskKind, Example), String> {
    let context = match fields.remove("context") {
        Some(Value::String(context)) => context,
        Some(_) => return Err("context: must be a string".to_owned()),
        None => return Err("has no context, a string that may be empty".to_owned()),
    };
    let delimiter = match fields.remove("target_delimiter") {
        Some(Value::String(delimiter)) => delimiter,
        Some(_) => return Err("target_delimiter: must be a string".to_owned()),
        None => DELIMITER.to_owned(),
    };
    let answer = fields.remove("answer");
    let (kind, choices, answer) = match fields.remove("choices") {
        Some(choices) => {
            let choices = parse_choices(choices)?;
            let answer = parse_index(answer, choices.len())?;
            (TaskKind::MultipleChoice, choices, answer)
        }
        None => (TaskKind::Cloze, vec![parse_answer(answer)?], 0),
    };
    Ok((kind, Example { line, context, delimiter, choices, answer }))
}

fn parse_choices(choices: Value) -> Result<Vec<String>, String> {
    let Value::Array(choices) = choices else {
        return Err("choices: must be a list of strings".to_owned());
    };
    if choices.len() < 2 {
        return Err(format!("choices: has {}, must have 2 or more", choices.len()));
    }
    let text = |(index, choice)| match choice {
        Value::String(choice) if !choice.is_empty() => Ok(choice),
        Value::String(_) => Err(format!("choices[{index}]: is empty, every choice needs a text")),
        _ => Err(format!("choices[{index}]: must be a string")),
    };
    choices.into_iter().enumerate().map(text).collect()
}

/// The index of the right one of `count` choices.
fn parse_index(answer: Option<Value>, count: usize) -> Result<usize, String> {
    let expected = format!("must be the index of the right choice, 0 to {}", count - 1);
    let Some(answer) = answer else { return Err(format!("has no answer, which {expected}")) };
    let index = answer.as_u64().and_then(|index| usize::try_from(index).ok());
    match index.filter(|&index| index < count) {
        Some(index) => Ok(index),
        None if answer.is_number() => Err(format!("answer = {answer}: {expected}")),
        None => Err(format!("answer: {expected}")),
    }
}

/// The answer of a cloze.
fn parse_answer(answer: Option<Value>) -> Result<String, String> {
    match answer {
        Some(Value::String(answer)) if !answer.is_empty() => Ok(answer),
        Some(Value::String(_)) => Err("answer: is empty, a cloze needs a text".to_owned()),
        Some(Value::Number(_)) => Err("has an answer by number, but no choices".to_owned()),
        Some(_) => Err("answer: must be a string, or with choices a number".to_owned()),
        None => Err("has no answer: a text, or with choices the index of the right one".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(bytes: &[u8]) -> Result<TaskFile, String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("task.jsonl");
        std::fs::write(&path, bytes).unwrap();
        let shown = format!("{}", dir.path().join("").display());
        TaskFile::read(&path, None).map_err(|error| error.to_string().replace(&shown, ""))
    }

    #[test]
    fn both_kinds_are_read() {
        let choice = r#"{"context": "a", "choices": ["b", "c d"], "answer": 1, "id": 7}"#;
        let file = read(format!("\n{choice}\r\n").as_bytes()).unwrap();
        assert_eq!(file.kind, TaskKind::MultipleChoice);
        let choices = vec!["b".to_owned(), "c d".to_owned()];
        let (context, delimiter) = ("a".to_owned(), " ".to_owned());
        assert_eq!(file.examples, [Example { line: 2, context, delimiter, choices, answer: 1 }]);
        let cloze = r#"{"context": "", "answer": "b", "target_delimiter": ""}"#;
        let file = read(format!("{cloze}\n{cloze}").as_bytes()).unwrap();
        assert_eq!((file.kind, file.examples.len()), (TaskKind::Cloze, 2));
        let second = &file.examples[1];
        assert_eq!((second.delimiter.as_str(), second.line, second.answer), ("", 2, 0));
        assert_eq!(second.choices, ["b"]);
    }

    #[test]
    fn a_limit_leaves_the_rest_unread() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("task.jsonl");
        std::fs::write(&path, "{\"context\": \"\", \"answer\": \"a\"}\nnot read").unwrap();
        assert_eq!(TaskFile::read(&path, Some(1)).unwrap().examples.len(), 1);
        let error = TaskFile::read(&path, Some(2)).unwrap_err().to_string();
        assert!(error.contains("task.jsonl:2: broken JSON at column"), "{error}");
    }

    #[test]
    fn each_fault_names_its_line() {
        let good = r#"{"context": "a", "choices": ["b", "c"], "answer": 0}"#;
        let index = "must be the index of the right choice, 0 to 1";
        for (line, expected) in [
            ("{\"context\": \"a", "broken JSON at column"),
            ("[1]", "expected one JSON object per line"),
            ("{}", "has no context, a string that may be empty"),
            (r#"{"context": 1}"#, "context: must be a string"),
            (
                r#"{"context": "", "answer": "b", "target_delimiter": 1}"#,
                "target_delimiter: must be",
            ),
            (r#"{"context": "", "choices": "ab", "answer": 0}"#, "choices: must be a list of str"),
            (
                r#"{"context": "", "choices": [], "answer": 0}"#,
                "choices: has 0, must have 2 or more",
            ),
            (r#"{"context": "", "choices": ["a"], "answer": 0}"#, "choices: has 1, must have"),
            (
                r#"{"context": "", "choices": ["a", ""], "answer": 0}"#,
                "choices[1]: is empty, every",
            ),
            (
                r#"{"context": "", "choices": [1, "a"], "answer": 0}"#,
                "choices[0]: must be a string",
            ),
            (r#"{"context": "", "choices": ["a", "b"]}"#, &format!("has no answer, which {index}")),
            (
                r#"{"context": "", "choices": ["a", "b"], "answer": 2}"#,
                &format!("answer = 2: {index}"),
            ),
            (r#"{"context": "", "choices": ["a", "b"], "answer": -1}"#, "answer = -1: must be"),
            (r#"{"context": "", "choices": ["a", "b"], "answer": 0.5}"#, "answer = 0.5: must be"),
            (
                r#"{"context": "", "choices": ["a", "b"], "answer": "a"}"#,
                &format!("answer: {index}"),
            ),
            (r#"{"context": ""}"#, "has no answer: a text, or with choices the index"),
            (r#"{"context": "", "answer": ""}"#, "answer: is empty, a cloze needs a text"),
            (r#"{"context": "", "answer": 1}"#, "has an answer by number, but no choices"),
            (r#"{"context": "", "answer": ["a"]}"#, "answer: must be a string, or with choices"),
            (r#"{"context": "", "answer": "a"}"#, "cloze after multiple_choice: a file has"),
        ] {
            let error = read(format!("{good}\n{line}\n").as_bytes()).unwrap_err();
            assert!(error.starts_with("task.jsonl:2: "), "{error}");
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(read(b"").unwrap_err(), "task.jsonl: contains no examples");
        assert_eq!(read(b"\n \n").unwrap_err(), "task.jsonl: contains no examples");
        let error = read(b"{\"context\": \"\xff\"}").unwrap_err();
        assert!(error.contains("task.jsonl:1: not UTF-8 at byte 13"), "{error}");
        let mut long = vec![b' '; (16 << 20) + 1];
        long.push(b'\n');
        let error = read(&long).unwrap_err();
        assert!(error.starts_with("task.jsonl:1: longer than 16777216 bytes"), "{error}");
        let error = TaskFile::read(Path::new("none.jsonl"), None).unwrap_err().to_string();
        assert!(error.starts_with("none.jsonl: No such file"), "{error}");
    }

    proptest! {
        #[test]
        fn a_cut_or_changed_file_is_read_or_refused(at in 0usize..80, byte: u8, cut: bool) {
            let mut bytes =
                b"{\"context\": \"a b\", \"choices\": [\"c\", \"d e\"], \"answer\": 1}\n".to_vec();
            let at = at.min(bytes.len() - 1);
            if cut { bytes.truncate(at) } else { bytes[at] = byte }
            if let Ok(file) = read(&bytes) {
                let example = &file.examples[0];
                prop_assert!(example.answer < example.choices.len());
            }
        }
    }
}
