//! The output of a measurement: JSON, or text.

use std::io::{Write as _, stdout};

use serde_json::Value;

/// Prints `json` if `as_json`, or else `text`.
pub fn print(as_json: bool, json: &Value, text: &str) -> anyhow::Result<()> {
    if as_json {
        writeln!(stdout(), "{json:#}")?;
    } else {
        writeln!(stdout(), "{}", text.trim_end())?;
    }
    Ok(())
}
