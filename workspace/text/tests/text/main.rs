//! Tokenizers, and token files from texts.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod chat;
mod choice;
mod decoder;
mod prepare;
mod tokenizer;
