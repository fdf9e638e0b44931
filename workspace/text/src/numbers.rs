//! Numbers that Python reads in JSON, but serde_json does not: NaN, infinities, integers beyond 64 bits, and -0. They
//! become marked strings before the text is parsed, and numbers again when a template gets them.

use std::borrow::Cow;

use minijinja::Value;

use crate::bounds::fault;

/// Not a character: Unicode reserves it for a program's own use.
pub(crate) const MARK: char = '\u{fdd2}';
/// Separates the mark from the reason why a table's value has no JSON. A template that reads the value fails with the
/// reason.
pub(crate) const NO_JSON: char = '?';

/// Returns the JSON text with such numbers as marked strings, which
/// [`Conversation::from_json`](crate::Conversation::from_json) reads.
pub fn beyond_json(text: &str) -> Cow<'_, str> {
    marked(text, |token| is_not_finite(token) || is_large(token))
}

/// Returns the text with NaN and infinities as marked strings.
#[cfg(feature = "prepare")]
pub(crate) fn finite_json(text: &str) -> Cow<'_, str> {
    marked(text, is_not_finite)
}

/// Returns the number of a marked string, or `None` for other strings.
pub(crate) fn number(text: &str) -> Option<Result<Value, String>> {
    let token = text.strip_prefix(MARK)?;
    if is_not_finite(token) {
        // Rust reads the names that Python writes.
        return token.parse().ok().map(|number: f64| Ok(number.into()));
    }
    if let Some(reason) = token.strip_prefix(NO_JSON) {
        return Some(Ok(fault(reason.to_owned()).into()));
    }
    if !is_large(token) {
        return None;
    }
    let signed = token.parse().map(|number: i128| number.into());
    let number = signed.or_else(|_| token.parse().map(|number: u128| number.into()));
    Some(number.map_err(|_| format!("the integer {token} has more than 128 bits")))
}

fn marked(text: &str, is_beyond: impl Fn(&str) -> bool) -> Cow<'_, str> {
    let bytes = text.as_bytes();
    let (mut marked, mut copied, mut at) = (String::new(), 0, 0);
    while at < bytes.len() {
        match bytes[at] {
            b'"' => at = end_of_string(bytes, at + 1),
            byte if is_of_token(byte) => {
                let end = bytes[at..].iter().position(|&byte| !is_of_token(byte));
                let end = end.map_or(bytes.len(), |length| at + length);
                let token = &text[at..end];
                if is_beyond(token) {
                    marked.push_str(&text[copied..at]);
                    marked.push_str(&format!("\"{MARK}{token}\""));
                    copied = end;
                }
                at = end;
            }
            _ => at += 1,
        }
    }
    if copied == 0 {
        return Cow::Borrowed(text);
    }
    marked.push_str(&text[copied..]);
    Cow::Owned(marked)
}

/// Returns the place behind the quote that ends a string.
fn end_of_string(bytes: &[u8], mut at: usize) -> usize {
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

fn is_of_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.')
}

fn is_not_finite(token: &str) -> bool {
    matches!(token, "NaN" | "Infinity" | "-Infinity")
}

/// Returns whether a token is an integer of more than 64 bits, or -0, which only floats have here.
fn is_large(token: &str) -> bool {
    let digits = token.strip_prefix('-').unwrap_or(token);
    let is_integer = digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0');
    let fits = || token.parse::<i64>().is_ok() || token.parse::<u64>().is_ok();
    token == "-0" || digits.len() >= 19 && is_integer && !fits()
}
