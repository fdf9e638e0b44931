//! The blocks `{% generation %}` of transformers' templates, around the text that a model generates. The engine
//! supports only Jinja's own tags, so the blocks become calls of a function with the block as its body. The function
//! puts marks around the body's text. The marks are removed from the rendered text.

use std::ops::Range;

/// The name of the function, and the marks. They are not characters: Unicode reserves them for a program's own use.
pub(crate) const FUNCTION: &str = "moh_generation";
pub(crate) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// Replaces the template's blocks by calls. Also returns whether it has any blocks.
pub(crate) fn as_calls(source: &str) -> (String, bool) {
    let (mut calls, mut rest, mut found) = (String::with_capacity(source.len()), source, false);
    // A call's body has only the variables that it reads, and setting a namespace's attribute does not read the
    // namespace. The default of an argument reads it for the body.
    let assigned = namespaces(source).join(" and ");
    let argument = if assigned.is_empty() { assigned } else { format!("({FUNCTION}_={assigned})") };
    // Tags count only in the template's text, not in a comment, a string or `raw`.
    while let Some(at) = next_opening(rest) {
        let (before, opened) = rest.split_at(at);
        calls.push_str(before);
        let (tag, after) = opened.split_at(end_of(opened));
        rest = after;
        let inner = tag.strip_prefix("{%").and_then(|tag| tag.strip_suffix("%}"));
        let word = inner.map_or("", |inner| inner.trim_matches(['-', '+']).trim());
        let call = match word {
            "generation" => Some(format!("call{argument} {FUNCTION}()")),
            "endgeneration" => Some("endcall".to_owned()),
            _ => None,
        };
        found |= call.is_some();
        calls.push_str(&call.map_or(tag.to_owned(), |call| tag.replacen(word, &call, 1)));
        if word == "raw" {
            let (raw, after) = rest.split_at(end_of_raw(rest));
            calls.push_str(raw);
            rest = after;
        }
    }
    calls.push_str(rest);
    (calls, found)
}

/// Returns the names before the dots in the targets of `set`.
fn namespaces(source: &str) -> Vec<&str> {
    let tags = source.split("{%").map(|tag| tag.trim_start_matches(['-', '+']).trim_start());
    let sets = tags.filter_map(|tag| tag.strip_prefix("set")?.split(['=', '%']).next());
    let targets =
        sets.filter(|set| set.starts_with(char::is_whitespace)).flat_map(|set| set.split(','));
    let names = targets.filter_map(|target| Some(target.split_once('.')?.0.trim()));
    names
        .filter(|name| name.chars().all(|letter| letter.is_alphanumeric() || letter == '_'))
        .collect()
}

/// Returns the place of the next `{{`, `{%` or `{#`.
fn next_opening(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    bytes.windows(2).position(|pair| matches!(pair, b"{{" | b"{%" | b"{#"))
}

/// Returns the length of the tag, expression or comment at the start of `text`. Without an end, returns the length of
/// `text`.
fn end_of(text: &str) -> usize {
    let close = match text.as_bytes().get(1) {
        Some(b'#') => return text.find("#}").map_or(text.len(), |at| at + 2),
        Some(b'{') => b"}}",
        _ => b"%}",
    };
    let bytes = text.as_bytes();
    let (mut at, mut quote) = (2, None);
    while at < bytes.len() {
        match (quote, bytes[at]) {
            (Some(_), b'\\') => at += 1,
            (Some(open), byte) if byte == open => quote = None,
            (None, byte @ (b'"' | b'\'')) => quote = Some(byte),
            (None, _) if bytes[at..].starts_with(close) => return at + 2,
            _ => {}
        }
        at += 1;
    }
    text.len()
}

/// Returns the number of bytes before the end of a block `raw`. Without an end, returns the length of `text`.
fn end_of_raw(text: &str) -> usize {
    let mut from = 0;
    while let Some(at) = text[from..].find("{%") {
        let start = from + at;
        let inner = text[start + 2..].trim_start_matches(['-', '+']).trim_start();
        if inner.starts_with("endraw") {
            return start;
        }
        from = start + 2;
    }
    text.len()
}

/// Removes the marks from a rendered text. Also returns the ranges that were between marks, in order.
pub(crate) fn take_marks(marked: &str) -> (String, Vec<Range<usize>>) {
    let mut text = String::with_capacity(marked.len());
    let (mut ranges, mut depth, mut start) = (Vec::<Range<usize>>::new(), 0usize, 0);
    let mut rest = marked;
    while let Some(at) = rest.find(MARKS) {
        text.push_str(&rest[..at]);
        let opens = rest[at..].starts_with(MARKS[0]);
        rest = &rest[at + MARKS[0].len_utf8()..];
        // A block within a block belongs to the outer block.
        if opens {
            if depth == 0 {
                start = text.len();
            }
            depth += 1;
        } else {
            depth = depth.saturating_sub(1);
            if depth == 0 {
                ranges.push(start..text.len());
            }
        }
    }
    text.push_str(rest);
    (text, ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blocks_of_the_template_become_calls() {
        for (source, expected) in [
            ("a{% generation %}b{% endgeneration %}", "a{% call moh_generation() %}b{% endcall %}"),
            (
                "{%- generation -%}b{%-endgeneration+%}",
                "{%- call moh_generation() -%}b{%-endcall+%}",
            ),
            (
                "{% set a.x, b.y = 1, 2 %}{%-set c .z%}{% generation %}{% endset %}",
                "{% set a.x, b.y = 1, 2 %}{%-set c .z%}{% call(moh_generation_=a and b and c) moh_generation() %}{% endset %}",
            ),
        ] {
            assert_eq!(as_calls(source), (expected.to_owned(), true));
        }
        for source in [
            "",
            "{# {% generation %} #}",
            "{{ '{% generation %}' }}",
            "{{ \"\\\"{% generation %}\" }}",
            "{% raw %}{% generation %}{% endraw %}",
            "{% if generation %}{% endif %}",
            "{% set generation = 1 %}",
            "{% generation",
            "{{",
            "{% raw %}",
            "{",
        ] {
            assert_eq!(as_calls(source), (source.to_owned(), false));
        }
        let (calls, found) = as_calls("{%- raw -%}{{ {%- endraw %}{% generation %}");
        assert_eq!(calls, "{%- raw -%}{{ {%- endraw %}{% call moh_generation() %}");
        assert!(found);
    }

    #[test]
    fn marks_leave_the_text_between_them() {
        let [open, close] = MARKS;
        let marked =
            format!("a{open}bc{close}{open}d{close}e{open}{open}f{close}g{close}h{open}{close}");
        assert_eq!(take_marks(&marked), ("abcdefgh".to_owned(), vec![1..3, 3..4, 5..7, 8..8]));
        assert_eq!(take_marks("abc"), ("abc".to_owned(), vec![]));
    }
}
