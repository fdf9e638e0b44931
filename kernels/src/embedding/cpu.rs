//! The CPU bodies of the embedding.

use crate::error::{Error, Result, check_len, ensure};
use crate::scalar::Element;

pub(crate) fn forward<T: Element>(
    width: usize,
    ids: &[u32],
    table: &[T],
    out: &mut [T],
) -> Result<()> {
    let rows = check_ids("embedding_forward", width, ids, table.len())?;
    check_len("embedding_forward", "out", out.len(), ids.len() * width)?;
    for (&id, out) in ids.iter().zip(out.chunks_exact_mut(width)) {
        let row = id as usize;
        debug_assert!(row < rows);
        out.copy_from_slice(&table[row * width..][..width]);
    }
    Ok(())
}

pub(crate) fn backward<T: Element, G: Element>(
    width: usize,
    ids: &[u32],
    d_out: &[T],
    d_table: &mut [G],
) -> Result<()> {
    check_ids("embedding_backward", width, ids, d_table.len())?;
    check_len("embedding_backward", "d_out", d_out.len(), ids.len() * width)?;
    for (&id, d_out) in ids.iter().zip(d_out.chunks_exact(width)) {
        let d_row = &mut d_table[id as usize * width..][..width];
        for (slot, &gradient) in d_row.iter_mut().zip(d_out) {
            *slot = G::from_f32(slot.to_f32() + gradient.to_f32());
        }
    }
    Ok(())
}

/// Checks every id against the table; returns its number of rows.
fn check_ids(operator: &'static str, width: usize, ids: &[u32], table: usize) -> Result<usize> {
    ensure(operator, width > 0 && table.is_multiple_of(width), || {
        format!("a table of {table} numbers does not divide into rows of {width}")
    })?;
    let rows = table / width;
    match ids.iter().find(|&&id| id as usize >= rows) {
        Some(&id) => Err(Error::Vocabulary { id, vocab_size: rows }),
        None => Ok(rows),
    }
}
