//! Commands that a user may paste into a shell: every word is quoted, and a program is called as this program was.

use std::fmt;
use std::path::Path;

use moh_recipe::shell::shell_word;

/// A command of one of the programs.
#[derive(Debug, Clone)]
pub(crate) struct CommandLine {
    text: String,
}

impl CommandLine {
    /// Returns the command `program` without arguments. It is called through cargo if this program was started so, or
    /// else by name.
    pub(crate) fn new(program: &str) -> Self {
        let from_cargo = std::env::var_os("CARGO").is_some() && Path::new("Cargo.toml").is_file();
        if !from_cargo {
            return CommandLine { text: program.to_owned() };
        }
        // A build with other features could refuse the command.
        let features = match (cfg!(feature = "nccl"), cfg!(feature = "cuda"), cfg!(feature = "mpi"))
        {
            (true, _, _) => " --features moh-train/nccl",
            (_, true, _) => " --features moh-train/cuda",
            (_, _, true) => " --features moh-train/mpi",
            _ => "",
        };
        CommandLine { text: format!("cargo run --release{features} --bin {program} --") }
    }

    /// Adds a word that needs no quotes, such as the name of an option or a subcommand.
    pub(crate) fn word(mut self, word: &str) -> Self {
        self.text.push(' ');
        self.text.push_str(word);
        self
    }

    pub(crate) fn option(mut self, name: &str, value: impl AsRef<str>) -> Self {
        let value = value.as_ref();
        // A value that starts with `-` would be parsed as an option.
        let between = if value.starts_with('-') { '=' } else { ' ' };
        self.text.push_str(&format!(" {name}{between}{}", shell_word(value)));
        self
    }

    pub(crate) fn path_option(self, name: &str, path: &Path) -> Self {
        self.option(name, path.to_string_lossy())
    }

    /// Adds a path without an option.
    pub(crate) fn path(self, path: &Path) -> Self {
        let text = path.to_string_lossy();
        let shown = if text.starts_with('-') { format!("./{text}") } else { text.into_owned() };
        self.word(&shell_word(&shown))
    }
}

impl fmt::Display for CommandLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_the_words_back() {
        let command = CommandLine { text: "moh-train".to_owned() }
            .path_option("--recipe", Path::new("my run/it's $HOME.toml"))
            .option("--set", "run.dir=a;b")
            .option("--prompt", "-x y")
            .word("replay")
            .path(Path::new("-run"));
        let text = command.to_string();
        let words = shlex::split(&text).unwrap();
        assert_eq!(
            words,
            [
                "moh-train",
                "--recipe",
                "my run/it's $HOME.toml",
                "--set",
                "run.dir=a;b",
                "--prompt=-x y",
                "replay",
                "./-run"
            ],
            "{text}"
        );
        // Plain words have no quotes.
        let plain = CommandLine { text: "moh-report".to_owned() }
            .option("--set", "run.dir=runs/a@1")
            .path(Path::new("runs/a-1"));
        assert_eq!(plain.to_string(), "moh-report --set run.dir=runs/a@1 runs/a-1");
    }
}
