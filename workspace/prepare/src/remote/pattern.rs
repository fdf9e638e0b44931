//! Which files of a listing a path stands for: a file, all data files below a folder, or those that a pattern
//! matches, as for paths of this machine.

use glob::{MatchOptions, Pattern};

/// A path in a store, with or without wildcards.
#[derive(Debug)]
pub(crate) struct Path<'a> {
    path: &'a str,
    /// Bytes of the path before the first folder or name with a wildcard.
    plain: usize,
}

/// How patterns match everywhere: `*` stays within a name, and finds no hidden ones.
const OPTIONS: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

impl<'a> Path<'a> {
    pub(crate) fn new(path: &'a str) -> Self {
        let path = path.trim_matches('/');
        let mut plain = 0;
        for part in path.split_inclusive('/') {
            if part.contains(['*', '?', '[']) {
                break;
            }
            plain += part.len();
        }
        Self { path, plain }
    }

    /// The path, without `/` at its ends.
    pub(crate) fn as_str(&self) -> &'a str {
        self.path
    }

    /// Whether it is a pattern.
    pub(crate) fn has_wildcards(&self) -> bool {
        self.plain < self.path.len()
    }

    /// The folder that holds all it can stand for; of one without wildcards the folder around it.
    pub(crate) fn folder(&self) -> &'a str {
        match self.has_wildcards() {
            true => self.path[..self.plain].trim_end_matches('/'),
            false => self.path.rsplit_once('/').map_or("", |(folder, _)| folder),
        }
    }

    /// Whether a pattern can match files in folders below [`Path::folder`].
    pub(crate) fn is_deep(&self) -> bool {
        let rest = &self.path[self.plain..];
        rest.contains('/') || rest.contains("**")
    }

    /// A function that says whether a pattern matches a name.
    ///
    /// # Errors
    /// Says why it is no pattern.
    pub(crate) fn matcher(&self) -> Result<impl Fn(&str) -> bool + use<>, String> {
        let pattern = Pattern::new(self.path).map_err(|error| format!("is no pattern: {error}"))?;
        Ok(move |name: &str| pattern.matches_with(name, OPTIONS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_folder_before_the_first_wildcard_is_listed() {
        for (path, folder, is_deep) in [
            ("en/c4-train.*.json.gz", "en", false),
            ("*.parquet", "", false),
            ("data/**/*.jsonl", "data", true),
            ("data/*/x.txt", "data", true),
            ("/a/b/c?.txt", "a/b", false),
        ] {
            let path = Path::new(path);
            assert!(path.has_wildcards());
            assert_eq!((path.folder(), path.is_deep()), (folder, is_deep));
        }
        let file = Path::new("data/train.jsonl/");
        assert!(!file.has_wildcards());
        assert_eq!((file.folder(), file.as_str()), ("data", "data/train.jsonl"));
        assert_eq!(Path::new("train.jsonl").folder(), "");
    }

    #[test]
    fn wildcards_stay_within_a_name_unless_they_are_two() {
        let matches = |path: &str, name: &str| Path::new(path).matcher().unwrap()(name);
        assert!(matches("data/*.txt", "data/a.txt") && !matches("data/*.txt", "data/b/a.txt"));
        assert!(matches("data/**/*.txt", "data/a.txt") && matches("data/**/*.txt", "data/b/a.txt"));
        assert!(matches("data/**", "data/b/a.txt") && !matches("*.txt", ".hidden.txt"));
        assert!(Path::new("a**.txt").matcher().is_err());
    }
}
