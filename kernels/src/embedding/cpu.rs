//! The CPU bodies of the embedding.

use super::check;
use crate::error::{Error, Result};
use crate::ranks::VocabularyRows;
use crate::scalar::Element;

pub(crate) fn forward<T: Element>(
    width: usize,
    rows: VocabularyRows,
    ids: &[u32],
    table: &[T],
    out: &mut [T],
) -> Result<()> {
    check("embedding_forward", width, rows, ids.len(), table.len(), ("out", out.len()))?;
    check_ids(ids, rows.vocab_size)?;
    for (&id, out) in ids.iter().zip(out.chunks_exact_mut(width)) {
        match rows.place(id) {
            Some(row) => out.copy_from_slice(&table[row * width..][..width]),
            None => out.fill(T::zeroed()),
        }
    }
    Ok(())
}

pub(crate) fn backward<T: Element, G: Element>(
    width: usize,
    rows: VocabularyRows,
    ids: &[u32],
    d_out: &[T],
    d_table: &mut [G],
) -> Result<()> {
    let gradient = ("d_out", d_out.len());
    check("embedding_backward", width, rows, ids.len(), d_table.len(), gradient)?;
    check_ids(ids, rows.vocab_size)?;
    for (&id, d_out) in ids.iter().zip(d_out.chunks_exact(width)) {
        let Some(row) = rows.place(id) else { continue };
        let d_row = &mut d_table[row * width..][..width];
        for (slot, &gradient) in d_row.iter_mut().zip(d_out) {
            *slot = G::from_f32(slot.to_f32() + gradient.to_f32());
        }
    }
    Ok(())
}

/// Refuses an id outside the vocabulary.
fn check_ids(ids: &[u32], vocab_size: usize) -> Result<()> {
    match ids.iter().find(|&&id| id as usize >= vocab_size) {
        Some(&id) => Err(Error::Vocabulary { id, vocab_size }),
        None => Ok(()),
    }
}
