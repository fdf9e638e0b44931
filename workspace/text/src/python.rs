//! Values as Python writes them. `tojson` is transformers' `json.dumps`, which neither escapes HTML nor omits spaces.
//! Printing is Python's `str`. Both are charged while they write, so a value that contains another many times is not
//! written whole.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, Output, State, Value};
use serde_json::Value as Json;

use crate::bounds::{Charge, fault};
use crate::numbers::number;

/// Maximum spaces of a level of `tojson`.
const MAX_INDENT: usize = 64;

pub(crate) fn from_json(json: &Json) -> Result<Value, String> {
    Ok(match json {
        Json::Null => Value::from(()),
        Json::Bool(value) => Value::from(*value),
        Json::Number(value) => match (value.as_i64(), value.as_u64()) {
            (Some(value), _) => Value::from(value),
            (None, Some(value)) => Value::from(value),
            // serde_json's arbitrary_precision is off, so every other number is a float.
            (None, None) => Value::from(value.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => match number(text) {
            Some(number) => number?,
            None => Value::from(text.as_str()),
        },
        Json::Array(values) => {
            Value::from(values.iter().map(from_json).collect::<Result<Vec<_>, _>>()?)
        }
        Json::Object(fields) => {
            let pairs = fields.iter().map(|(key, value)| Ok((key.as_str(), from_json(value)?)));
            Value::from_pairs(pairs.collect::<Result<Vec<_>, String>>()?)
        }
    })
}

/// Applies the filter `tojson` of transformers: `json.dumps` with `ensure_ascii=False`.
pub(crate) fn tojson(state: &State, value: &Value, arguments: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = arguments.get("indent")?;
    let separators: Option<Vec<String>> = arguments.get("separators")?;
    let sorts: Option<bool> = arguments.get("sort_keys")?;
    let ascii: Option<bool> = arguments.get("ensure_ascii")?;
    arguments.assert_all_used()?;
    if let Some(indent) = indent.filter(|indent| *indent > MAX_INDENT) {
        return Err(fault(format!("tojson: an indent of {indent}, expected at most {MAX_INDENT}")));
    }
    let [items, keys] = match separators.as_deref() {
        None => [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
        Some([items, keys]) => [items.clone(), keys.clone()],
        Some(_) => return Err(fault("tojson: expected two separators".to_owned())),
    };
    let (sorts, ascii) = (sorts.unwrap_or(false), ascii.unwrap_or(false));
    let json = Some(JsonStyle { indent, sorts, ascii });
    let mut writer = Writer { text: String::new(), charge: Charge::new(state), items, keys, json };
    writer.value(value, 0)?;
    Ok(writer.text.into())
}

pub(crate) fn print(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.write_str(text).map_err(Error::from),
        None => out.write_str(&text(state, value)?).map_err(Error::from),
    }
}

/// Returns Python's `str` of a value, or an empty string for an undefined value.
pub(crate) fn text(state: &State, value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    if value.is_undefined() {
        return Ok(String::new());
    }
    let (items, keys) = (", ".to_owned(), ": ".to_owned());
    let mut writer =
        Writer { text: String::new(), charge: Charge::new(state), items, keys, json: None };
    writer.value(value, 0)?;
    Ok(writer.text)
}

struct JsonStyle {
    indent: Option<usize>,
    sorts: bool,
    ascii: bool,
}

/// Writes a value as `json.dumps`, or as `repr` without a style of JSON.
struct Writer<'s, 't, 'e> {
    text: String,
    charge: Charge<'s, 't, 'e>,
    items: String,
    keys: String,
    json: Option<JsonStyle>,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.charge.node(value, depth)?;
        let is_json = self.json.is_some();
        match value.kind() {
            ValueKind::None => self.text.push_str(if is_json { "null" } else { "None" }),
            ValueKind::Bool => self.text.push_str(match (is_json, value.is_true()) {
                (true, true) => "true",
                (true, false) => "false",
                (false, true) => "True",
                (false, false) => "False",
            }),
            // A value that stands for an error. Iterating over a list returns the error.
            ValueKind::Invalid => {
                return Value::from(vec![value.clone()])
                    .try_iter()?
                    .checked()
                    .try_for_each(|item| item.map(drop));
            }
            ValueKind::Number => match f64::try_from(value.clone()) {
                Ok(number) if !value.is_integer() => self.text.push_str(&float(number, is_json)),
                _ => self.text.push_str(&value.to_string()),
            },
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let is_tuple = value.is_tuple() && !is_json;
                let (open, close) = if is_tuple { ('(', ')') } else { ('[', ']') };
                self.text.push(open);
                let mut count = 0;
                for item in value.try_iter()?.checked() {
                    self.next_item(count, depth + 1);
                    self.value(&item?, depth + 1)?;
                    count += 1;
                }
                self.text.push_str(if is_tuple && count == 1 { "," } else { "" });
                self.end(count == 0, depth, close);
            }
            ValueKind::Map => {
                let mut keys = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                if self.json.as_ref().is_some_and(|style| style.sorts) {
                    keys.sort();
                }
                self.text.push('{');
                for (index, key) in keys.iter().enumerate() {
                    self.next_item(index, depth + 1);
                    let is_text = key.as_str().is_some();
                    self.text.push_str(if is_json && !is_text { "\"" } else { "" });
                    self.value(key, depth + 1)?;
                    self.text.push_str(if is_json && !is_text { "\"" } else { "" });
                    self.text.push_str(&self.keys);
                    self.value(&value.get_item(key)?, depth + 1)?;
                }
                self.end(keys.is_empty(), depth, '}');
            }
            kind if is_json => return Err(fault(format!("tojson: the value is {kind}"))),
            _ => self.text.push_str(&value.to_string()),
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
        let Some(style) = &self.json else {
            return self.repr(text);
        };
        // `json.dumps` and serde_json escape the same characters, the same way.
        let quoted = Json::from(text).to_string();
        if !style.ascii {
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

    fn repr(&mut self, text: &str) {
        let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
        self.text.push(quote);
        for letter in text.chars() {
            // The letters that Rust escapes behind another letter are not printable in Python.
            let is_plain =
                || ["a", letter.encode_utf8(&mut [0; 4])].concat().escape_debug().count() == 2;
            let code = u32::from(letter);
            match letter {
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                _ if letter == quote || letter == '\\' => self.text.extend(['\\', letter]),
                ' '..='~' => self.text.push(letter),
                _ if letter.is_alphanumeric() || is_plain() => self.text.push(letter),
                _ => self.text.push_str(&match code {
                    ..0x100 => format!("\\x{code:02x}"),
                    0x100..0x10000 => format!("\\u{code:04x}"),
                    _ => format!("\\U{code:08x}"),
                }),
            }
        }
        self.text.push(quote);
    }

    fn next_item(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.text.push_str(&self.items);
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
        if let Some(indent) = self.json.as_ref().and_then(|style| style.indent) {
            self.text.push('\n');
            self.text.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }
}

/// Formats a float as Python's `repr`: the shortest digits that parse to it, with an exponent below 1e-4 and from 1e16
/// on. `json.dumps` has other names for floats that are not finite.
fn float(number: f64, is_json: bool) -> String {
    if !number.is_finite() {
        let name = match (is_json, number.is_nan()) {
            (true, true) => "NaN",
            (false, true) => "nan",
            (true, false) => "Infinity",
            (false, false) => "inf",
        };
        return if number < 0.0 { format!("-{name}") } else { name.to_owned() };
    }
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
