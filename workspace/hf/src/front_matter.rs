//! The front matter of a README: the lines between two lines `---` at its start, which are YAML. This
//! reads the part of YAML in which the hub's fields are written, and ignores the rest: a key without indentation with
//! one value, bare or in quotes, or with a list, `[a, b]` or a line `- a` for each. A comment begins with ` #`. Only
//! plain values count, because anyone can have written the README.

use crate::Base;
use crate::origin::is_plain;

/// The fields that state the licence.
const LICENCE_KEYS: [&str; 3] = ["license", "license_name", "license_link"];
/// The field that names the models that a model was made from.
const BASE_MODEL: &str = "base_model";
/// Maximum values of a list.
const MAX_VALUES: usize = 32;

/// The fields that state the licence, as far as they are there. A list states none if it has several.
pub(crate) fn licence(readme: &str) -> Vec<(&'static str, String)> {
    let lines = lines(readme);
    let one = |key: &'static str| match values(&lines, key).as_slice() {
        [value] => Some((key, value.clone())),
        _ => None,
    };
    LICENCE_KEYS.into_iter().filter_map(one).collect()
}

/// The base models; none if one of them is no id on the hub.
pub(crate) fn base_models(readme: &str) -> Vec<Base> {
    let names = values(&lines(readme), BASE_MODEL);
    names.iter().map(|name| Base::on_hub(name)).collect::<Option<_>>().unwrap_or_default()
}

/// The lines of the front matter.
fn lines(readme: &str) -> Vec<&str> {
    let mut lines = readme.lines();
    match lines.next().map(str::trim_end) {
        Some("---") => lines.take_while(|line| line.trim_end() != "---").collect(),
        _ => Vec::new(),
    }
}

/// The values of a key; none if one of them is not plain.
fn values(lines: &[&str], key: &str) -> Vec<String> {
    let is_key = |line: &&str| line.strip_prefix(key).is_some_and(|rest| rest.starts_with(':'));
    let Some(index) = lines.iter().position(is_key) else { return Vec::new() };
    let own = without_comment(&lines[index][key.len() + 1..]);
    let listed = own.strip_prefix('[').and_then(|list| list.strip_suffix(']'));
    let values: Vec<&str> = match listed {
        Some(list) => list.split(',').map(str::trim).collect(),
        None if own.is_empty() => {
            let rest = lines[index + 1..].iter().map(|line| without_comment(line));
            let items = rest.filter(|line| !line.is_empty());
            items.map_while(|line| line.strip_prefix("- ").map(str::trim)).collect()
        }
        None => vec![own],
    };
    let plain = values.into_iter().map(|value| {
        let value = unquoted(value);
        is_plain(value).then(|| value.to_owned())
    });
    let plain: Option<Vec<String>> = plain.take(MAX_VALUES + 1).collect();
    plain.filter(|values| values.len() <= MAX_VALUES).unwrap_or_default()
}

/// A value without the comment after it.
fn without_comment(text: &str) -> &str {
    let text = text.trim();
    let end = if text.starts_with('#') { Some(0) } else { text.find(" #") };
    text[..end.unwrap_or(text.len())].trim_end()
}

/// A value without the quotes around it.
fn unquoted(value: &str) -> &str {
    let within = |quote: char| value.strip_prefix(quote)?.strip_suffix(quote);
    within('"').or_else(|| within('\'')).unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_matter_states_the_licence() {
        let fields = |pairs: &[(&'static str, &str)]| -> Vec<_> {
            pairs.iter().map(|&(key, value)| (key, value.to_string())).collect()
        };
        let llama = "---\nlanguage:\n- en\nlicense: llama3\nlicense_name: \"my-licence\"\n---\nlicense: mit\n";
        let expected = fields(&[("license", "llama3"), ("license_name", "my-licence")]);
        assert_eq!(licence(llama), expected);
        for mit in [
            "---\r\nlicense:\r\n- mit\r\n---\r\n",
            "---\nlicense:\n  - 'mit'\ntags:\n- x\n---",
            "---\nlicense: [mit]\n---",
            "---\nlicense: mit # as upstream\n---",
        ] {
            assert_eq!(licence(mit), fields(&[("license", "mit")]), "{mit:?}");
        }
        for nothing in [
            "",
            "---",
            "license: mit",
            "---\n---\nlicense: mit",
            "---\nlicense:",
            "---\nlicense:\n---\n- mit",
            "---\nlicenses: mit",
            "---\n license: mit",
            "---\nlicense: a b",
            "---\nlicense: [mit",
            "---\nlicense: {mit: x}",
            "---\nlicense: |\n  mit",
            "---\nlicense: \"mit",
            "---\nlicense: # mit",
            "---\nlicense:\n- mit\n- cc-by-nc-4.0\n---",
            "---\nlicense: x: y",
            "---\nlicense: \u{fffd}",
            "---\nlicense: -->",
            "\u{0}---\nlicense: mit",
        ] {
            assert_eq!(licence(nothing), [], "{nothing:?}");
        }
        assert_eq!(licence(&format!("---\nlicense: {}\n---", "a".repeat(300))), []);
    }

    #[test]
    fn base_models_are_one_or_a_list_of_ids() {
        let names = |value: &str| -> Vec<String> {
            let found =
                base_models(&format!("---\nlicense: mit\nbase_model:{value}\ntags: x\n---\n"));
            found.into_iter().map(|base| base.name).collect()
        };
        for one in
            [" a/b", " \"a/b\"", " [a/b]", "\n- a/b", "\n\n  # the source\n  -  'a/b'", " a/b  # x"]
        {
            assert_eq!(names(one), ["a/b"], "{one:?}");
        }
        for two in [" [a/b, 'c/d']", "\n  - a/b\n  - c/d"] {
            assert_eq!(names(two), ["a/b", "c/d"], "{two:?}");
        }
        for none in [
            "",
            " ",
            " /mnt/a",
            " a/b/c",
            " [a/b, ]",
            " a b",
            "\n- a/b\n- ../c",
            " [a/b, x](http://y)",
            " null/",
        ] {
            assert!(names(none).is_empty(), "{none:?}");
        }
        assert!(names(&"\n- a/b".repeat(MAX_VALUES + 1)).is_empty());
    }
}
