//! Typed access to the fields of a JSON object. Errors name the file and the key.

use std::path::Path;

use moh_model::HeadCounts;
use serde_json::{Map, Value};

use crate::Error;

/// A JSON object, its file, and the prefix of its keys in error messages.
pub(crate) struct Fields<'a> {
    pub map: &'a Map<String, Value>,
    pub path: &'a Path,
    pub prefix: &'a str,
}

impl<'a> Fields<'a> {
    /// Returns the value of `key`. Null counts as absent, as in `LlamaConfig`.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub fn error<T>(&self, key: &str, reason: String) -> Result<T, Error> {
        let prefix = self.prefix;
        Err(Error::file(self.path, format!("{prefix}{key}{reason}")))
    }

    pub fn wrong_type<T>(&self, key: &str, value: &Value, expected: &str) -> Result<T, Error> {
        self.error(key, format!(": expected {expected}, found {}", kind(value)))
    }

    pub fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, Error> {
        match value {
            Some(value) => Ok(value),
            None => self.error(key, " is missing".to_string()),
        }
    }

    /// Returns the value of `key`, converted by `read`. Fails if `read` returns `None`: the value is not `expected`.
    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Error> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(found) => Ok(Some(found)),
            None => self.wrong_type(key, value, expected),
        }
    }

    pub fn count(&self, key: &str) -> Result<Option<usize>, Error> {
        self.typed(key, "a whole number", whole_number)
    }

    /// Returns a head count: an integer, or a list with one integer for each layer.
    pub fn head_counts(&self, key: &str) -> Result<Option<HeadCounts>, Error> {
        let Some(Value::Array(list)) = self.get(key) else {
            return Ok(self.count(key)?.map(HeadCounts::All));
        };
        let entry = |value| match whole_number(value) {
            Some(count) => Ok(count),
            None => self.wrong_type(key, value, "a list of whole numbers"),
        };
        list.iter().map(entry).collect::<Result<_, _>>().map(Some)
    }

    pub fn head_ids(&self, key: &str) -> Result<Option<Vec<Vec<usize>>>, Error> {
        let heads = |layer: &Value| layer.as_array()?.iter().map(whole_number).collect();
        let ids = |layers: &Value| layers.as_array()?.iter().map(heads).collect();
        self.typed(key, "a list of whole numbers for each layer", ids)
    }

    /// Returns a count from 1 to `limit`.
    pub fn size(&self, key: &str, limit: usize) -> Result<Option<usize>, Error> {
        match self.count(key)? {
            Some(number) if number == 0 || number > limit => {
                self.error(key, format!(" = {number}: must be from 1 to {limit}"))
            }
            number => Ok(number),
        }
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>, Error> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// Returns a number above zero that f32 can represent.
    pub fn positive(&self, key: &str) -> Result<Option<f64>, Error> {
        match self.number(key)? {
            Some(number) if !(number as f32 > 0.0 && (number as f32).is_finite()) => self
                .error(key, format!(" = {number:?}: must be above 0 and within the range of f32")),
            number => Ok(number),
        }
    }

    pub fn flag(&self, key: &str) -> Result<bool, Error> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>, Error> {
        self.typed(key, "a string", Value::as_str)
    }

    pub fn object(&self, key: &str, prefix: &'a str) -> Result<Option<Fields<'a>>, Error> {
        let map = self.typed(key, "an object", Value::as_object)?;
        Ok(map.map(|map| Fields { map, path: self.path, prefix }))
    }

    /// Returns token ids: a single id or a list.
    pub fn tokens(&self, key: &str) -> Result<Option<Vec<u32>>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(list)) => {
                list.iter().map(|value| self.token(key, value)).collect::<Result<_, _>>().map(Some)
            }
            Some(value) => Ok(Some(vec![self.token(key, value)?])),
        }
    }

    pub fn token(&self, key: &str, value: &Value) -> Result<u32, Error> {
        match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => Ok(id),
            None => self.error(key, format!(": expected a token id, found {value}")),
        }
    }
}

fn whole_number(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|number| usize::try_from(number).ok())
}

pub(crate) fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".to_string(),
        Value::Bool(flag) => flag.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("\"{}\"", text.escape_debug()),
        Value::Array(_) => "a list".to_string(),
        Value::Object(_) => "an object".to_string(),
    }
}
