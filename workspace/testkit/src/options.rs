//! Calls a program with a negative number for every option in its help.

use std::path::Path;
use std::process::Command;

/// Returns the help of a command, with a line for each option or subcommand.
fn help(program: &str, words: &[&str]) -> String {
    let output = Command::new(program).args(words).arg("-h").output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the names of a command's subcommands, except `help`.
fn subcommands(help: &str) -> Vec<String> {
    let commands = help.split("Commands:\n").nth(1).unwrap_or_default();
    let lines = commands.lines().take_while(|line| line.starts_with("  "));
    let names = lines.filter(|line| !line.starts_with("   "));
    let first = |line: &str| line.split_whitespace().next().unwrap().to_owned();
    names.map(first).filter(|name| name != "help").collect()
}

/// Returns the options of a command that have a value.
fn options(help: &str) -> Vec<String> {
    let of = |line: &str| {
        let (name, rest) = line.trim_start().split_once(' ')?;
        (name.starts_with("--") && rest.starts_with('<')).then(|| name.to_owned())
    };
    help.lines().filter_map(of).collect()
}

/// Fails if a program or one of its subcommands parses a negative number as the name of an option. Returns the
/// number of options.
pub fn take_negative_numbers(program: &str, words: &[&str], dir: &Path) -> usize {
    let help = help(program, words);
    let options = options(&help);
    for option in &options {
        let mut command = Command::new(program);
        command.current_dir(dir).args(words).args([option, "-1"]);
        let output = command.env("HF_HUB_OFFLINE", "1").output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        let is_name = text.contains("unexpected argument") || text.contains("a value is required");
        let is_obscure = text.contains("invalid digit");
        assert!(!output.status.success() && !is_name && !is_obscure, "{words:?} {option}: {text}");
    }
    let of = |name: &String| take_negative_numbers(program, &[words, &[name]].concat(), dir);
    options.len() + subcommands(&help).iter().map(of).sum::<usize>()
}
