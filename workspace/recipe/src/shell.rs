//! Commands that a user may paste into a shell.

use std::path::Path;

/// Returns the command that trains the recipe at `path` with `overrides`.
pub fn command<'a>(path: &Path, overrides: impl IntoIterator<Item = &'a String>) -> String {
    let sets = overrides.into_iter().map(|text| format!(" --set {}", shell_word(text)));
    let path = shell_word(&path.to_string_lossy());
    format!("moh-train --recipe {path}{}", sets.collect::<String>())
}

/// Returns a word of a command as the shell reads it back, in quotes if it needs them.
pub fn shell_word(word: &str) -> String {
    // `shlex` would quote each `=`, which means nothing within a word.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:@,+=".contains(c);
    if word.chars().all(is_plain) && word.starts_with(|c: char| c != '=') {
        return word.to_owned();
    }
    // Only a word with a zero byte, which no argument has, cannot be quoted.
    shlex::try_quote(word).map_or_else(|_| word.to_owned(), |quoted| quoted.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_the_words_back() {
        let words =
            ["my run/it's $HOME.toml", "run.dir=a;b", "", "=a", "runs/a@1", "%x", "r\u{e9}"];
        for word in words {
            assert_eq!(shlex::split(&shell_word(word)).unwrap(), [word]);
        }
        assert_eq!((shell_word(""), shell_word("=a")), ("''".to_owned(), "'=a'".to_owned()));
        let command = command(Path::new("a b.toml"), &["run.seed=1".to_owned()]);
        assert_eq!(command, "moh-train --recipe 'a b.toml' --set run.seed=1");
    }
}
