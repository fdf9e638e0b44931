//! The commands of `moh-data`.

pub mod accept;
pub mod info;
mod inputs;
pub mod prepare;
mod recorded_tokenizer;
pub mod show;
pub mod verify;

use std::collections::BTreeMap;

/// Special tokens that texts name with their number; `None` if there are none.
fn special_tokens(found: Option<&BTreeMap<String, u64>>) -> Option<String> {
    let shown = |(token, count): (&String, &u64)| format!("{token} {count}");
    let found = found.filter(|found| !found.is_empty())?;
    Some(found.iter().map(shown).collect::<Vec<_>>().join(", "))
}
