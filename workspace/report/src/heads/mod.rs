//! The page of what heads do: documents of `moh-eval heads --json`, of one model or of several that it compares.

mod curves;
mod loads;
mod pairs;
mod sentence;
mod served;
mod summary;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use maud::{Markup, html};
use moh_eval::heads::{HeadDocument, OneHead};
use moh_program::utc;

use crate::chart::{color_bar, shorten};
use crate::page::{TITLE_CHARACTERS, shell};

/// Characters of the name of a model.
const NAME_CHARACTERS: usize = 60;

/// Writes the page of the documents `files` to the file `out`, as a whole. An earlier page is replaced, any other file
/// only with `force`.
///
/// # Errors
/// Fails if a file is no document of `moh-eval heads --json`, if `out` is not to be replaced, or cannot be written.
pub fn write_heads(files: &[PathBuf], out: &Path, force: bool) -> anyhow::Result<()> {
    crate::refuse_other_files(out, force)?;
    let documents: Vec<HeadDocument> =
        files.iter().map(|file| HeadDocument::read(file)).collect::<Result<_, _>>()?;
    crate::write_page(out, &heads_page(&documents, SystemTime::now()))
}

/// The page of documents at the moment `now`.
pub fn heads_page(documents: &[HeadDocument], now: SystemTime) -> String {
    let names: Vec<String> = documents.iter().map(name).collect();
    let title = shorten(&names.join(", "), TITLE_CHARACTERS);
    let has_texts = documents.iter().any(|document| !document.layers.is_empty());
    let body = html! {
        h1 { "Heads of " (title) }
        @if has_texts {
            (summary::section(documents))
            @if documents.iter().any(|document| document.layers.iter().any(routes)) {
                section {
                    h2 { "Load by text" }
                    p class="note" {
                        "Load: the percentage of a text's tokens that compute a head. Rows that differ show heads that \
                         serve one kind of text more than another."
                    }
                    (color_bar())
                    (each(documents, loads::part))
                }
            }
            (curves::section(documents))
            section {
                h2 { "How alike two heads are" }
                p class="note" {
                    "Patterns: 1 less half of the distance of two heads' rows of attention, 100 for equal ones. Outputs: \
                     their cosine, 0 or less in the darkest colour."
                }
                (each(documents, pairs::part))
            }
            @if documents.iter().any(served::has_tokens) {
                section { h2 { "Tokens that a head serves most" } (each(documents, served::part)) }
            }
        }
        @if documents.iter().any(|document| document.sentence.is_some()) {
            section { h2 { "Heads of a sentence" } (each(documents, sentence::part)) }
        }
        footer { "moh-report " (env!("CARGO_PKG_VERSION")) ", " (utc(now)) }
    };
    shell(&title, body, None)
}

/// A part of each document, below its name if there are several.
fn each(documents: &[HeadDocument], part: fn(&HeadDocument) -> Markup) -> Markup {
    html! {
        @for document in documents {
            @if documents.len() > 1 { h3 { (name(document)) } }
            (part(document))
        }
    }
}

/// A model's name.
fn name(document: &HeadDocument) -> String {
    shorten(&document.model, NAME_CHARACTERS)
}

/// Whether tokens select heads of a layer.
fn routes(layer: &moh_eval::heads::LayerReport) -> bool {
    layer.heads.iter().any(|head| !head.shared)
}

/// The mean of the values of some heads, if there are any.
fn mean<'a>(
    heads: impl Iterator<Item = &'a OneHead>,
    value: impl Fn(&OneHead) -> Option<f64>,
) -> Option<f64> {
    let (sum, count) = heads
        .filter_map(value)
        .fold((0.0, 0.0), |(sum, count): (f64, f64), value| (sum + value, count + 1.0));
    (count > 0.0).then(|| sum / count)
}
