//! The CPU bodies of the embedding.

use super::{Embedding, EmbeddingBackward, EmbeddingForward, check};
use crate::{Cpu, Element, Result, check_ids};

impl Embedding for Cpu {
    fn embedding_forward<T: Element>(&self, args: EmbeddingForward<'_, Self, T>) -> Result<()> {
        let EmbeddingForward { width, rows, ids, table, out } = args;
        check("embedding_forward", width, rows, "out", [ids.len(), table.len(), out.len()])?;
        check_ids(ids.iter().copied(), rows.vocab_size)?;
        for (&id, out) in ids.iter().zip(out.chunks_exact_mut(width)) {
            match rows.local(id) {
                Some(row) => out.copy_from_slice(&table[row * width..][..width]),
                None => out.fill(T::zeroed()),
            }
        }
        Ok(())
    }

    fn embedding_backward<T: Element, G: Element>(
        &self,
        args: EmbeddingBackward<'_, Self, T, G>,
    ) -> Result<()> {
        let EmbeddingBackward { width, rows, ids, d_out, d_table } = args;
        let lens = [ids.len(), d_table.len(), d_out.len()];
        check("embedding_backward", width, rows, "d_out", lens)?;
        check_ids(ids.iter().copied(), rows.vocab_size)?;
        for (&id, d_out) in ids.iter().zip(d_out.chunks_exact(width)) {
            let Some(row) = rows.local(id) else { continue };
            let d_row = &mut d_table[row * width..][..width];
            for (slot, &gradient) in d_row.iter_mut().zip(d_out) {
                *slot = G::from_f32(slot.to_f32() + gradient.to_f32());
            }
        }
        Ok(())
    }
}
