//! The embedding on a GPU.

use bytemuck::Zeroable;

use super::{Embedding, EmbeddingBackward, EmbeddingForward, check};
use crate::cuda::parameters::embedding::Parameters;
use crate::cuda::{Cuda, CudaView, name};
use crate::ranks::VocabularyRows;
use crate::{Element, Result};

impl Parameters {
    /// Returns the arguments of both passes; `table` and `rows` are null.
    fn new(width: usize, rows: VocabularyRows, ids: CudaView<'_, u32>) -> Self {
        Parameters {
            ids: ids.address,
            tokens: ids.len as u64,
            width: width as u64,
            first_row: rows.first as u64,
            count: rows.count as u64,
            ..Self::zeroed()
        }
    }
}

impl Embedding for Cuda {
    fn embedding_forward<T: Element>(&self, args: EmbeddingForward<'_, Self, T>) -> Result<()> {
        let EmbeddingForward { width, rows, ids, table, out } = args;
        check("embedding_forward", width, rows, "out", [ids.len, table.len, out.len])?;
        let parameters = Parameters {
            table: table.address,
            rows: out.address,
            ..Parameters::new(width, rows, ids)
        };
        self.launch(&name::<T>("embedding_forward"), [ids.len, 1], 0, &parameters)
    }

    fn embedding_backward<T: Element, G: Element>(
        &self,
        args: EmbeddingBackward<'_, Self, T, G>,
    ) -> Result<()> {
        let EmbeddingBackward { width, rows, ids, d_out, d_table } = args;
        check("embedding_backward", width, rows, "d_out", [ids.len, d_table.len, d_out.len])?;
        let parameters = Parameters {
            table: d_table.address,
            rows: d_out.address,
            ..Parameters::new(width, rows, ids)
        };
        let kernel = name::<G>(&name::<T>("embedding_backward"));
        self.launch(&kernel, [ids.len, 1], 0, &parameters)
    }
}
