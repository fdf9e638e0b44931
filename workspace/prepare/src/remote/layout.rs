//! The splits of a dataset by the names of its data files, as Hugging Face's library datasets finds them: shards
//! `data/SPLIT-00000-of-00005.parquet`; else folders, else files whose names have a keyword of a split as a whole
//! word; else all of them are the split train.

use moh_hub::RemoteFile;

use super::front_matter::TRAIN;
use super::split::Splits;
use crate::names::{is_data, without_compression};

/// The keywords of each split.
const KEYWORDS: [(&str, &[&str]); 3] = [
    (TRAIN, &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];
/// Files that describe a dataset.
const DESCRIPTIONS: [&str; 5] =
    ["config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"];

/// The data files of the repository's folder `folder`, `""` for its top, by split. There is no split without files.
pub(crate) fn splits(files: &[RemoteFile], folder: &str) -> Splits {
    let start = if folder.is_empty() { String::new() } else { format!("{folder}/") };
    let data: Vec<_> = files
        .iter()
        .filter(|file| is_data_file(&file.name))
        .filter_map(|file| Some((file, file.name.strip_prefix(&start)?)))
        .collect();
    let mut splits: Splits = Vec::new();
    for (file, name) in &data {
        if let Some(split) = shard_of(name) {
            add(&mut splits, split, file);
        }
    }
    let by_keyword: [fn(&str) -> &str; 2] = [folders_of, name_of];
    for part in by_keyword {
        if !splits.is_empty() {
            break;
        }
        for (split, keywords) in KEYWORDS {
            for (file, name) in &data {
                let mut words = part(name).split(['/', '-', '.', '_', ' ']).flat_map(split_digits);
                if words.any(|word| keywords.contains(&word)) {
                    add(&mut splits, split, file);
                }
            }
        }
    }
    if splits.is_empty() {
        data.iter().for_each(|(file, _)| add(&mut splits, TRAIN, file));
    }
    // Training first, as datasets names them.
    splits.sort_by_key(|(split, _)| {
        let known = KEYWORDS.iter().position(|(known, _)| known == split);
        (known.unwrap_or(KEYWORDS.len()), split.clone())
    });
    for (_, files) in &mut splits {
        *files = of_one_kind(std::mem::take(files));
    }
    splits
}

/// Whether a file of a repository holds data by its name: those that are hidden or begin with `_`, and descriptions
/// do not.
pub(crate) fn is_data_file(name: &str) -> bool {
    let is_open = |part: &str| !part.starts_with(['.', '_']);
    is_data(name.as_ref()) && name.split('/').all(is_open) && !DESCRIPTIONS.contains(&name_of(name))
}

/// The files of the most frequent kind: a repository of Parquet files may have a licence in plain text.
fn of_one_kind(files: Vec<RemoteFile>) -> Vec<RemoteFile> {
    // In a tie the first one.
    const KINDS: [&[&str]; 4] = [&["parquet"], &["arrow"], &["jsonl", "json", "ndjson"], &["txt"]];
    let kind = |file: &RemoteFile| {
        let ending = without_compression(file.name.as_ref()).extension()?.to_str()?.to_lowercase();
        KINDS.iter().position(|kind| kind.contains(&ending.as_str()))
    };
    let count = |number: &usize| files.iter().filter(|file| kind(file) == Some(*number)).count();
    let Some(most) = (0..KINDS.len()).rev().max_by_key(count) else { return files };
    files.into_iter().filter(|file| kind(file) == Some(most)).collect()
}

fn add(splits: &mut Splits, split: &str, file: &RemoteFile) {
    match splits.iter_mut().find(|(known, _)| known == split) {
        Some((_, files)) => files.push(file.clone()),
        None => splits.push((split.to_owned(), vec![file.clone()])),
    }
}

/// The split of a shard `data/SPLIT-00000-of-00005.parquet`, with or without more before its ending.
fn shard_of(name: &str) -> Option<&str> {
    let name = name.strip_prefix("data/")?;
    let (split, rest) = name.rsplit_once("-of-")?;
    let (split, number) = split.rsplit_once('-')?;
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let total = rest.get(..5)?;
    let is_shard = is_number(number) && is_number(total) && rest[5..].contains('.');
    (is_shard && !split.is_empty() && !name.contains('/')).then_some(split)
}

fn folders_of(name: &str) -> &str {
    name.rsplit_once('/').map_or("", |(folders, _)| folders)
}

fn name_of(name: &str) -> &str {
    name.rsplit_once('/').map_or(name, |(_, name)| name)
}

/// Digits separate words too: `train2` is of the split train.
fn split_digits(word: &str) -> impl Iterator<Item = &str> {
    word.split(|c: char| c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(names: &[&str], folder: &str) -> Vec<(String, Vec<String>)> {
        let file =
            |name: &&str| RemoteFile { name: (*name).to_owned(), size: 1, blob: "0".to_owned() };
        let files: Vec<_> = names.iter().map(file).collect();
        let names = |files: Vec<RemoteFile>| files.into_iter().map(|file| file.name).collect();
        splits(&files, folder).into_iter().map(|(split, files)| (split, names(files))).collect()
    }

    fn shown(names: &[&str], folder: &str) -> String {
        let splits = of(names, folder).into_iter();
        let text = splits.map(|(split, files)| format!("{split}: {}", files.join(" ")));
        text.collect::<Vec<_>>().join("; ")
    }

    #[test]
    fn shards_name_any_split() {
        let names = [
            "README.md",
            "data/train-00000-of-00002.parquet",
            "data/train-00001-of-00002-a1b2.parquet",
            "data/extra-00000-of-00001.parquet",
            "data/notes.txt",
        ];
        let expected = "train: data/train-00000-of-00002.parquet data/train-00001-of-00002-a1b2.parquet; \
                        extra: data/extra-00000-of-00001.parquet";
        assert_eq!(shown(&names, ""), expected);
    }

    #[test]
    fn folders_come_before_names() {
        let names = ["train/00.jsonl.zst", "train/01.jsonl.zst", "val.jsonl.zst", "test.jsonl.zst"];
        assert_eq!(shown(&names, ""), "train: train/00.jsonl.zst train/01.jsonl.zst");
        let names = ["a/my-valid_set/x.json", "a/test2/y.json", "a/trainer/z.json"];
        assert_eq!(shown(&names, ""), "validation: a/my-valid_set/x.json; test: a/test2/y.json");
    }

    #[test]
    fn a_keyword_is_a_whole_word_of_a_name() {
        let names =
            ["train.jsonl", "deval.jsonl", "x_dev.jsonl", "evaluation-1.jsonl", "strain.jsonl"];
        let expected = "train: train.jsonl; validation: x_dev.jsonl; test: evaluation-1.jsonl";
        assert_eq!(shown(&names, ""), expected);
        assert_eq!(shown(&["training 2.txt"], ""), "train: training 2.txt");
        assert_eq!(shown(&["train3.txt"], ""), "train: train3.txt");
    }

    #[test]
    fn without_keywords_all_data_files_are_training() {
        let names = [
            "b.parquet",
            "c.parquet",
            "LICENSE.txt",
            "dataset_infos.json",
            ".x/d.parquet",
            "x.csv",
        ];
        assert_eq!(shown(&names, ""), "train: b.parquet c.parquet");
        assert_eq!(shown(&["a.jsonl.gz", "b.txt"], ""), "train: a.jsonl.gz");
        assert_eq!(shown(&["README.md", "x.csv"], ""), "");
    }

    #[test]
    fn names_are_relative_to_the_folder() {
        let names = ["train/en/a.txt", "train/de/b.txt", "test/en/c.txt"];
        assert_eq!(shown(&names, "train"), "train: train/en/a.txt train/de/b.txt");
        assert_eq!(shown(&names, "test/en"), "train: test/en/c.txt");
    }
}
