//! Token embedding: a gather forward, a scatter-add backward. A rank that holds some
//! rows alone gives zeros for the others.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use crate::error::{Result, check_len, ensure};
use crate::ranks::VocabularyRows;

/// Checks the lengths that both passes share, `activations` being the tokens' own rows.
fn check(
    operator: &'static str,
    width: usize,
    rows: VocabularyRows,
    tokens: usize,
    table: usize,
    (what, activations): (&'static str, usize),
) -> Result<()> {
    let VocabularyRows { vocab_size, first, count } = rows;
    ensure(operator, width > 0, || "rows have no width".into())?;
    ensure(operator, first + count <= vocab_size, || {
        format!("{count} rows from {first} on are not in a vocabulary of {vocab_size}")
    })?;
    check_len(operator, "table", table, count * width)?;
    check_len(operator, what, activations, tokens * width)
}
