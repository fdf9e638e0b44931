//! Token embedding: a gather forward, a scatter-add backward. A rank with a shard of the rows
//! returns zeros for other ranks' rows.

mod cpu;
#[cfg(gpu)]
mod cuda;

use crate::ranks::VocabularyRows;
use crate::{Element, Memory, Result, View, ViewMut, check_len, ensure};

/// Arguments of [`Embedding::embedding_forward`].
pub struct EmbeddingForward<'a, M: Memory, T: Element> {
    /// C.
    pub width: usize,
    /// The rows of the vocabulary in `table`.
    pub rows: VocabularyRows,
    /// `[N]`.
    pub ids: View<'a, M, u32>,
    /// `[V, C]`.
    pub table: View<'a, M, T>,
    /// Overwritten; `[N, C]`.
    pub out: ViewMut<'a, M, T>,
}

/// Arguments of [`Embedding::embedding_backward`].
pub struct EmbeddingBackward<'a, M: Memory, T: Element, G: Element> {
    /// C.
    pub width: usize,
    /// The rows of the vocabulary in `d_table`.
    pub rows: VocabularyRows,
    /// `[N]`.
    pub ids: View<'a, M, u32>,
    /// `[N, C]`.
    pub d_out: View<'a, M, T>,
    /// Added to; `[V, C]`.
    pub d_table: ViewMut<'a, M, G>,
}

/// The embedding as an operator of a device.
pub trait Embedding: Memory {
    /// Computes `out[n] = table[ids[n]]`; zeros for rows outside the table.
    ///
    /// # Errors
    /// Fails for an id outside the vocabulary, if the device can detect it.
    fn embedding_forward<T: Element>(&self, args: EmbeddingForward<'_, Self, T>) -> Result<()>;

    /// Computes `d_table[ids[n]] += d_out[n]`, in the order of n, for the rows in the table.
    fn embedding_backward<T: Element, G: Element>(
        &self,
        args: EmbeddingBackward<'_, Self, T, G>,
    ) -> Result<()>;
}

/// Checks the lengths of both passes: of the ids, of the table and of the tokens' rows, which have this name.
fn check(
    operator: &'static str,
    width: usize,
    rows: VocabularyRows,
    name: &'static str,
    [tokens, table, activations]: [usize; 3],
) -> Result<()> {
    let VocabularyRows { vocab_size, first, count } = rows;
    ensure(operator, width > 0, || "rows have no width".into())?;
    ensure(operator, first + count <= vocab_size, || {
        format!("{count} rows from {first} on exceed a vocabulary of {vocab_size}")
    })?;
    check_len(operator, "table", table, count * width)?;
    check_len(operator, name, activations, tokens * width)
}
