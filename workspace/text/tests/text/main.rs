//! Tokenizers, and token files from texts.

#![allow(clippy::unwrap_used)] // A test fails by panicking.

mod chat;
mod decoder;
mod prepare;
mod renderer;
mod tokenizer;
