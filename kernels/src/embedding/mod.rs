//! Token embedding: a gather forward, a scatter-add backward.

pub(crate) mod cpu;
#[cfg(gpu)]
pub(crate) mod cuda;

use crate::error::{Result, check_len, ensure};

/// Checks the lengths that both passes share, `rows` being the tokens' own; returns the rows of the
/// table.
fn check(
    operator: &'static str,
    width: usize,
    tokens: usize,
    table: usize,
    (what, rows): (&'static str, usize),
) -> Result<usize> {
    ensure(operator, width > 0 && table.is_multiple_of(width), || {
        format!("a table of {table} numbers does not divide into rows of {width}")
    })?;
    ensure(operator, table > 0 || tokens == 0, || "the table is empty".into())?;
    check_len(operator, what, rows, tokens * width)?;
    Ok(table / width)
}
