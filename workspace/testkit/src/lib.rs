//! Code that tests of several crates share: tiny models and their references, token files and tokenizers, ranks as
//! threads, programs without the user's settings, a hub on the loopback interface, and readers of mutated input.

// A test fails by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::missing_panics_doc, missing_docs)]

pub mod fuzz;
pub mod hub_server;
pub mod launcher;
pub mod models;
pub mod options;
pub mod programs;
pub mod ranks;
#[cfg(feature = "reference")]
pub mod reference;
pub mod small_tokenizer;
#[cfg(feature = "text")]
pub mod texts;
#[cfg(feature = "train")]
pub mod trained_run;
pub mod whole_page;

pub use models::tiny_model;

/// Checks that a result is an error with this part in its message.
#[track_caller]
pub fn assert_refused<T, E: std::fmt::Display>(result: Result<T, E>, part: &str) {
    let error = result.err().expect("an error").to_string();
    assert!(error.contains(part), "{error}");
}

/// A recipe of two stages.
pub const SMALL_RECIPE: &str = include_str!("small.toml");
