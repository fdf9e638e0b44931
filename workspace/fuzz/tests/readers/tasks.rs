//! Task files of `moh-eval tasks`.

use moh_eval::tasks::TaskFile;
use moh_fuzz::Target;

use crate::{ALLOCATOR, outcome};

#[test]
fn a_mutated_task_file_is_read_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("task.jsonl");
    let choice =
        "{\"context\": \"One day\", \"choices\": [\"a boat.\", \"\\u00e4.\"], \"answer\": 1}\n";
    let cloze = "{\"context\": \"\", \"answer\": \"boat\", \"target_delimiter\": \"\\n\"}\n";
    let seeds = [choice.repeat(2).into_bytes(), cloze.as_bytes().to_vec()];
    // The reader's buffer, and a megabyte of values, each of them many times as large as its text.
    let target = Target { name: "tasks", seeds: &seeds, memory: 96 << 20, allocator: &ALLOCATOR };
    target.run(|input| {
        std::fs::write(&path, input).unwrap();
        let read = TaskFile::read(&path, None);
        if let Ok(file) = &read {
            assert!(file.examples.iter().all(|example| example.answer < example.choices.len()));
        }
        outcome(read)
    });
}
