//! The page about heads: documents of `moh-eval heads --json`, of a single model or of several models that it compares.

mod curves;
mod maps;
mod sentence;
mod served;
mod summary;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::head_measures::{HeadDocument, LayerReport};
use maud::{Markup, html};
use moh_program::utc;

use crate::chart::{color_bar, shorten};
use crate::page::{TITLE_CHARACTERS, shell};

const NAME_CHARACTERS: usize = 60;

/// The most parts of a model's path in its name.
const MAX_PARTS: usize = 6;

/// Writes the page of the documents `files` to the file `out`, atomically. An earlier page is replaced, any other file
/// only with `force`.
///
/// # Errors
/// Fails if a file is not a document of `moh-eval heads --json`, or if `out` must not be replaced or cannot be written.
pub fn write_heads(files: &[PathBuf], out: &Path, force: bool) -> anyhow::Result<()> {
    crate::refuse_other_files(out, force)?;
    let documents: Vec<HeadDocument> =
        files.iter().map(|file| HeadDocument::read(file)).collect::<Result<_, _>>()?;
    crate::write_page(out, &heads_page(&documents, SystemTime::now()))
}

struct Model<'a> {
    /// A short name, unique on the page.
    name: String,
    document: &'a HeadDocument,
}

fn has_routed(model: &Model<'_>) -> bool {
    model.document.layers.iter().any(routes)
}

/// Returns the page of documents at the moment `now`.
pub fn heads_page(documents: &[HeadDocument], now: SystemTime) -> String {
    let models = named(documents);
    let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
    let title = shorten(&names.join(", "), TITLE_CHARACTERS);
    let has_texts = documents.iter().any(|document| !document.layers.is_empty());
    let body = html! {
        h1 { "Heads of " (title) }
        @if has_texts {
            (summary::section(&models))
            @if models.iter().any(has_routed) {
                section {
                    h2 { "Load by text" }
                    p class="note" {
                        "Load: the percentage of a text's tokens that compute a head. Rows that differ show heads that \
                         serve one kind of text more than another."
                    }
                    (color_bar())
                    (each(&models, has_routed, maps::loads))
                }
            }
            (curves::section(&models))
            section {
                h2 { "How alike two heads are" }
                p class="note" {
                    "Patterns: 1 less half of the distance of two heads' rows of attention, 100 for equal ones. Outputs: \
                     their cosine, 0 or less in the darkest colour."
                }
                (each(&models, |_| true, maps::pairs))
            }
            @if models.iter().any(served::has_tokens) {
                section {
                    h2 { "Tokens that a head serves most" }
                    (each(&models, served::has_tokens, served::part))
                }
            }
        }
        @if documents.iter().any(|document| document.sentence.is_some()) {
            section { h2 { "Heads of a sentence" } (each(&models, |_| true, sentence::part)) }
        }
        footer { "moh-report " (env!("CARGO_PKG_VERSION")) ", " (utc(now)) }
    };
    shell(&title, body, None)
}

/// Returns a part of each model that has the part, below the model's name if there are several.
fn each(
    models: &[Model<'_>],
    has: fn(&Model<'_>) -> bool,
    part: fn(&Model<'_>) -> Markup,
) -> Markup {
    html! {
        @for model in models.iter().filter(|model| has(model)) {
            @if models.len() > 1 { h3 { (model.name) } }
            (part(model))
        }
    }
}

/// Returns the models, named by the last parts of their paths. The names have as many parts as tell them apart, and no
/// `export` of a run.
fn named(documents: &[HeadDocument]) -> Vec<Model<'_>> {
    let parts = |document: &HeadDocument, count: usize| {
        let name = document.model.strip_suffix("/export").unwrap_or(&document.model);
        let parts: Vec<&str> = name.split('/').collect();
        shorten(&parts[parts.len().saturating_sub(count)..].join("/"), NAME_CHARACTERS)
    };
    let names = |count| documents.iter().map(|d| parts(d, count)).collect::<Vec<_>>();
    let differ = |names: &Vec<String>| names.iter().collect::<BTreeSet<_>>().len() == names.len();
    let named = (1..=MAX_PARTS).map(names).find(differ);
    // The same model twice, or names that differ only beyond the shown part.
    let numbered = || {
        let names = names(1).into_iter().enumerate();
        names.map(|(number, name)| format!("{name} ({})", number + 1)).collect()
    };
    let names = named.unwrap_or_else(numbered);
    names.into_iter().zip(documents).map(|(name, document)| Model { name, document }).collect()
}

fn routes(layer: &LayerReport) -> bool {
    layer.heads.iter().any(|head| !head.shared)
}
