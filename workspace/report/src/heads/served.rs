//! The tokens that a head serves most: the largest share of their occurrences computes the head.

use crate::head_measures::OneHead;
use maud::{Markup, html};

use super::Model;
use crate::chart::shorten;

const TOKEN_CHARACTERS: usize = 24;

pub(super) fn has_tokens(model: &Model<'_>) -> bool {
    model.document.layers.iter().flat_map(|layer| &layer.heads).any(|head| !head.tokens.is_empty())
}

/// Returns a table of all routed heads, folded at first.
pub(super) fn part(Model { document, .. }: &Model<'_>) -> Markup {
    let routed = |head: &&OneHead| !head.tokens.is_empty();
    html! {
        details {
            summary { "Tokens of each routed head, with the share of their occurrences that compute it" }
            div class="scroll" tabindex="0" { table {
                thead { tr { th scope="col" { "layer" } th scope="col" { "head" } th scope="col" { "tokens" } } }
                tbody {
                    @for layer in &document.layers {
                        @for head in layer.heads.iter().filter(routed) { tr {
                            th scope="row" { (layer.layer) }
                            td { (head.head) }
                            td class="words" { @for token in &head.tokens {
                                code { (visible(&token.shown())) } " " (format!("{:.0}%", 100.0 * token.share)) " "
                            } }
                        } }
                    }
                }
            } }
        }
    }
}

/// Returns a token with visible spaces, tabs and line ends.
pub(super) fn visible(token: &str) -> String {
    let token = token.replace(' ', "\u{2423}").replace('\n', "\u{21b5}").replace('\t', "\u{21e5}");
    shorten(&token, TOKEN_CHARACTERS)
}
