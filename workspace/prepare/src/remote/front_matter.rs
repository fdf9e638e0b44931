//! The configurations that a dataset's README declares: `configs` of its front matter, which is YAML between two
//! lines `---`. The text is anyone's: its size, depth and aliases are limited.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_saphyr::{DuplicateKeyPolicy, Options};

/// Maximum bytes of a README that is read; those with thousands of configurations have megabytes.
pub(crate) const MAX_BYTES: u64 = 8 << 20;
/// The split of data files that name none.
pub(crate) const TRAIN: &str = "train";

/// A configuration of a dataset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) name: String,
    /// Whether it is the one if none is named.
    pub(crate) is_default: bool,
    /// The folder that patterns and names are relative to, empty for the top.
    pub(crate) folder: String,
    /// The patterns of each split's files; `None` if the names of the files tell.
    pub(crate) splits: Option<BTreeMap<String, Vec<String>>>,
}

#[derive(Deserialize)]
struct FrontMatter {
    configs: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    config_name: Option<String>,
    data_files: Option<DataFiles>,
    data_dir: Option<String>,
    default: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum DataFiles {
    Pattern(String),
    List(Vec<Item>),
    Splits(BTreeMap<String, Patterns>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Item {
    Pattern(String),
    Split { split: String, path: Patterns },
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Patterns {
    One(String),
    Many(Vec<String>),
}

/// The configurations that a README declares; none if it has no front matter.
///
/// # Errors
/// Says what is wrong with its front matter.
pub(crate) fn configs(readme: &[u8]) -> Result<Vec<Config>, String> {
    if readme.len() as u64 > MAX_BYTES {
        return Err(format!("has more than {MAX_BYTES} bytes"));
    }
    let text = String::from_utf8_lossy(readme);
    let Some(text) = front_matter(&text) else { return Ok(Vec::new()) };
    let options = serde_saphyr::options! {
        // The defaults are made for the configuration of programs, which repeats more of itself.
        budget: serde_saphyr::budget! {
            max_aliases: 1_000,
            max_anchors: 1_000,
            max_recorded_anchor_events: 100_000,
            max_recorded_anchor_bytes: 1 << 20,
            max_total_scalar_bytes: MAX_BYTES as usize,
        },
        duplicate_keys: DuplicateKeyPolicy::FirstWins,
    };
    let parsed: Option<FrontMatter> = parse(text, options)?;
    let entries = parsed.and_then(|parsed| parsed.configs).unwrap_or_default();
    Ok(entries.into_iter().map(Entry::config).collect())
}

fn parse(text: &str, options: Options) -> Result<Option<FrontMatter>, String> {
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        // Further lines quote the text.
        let error = error.to_string();
        format!("front matter: {}", error.lines().next().unwrap_or("is no YAML"))
    })
}

/// The text between the first line, `---`, and the next such line.
fn front_matter(text: &str) -> Option<&str> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let (first, rest) = text.split_once('\n')?;
    if first.trim_end() != "---" {
        return None;
    }
    let mut end = 0;
    for line in rest.split_inclusive('\n') {
        if line.trim_end() == "---" {
            return Some(&rest[..end]);
        }
        end += line.len();
    }
    None
}

impl Entry {
    fn config(self) -> Config {
        let mut splits: BTreeMap<String, Vec<String>> = BTreeMap::new();
        let mut add = |split: String, patterns: Patterns| {
            splits.entry(split).or_default().extend(match patterns {
                Patterns::One(pattern) => vec![pattern],
                Patterns::Many(patterns) => patterns,
            });
        };
        let has_files = self.data_files.is_some();
        match self.data_files {
            None => {}
            Some(DataFiles::Pattern(pattern)) => add(TRAIN.to_owned(), Patterns::One(pattern)),
            Some(DataFiles::Splits(of)) => {
                of.into_iter().for_each(|(split, patterns)| add(split, patterns));
            }
            Some(DataFiles::List(items)) => {
                for item in items {
                    match item {
                        Item::Pattern(pattern) => add(TRAIN.to_owned(), Patterns::One(pattern)),
                        Item::Split { split, path } => add(split, path),
                    }
                }
            }
        }
        Config {
            name: self.config_name.unwrap_or_else(|| "default".to_owned()),
            is_default: self.default.unwrap_or(false),
            folder: self.data_dir.unwrap_or_default(),
            splits: has_files.then_some(splits),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(yaml: &str) -> Vec<Config> {
        configs(format!("---\n{yaml}\n---\n# A dataset\n").as_bytes()).unwrap()
    }

    fn splits(of: &Config) -> Vec<(&str, Vec<&str>)> {
        let splits = of.splits.as_ref().unwrap().iter();
        splits
            .map(|(split, patterns)| {
                (split.as_str(), patterns.iter().map(String::as_str).collect())
            })
            .collect()
    }

    #[test]
    fn data_files_have_any_of_their_forms() {
        let found = read(
            "license: mit\nconfigs:\n\
             - config_name: a\n  data_files: all/*.jsonl\n\
             - config_name: b\n  data_files: [x.jsonl, y.jsonl]\n\
             - config_name: c\n  default: true\n  data_files:\n  - split: train\n    path: data/train-*\n  \
               - split: test\n    path: [t/1.parquet, t/2.parquet]\n\
             - config_name: d\n  data_dir: deep/d\n  data_files: {train: a.txt, dev: [b.txt]}\n\
             - config_name: 2020\n  data_dir: e\n\
             - data_files: f",
        );
        assert_eq!(splits(&found[0]), [("train", vec!["all/*.jsonl"])]);
        assert_eq!(splits(&found[1]), [("train", vec!["x.jsonl", "y.jsonl"])]);
        let of_c = [("test", vec!["t/1.parquet", "t/2.parquet"]), ("train", vec!["data/train-*"])];
        assert_eq!(splits(&found[2]), of_c);
        assert!(found[2].is_default && !found[1].is_default);
        assert_eq!(splits(&found[3]), [("dev", vec!["b.txt"]), ("train", vec!["a.txt"])]);
        assert_eq!(found[3].folder, "deep/d");
        assert_eq!((found[4].name.as_str(), &found[4].splits), ("2020", &None));
        assert_eq!(found[5].name, "default");
    }

    #[test]
    fn a_readme_without_configurations_has_none() {
        for text in
            ["", "# Title\n", "---\n", "---\nlicense: mit\n", "---\n---\n", "---\n# none\n---\n"]
        {
            assert_eq!(configs(text.as_bytes()), Ok(Vec::new()), "{text}");
        }
        assert_eq!(read("license: mit\nconfigs:"), []);
        let windows = "\u{feff}---\r\nconfigs:\r\n- data_files: x\r\n---\r\n";
        assert_eq!(configs(windows.as_bytes()).unwrap().len(), 1);
    }

    #[test]
    fn hostile_front_matter_is_refused() {
        let bomb: String = (0..30)
            .map(|n| match n {
                0 => "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned(),
                n => format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 10].join(", ")),
            })
            .collect();
        let deep = format!("a: {}{}", "[".repeat(10_000), "]".repeat(10_000));
        for yaml in [
            bomb.as_str(),
            &deep,
            "configs: 7",
            "configs: [{data_files: 7}]",
            "a: [",
            "configs: text",
        ] {
            let error = configs(format!("---\n{yaml}\n---\n").as_bytes()).unwrap_err();
            assert!(error.starts_with("front matter: ") && error.lines().count() == 1, "{error}");
        }
        let large = vec![b'a'; MAX_BYTES as usize + 1];
        assert!(configs(&large).unwrap_err().contains("more than"));
    }
}
