//! The fields of a request's JSON. Each is taken by its name and type, and what is left over is an error that names
//! it: nothing that a client asks for is ignored.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::ApiError;

/// The fields that are not taken yet.
#[derive(Debug)]
pub struct Fields(Map<String, Value>);

impl Fields {
    /// The fields of a body.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Fields(fields)),
            Ok(_) => Err(ApiError::invalid("the body is not a JSON object", None)),
            Err(error) => Err(ApiError::invalid(format!("the body is not JSON: {error}"), None)),
        }
    }

    /// Takes a field; `None` if it is missing or null. `expected` says what it should be.
    pub fn take<T: DeserializeOwned>(
        &mut self,
        name: &'static str,
        expected: &str,
    ) -> Result<Option<T>, ApiError> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match serde_json::from_value(value) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(ApiError::invalid(format!("{name} must be {expected}"), Some(name))),
            },
        }
    }

    /// As [`Fields::take`], within bounds; `default` if it is missing.
    pub fn number(
        &mut self,
        name: &'static str,
        default: f64,
        within: impl Fn(f64) -> bool,
        expected: &str,
    ) -> Result<f64, ApiError> {
        let value = self.take(name, expected)?.unwrap_or(default);
        match within(value) {
            true => Ok(value),
            false => Err(ApiError::invalid(format!("{name} must be {expected}"), Some(name))),
        }
    }

    /// Drops a field that has no other meaning here than these values.
    pub fn accept(&mut self, name: &'static str, values: &[Value]) -> Result<(), ApiError> {
        match self.0.remove(name) {
            Some(value) if !value.is_null() && !values.contains(&value) => {
                let message = match values {
                    [] => format!("{name} is not supported: leave it out"),
                    [only, ..] => format!("{name} is not supported but as {only}: leave it out"),
                };
                Err(ApiError::invalid(message, Some(name)))
            }
            _ => Ok(()),
        }
    }

    /// Drops a field that never changes an answer.
    pub fn ignore(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Refuses a field that was not taken, unless it is null.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.0.into_iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let shown: String = name.chars().take(100).collect();
                Err(ApiError::invalid(
                    format!("{shown} is not supported: leave it out"),
                    Some(&shown),
                ))
            }
        }
    }
}
