//! The CPU bodies of the embedding.

use super::check;
use crate::error::{Error, Result};
use crate::scalar::Element;

pub(crate) fn forward<T: Element>(
    width: usize,
    ids: &[u32],
    table: &[T],
    out: &mut [T],
) -> Result<()> {
    let rows = check("embedding_forward", width, ids.len(), table.len(), ("out", out.len()))?;
    check_ids(ids, rows)?;
    for (&id, out) in ids.iter().zip(out.chunks_exact_mut(width)) {
        out.copy_from_slice(&table[id as usize * width..][..width]);
    }
    Ok(())
}

pub(crate) fn backward<T: Element, G: Element>(
    width: usize,
    ids: &[u32],
    d_out: &[T],
    d_table: &mut [G],
) -> Result<()> {
    let gradient = ("d_out", d_out.len());
    let rows = check("embedding_backward", width, ids.len(), d_table.len(), gradient)?;
    check_ids(ids, rows)?;
    for (&id, d_out) in ids.iter().zip(d_out.chunks_exact(width)) {
        let d_row = &mut d_table[id as usize * width..][..width];
        for (slot, &gradient) in d_row.iter_mut().zip(d_out) {
            *slot = G::from_f32(slot.to_f32() + gradient.to_f32());
        }
    }
    Ok(())
}

/// Refuses an id without a row.
fn check_ids(ids: &[u32], rows: usize) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= rows) {
        Some(&id) => Err(Error::Vocabulary { id, vocab_size: rows }),
        None => Ok(()),
    }
}
