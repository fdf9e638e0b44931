//! The fields of a request's JSON. A handler takes each field by its name and type. A field that remains is an error
//! that names it: no field of a request is silently ignored.

use std::fmt::Display;

use moh_text::beyond_json;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::ApiError;
use super::body::Room;

/// The fields that no handler has taken yet.
#[derive(Debug)]
pub struct Fields {
    fields: Map<String, Value>,
    room: Room,
}

impl Fields {
    /// Returns the fields of a body, with the body's room.
    pub(super) fn parse(body: &[u8], room: Room) -> Result<Self, ApiError> {
        let not_json =
            |error: &dyn Display| ApiError::invalid(format!("the body is not JSON: {error}"), None);
        let text = str::from_utf8(body).map_err(|error| not_json(&error))?;
        // A template gets numbers as Python reads them.
        match serde_json::from_str(&beyond_json(text)) {
            Ok(Value::Object(fields)) => Ok(Fields { fields, room }),
            Ok(_) => Err(ApiError::invalid("the body is not a JSON object", None)),
            Err(error) => Err(not_json(&error)),
        }
    }

    /// Takes a field; returns `None` if it is missing or null. `expected` describes the value in errors.
    pub fn take<T: DeserializeOwned>(
        &mut self,
        name: &'static str,
        expected: &str,
    ) -> Result<Option<T>, ApiError> {
        match self.fields.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match serde_json::from_value(value) {
                Ok(value) => Ok(Some(value)),
                Err(_) => Err(ApiError::invalid(format!("{name} must be {expected}"), Some(name))),
            },
        }
    }

    /// Takes a number as [`Fields::take`], within bounds; returns `default` if it is missing.
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

    /// Drops a field with one of these values, or without a value. Rejects any other value.
    pub fn accept(&mut self, name: &'static str, values: &[Value]) -> Result<(), ApiError> {
        match self.fields.remove(name) {
            Some(value) if !value.is_null() && !values.contains(&value) => {
                let message = match values {
                    [] => format!("{name} is not supported: leave it out"),
                    [only, ..] => {
                        format!("{name} has to be {only} or left out: no other value is supported")
                    }
                };
                Err(ApiError::invalid(message, Some(name)))
            }
            _ => Ok(()),
        }
    }

    /// Drops a field that never changes an answer.
    pub fn ignore(&mut self, name: &str) {
        self.fields.remove(name);
    }

    /// Rejects a field that no handler has taken, unless it is null. Returns the room of the body.
    pub(super) fn finish(self) -> Result<Room, ApiError> {
        match self.fields.into_iter().find(|(_, value)| !value.is_null()) {
            None => Ok(self.room),
            Some((name, _)) => {
                let shown: String = name.chars().take(100).collect();
                let message = format!("{shown} is not supported: leave it out");
                Err(ApiError::invalid(message, Some(&shown)))
            }
        }
    }
}
