//! Methods and filters of texts that the engine's library lacks, or has with other white space and words than Python.

use std::borrow::Cow;

use minijinja::value::{Kwargs, StringInput, Tuple, from_args};
use minijinja::{Error, State, Value, filters};

use crate::bounds::fault;

/// Characters that end a line; `\r\n` also ends a line.
const LINE_ENDS: [char; 10] =
    ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];

/// Returns whether Python's `isspace` is true.
fn is_space(letter: char) -> bool {
    letter.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&letter)
}

/// Calls a method of a text. Returns `None` for methods that the library has as in Python.
pub(crate) fn method(
    text: &str,
    method: &str,
    arguments: &[Value],
) -> Option<Result<Value, Error>> {
    Some(match (method, arguments) {
        ("strip", []) => Ok(text.trim_matches(is_space).into()),
        ("lstrip", []) => Ok(text.trim_start_matches(is_space).into()),
        ("rstrip", []) => Ok(text.trim_end_matches(is_space).into()),
        ("split" | "rsplit", _) => split(text, method == "rsplit", arguments),
        ("title", []) => Ok(title(text).into()),
        ("splitlines", _) => lines(text, arguments),
        ("partition", _) => from_args(arguments).map(|(separator,): (&str,)| {
            let cut = text.split_once(separator).map(|(a, b)| [a, separator, b]);
            Tuple::from(cut.unwrap_or([text, "", ""]).map(Value::from)).into()
        }),
        ("removeprefix", _) => from_args(arguments)
            .map(|(prefix,): (&str,)| text.strip_prefix(prefix).unwrap_or(text).into()),
        ("removesuffix", _) => from_args(arguments)
            .map(|(suffix,): (&str,)| text.strip_suffix(suffix).unwrap_or(text).into()),
        _ => return None,
    })
}

fn split(text: &str, from_end: bool, arguments: &[Value]) -> Result<Value, Error> {
    let (separator, most, named): (Option<&str>, Option<i64>, Kwargs) = from_args(arguments)?;
    let separator = separator.map_or_else(|| named.get("sep"), |text| Ok(Some(text)))?;
    let most = most.map_or_else(|| named.get("maxsplit"), |most| Ok(Some(most)))?;
    named.assert_all_used()?;
    let count = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = match separator {
        Some("") => return Err(fault("split: an empty separator".to_owned())),
        Some(separator) if from_end => text.rsplitn(count.saturating_add(1), separator).collect(),
        Some(separator) => text.splitn(count.saturating_add(1), separator).collect(),
        None => words(text, from_end, count),
    };
    if from_end {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Returns the words of a text, from its end with `from_end`. The text after `count` words is one part.
fn words<'t>(text: &'t str, from_end: bool, count: usize) -> Vec<&'t str> {
    let trimmed = |text: &'t str| match from_end {
        true => text.trim_end_matches(is_space),
        false => text.trim_start_matches(is_space),
    };
    let cut = |text: &'t str| match from_end {
        true => text.rsplit_once(is_space).map(|(before, word)| (word, before)),
        false => text.split_once(is_space),
    };
    let (mut words, mut rest) = (Vec::new(), trimmed(text));
    while !rest.is_empty() {
        let (word, others) = cut(rest).filter(|_| words.len() < count).unwrap_or((rest, ""));
        words.push(word);
        rest = trimmed(others);
    }
    words
}

/// Capitalizes each run of letters with a case.
fn title(text: &str) -> String {
    let (mut written, mut is_within) = (String::with_capacity(text.len()), false);
    for letter in text.chars() {
        let mut capital = letter.to_uppercase();
        match is_within {
            true => written.extend(letter.to_lowercase()),
            false => {
                written.extend(capital.next());
                written.extend(capital.flat_map(char::to_lowercase));
            }
        }
        is_within = letter.is_lowercase() || letter.is_uppercase();
    }
    written
}

fn lines(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (keeps, named): (Option<bool>, Kwargs) = from_args(arguments)?;
    let keeps = keeps.map_or_else(|| named.get("keepends"), |keeps| Ok(Some(keeps)))?;
    named.assert_all_used()?;
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some((at, end)) = rest.match_indices(LINE_ENDS).next() {
        let is_pair = rest[at..].starts_with("\r\n");
        let through = at + end.len() + usize::from(is_pair);
        lines.push(Value::from(&rest[..if keeps == Some(true) { through } else { at }]));
        rest = &rest[through..];
    }
    if !rest.is_empty() {
        lines.push(rest.into());
    }
    Ok(lines.into())
}

/// Applies the filter `trim`.
pub(crate) fn trim(value: StringInput<'_>, letters: Option<Cow<'_, str>>) -> Value {
    match letters {
        None => value.as_str().trim_matches(is_space).into(),
        letters => filters::trim(value, letters),
    }
}

/// Applies the filter `int`. As in Jinja, a text that is not a number is 0.
pub(crate) fn int(
    state: &State,
    value: Value,
    default: Option<Value>,
    base: Option<u32>,
    named: Kwargs,
) -> Result<Value, Error> {
    let default = default.map_or_else(|| named.get("default"), |default| Ok(Some(default)))?;
    let digits = value.as_str().map(|text| text.trim_matches(is_space).replace('_', ""));
    let value = digits.map_or(value, Value::from);
    filters::int(state, &value, Some(default.unwrap_or(0.into())), base, named)
}
