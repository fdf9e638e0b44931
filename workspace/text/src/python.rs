//! Values as Python writes them, where a template's text depends on it: `tojson` is transformers' `json.dumps`, which
//! neither escapes HTML nor leaves out spaces, and numbers and truth values print as Python's.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value};
use serde_json::Value as Json;

/// Maximum spaces of a level of `tojson`.
const MAX_INDENT: usize = 64;

/// The filter `tojson` of transformers: `json.dumps` with `ensure_ascii=False`.
pub(crate) fn tojson(value: &Value, arguments: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = arguments.get("indent")?;
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    let sorts: Option<bool> = arguments.get("sort_keys")?;
    let ascii: Option<bool> = arguments.get("ensure_ascii")?;
    arguments.assert_all_used()?;
    let fault = |reason: String| Error::new(ErrorKind::InvalidOperation, reason);
    if let Some(indent) = indent.filter(|indent| *indent > MAX_INDENT) {
        return Err(fault(format!("tojson: an indent of {indent}, expected at most {MAX_INDENT}")));
    }
    if value.is_undefined() {
        return Err(fault("tojson: the value is undefined".to_owned()));
    }
    let [items, keys] = match separators.as_deref() {
        None => [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
        Some([items, keys]) => [items.clone(), keys.clone()],
        Some(_) => return Err(fault("tojson: expected two separators".to_owned())),
    };
    let json = serde_json::to_value(value).map_err(|error| fault(format!("tojson: {error}")))?;
    let (sorts, ascii) = (sorts.unwrap_or(false), ascii.unwrap_or(false));
    let mut writer = JsonWriter { text: String::new(), indent, items, keys, sorts, ascii };
    writer.value(&json, 0);
    Ok(Value::from_safe_string(writer.text))
}

/// Writes JSON as Python's `json.dumps`.
struct JsonWriter {
    text: String,
    indent: Option<usize>,
    items: String,
    keys: String,
    sorts: bool,
    ascii: bool,
}

impl JsonWriter {
    fn value(&mut self, value: &Json, depth: usize) {
        match value {
            Json::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(number) => self.text.push_str(&float(number)),
                None => self.text.push_str(&number.to_string()),
            },
            Json::String(text) => self.string(text),
            Json::Array(values) => {
                self.text.push('[');
                for (index, value) in values.iter().enumerate() {
                    self.next_item(index, depth + 1);
                    self.value(value, depth + 1);
                }
                self.end(values.is_empty(), depth, ']');
            }
            Json::Object(fields) => {
                let mut fields: Vec<_> = fields.iter().collect();
                if self.sorts {
                    fields.sort_by_key(|(key, _)| *key);
                }
                self.text.push('{');
                for (index, (key, value)) in fields.iter().enumerate() {
                    self.next_item(index, depth + 1);
                    self.string(key);
                    self.text.push_str(&self.keys.clone());
                    self.value(value, depth + 1);
                }
                self.end(fields.is_empty(), depth, '}');
            }
            value => self.text.push_str(&value.to_string()),
        }
    }

    fn string(&mut self, text: &str) {
        // Both escape the same characters, the same way.
        let quoted = Json::from(text).to_string();
        if !self.ascii {
            self.text.push_str(&quoted);
            return;
        }
        for character in quoted.chars() {
            match character.is_ascii() {
                true => self.text.push(character),
                false => character
                    .encode_utf16(&mut [0; 2])
                    .iter()
                    .for_each(|unit| self.text.push_str(&format!("\\u{unit:04x}"))),
            }
        }
    }

    fn next_item(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.text.push_str(&self.items.clone());
        }
        self.new_line(depth);
    }

    fn end(&mut self, is_empty: bool, depth: usize, close: char) {
        if !is_empty {
            self.new_line(depth);
        }
        self.text.push(close);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.text.push('\n');
            self.text.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }
}

/// A float as Python's `repr`: the shortest digits that read back, with an exponent below 1e-4 and from 1e16 on.
fn float(number: f64) -> String {
    let scientific = format!("{number:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    match exponent.parse::<i32>() {
        Ok(power) if !(-4..16).contains(&power) => {
            let sign = if power < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", power.abs())
        }
        _ => format!("{number:?}"),
    }
}

/// Prints a value of an expression as Python does.
pub(crate) fn print(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    let text = match value.kind() {
        ValueKind::None => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::Number => match f64::try_from(value.clone()) {
            Ok(number) if !value.is_integer() => float(number),
            _ => return minijinja::escape_formatter(out, state, value),
        },
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(&text).map_err(Error::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_those_of_python() {
        // python3: repr(x)
        for (number, expected) in [
            (0.0, "0.0"),
            (1.0, "1.0"),
            (-2.5, "-2.5"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e100, "1.25e+100"),
        ] {
            assert_eq!(float(number), expected);
        }
    }
}
