//! A byte buffer aligned for every element type, reused from call to call.

/// A growing buffer.
#[derive(Default)]
pub(crate) struct Scratch {
    words: Vec<u64>,
    len: usize,
}

impl Scratch {
    /// `len` bytes with undefined contents.
    pub(crate) fn of_len(&mut self, len: usize) -> &mut [u8] {
        let words = len.div_ceil(size_of::<u64>());
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        self.len = len;
        &mut bytemuck::cast_slice_mut(&mut self.words)[..len]
    }

    /// Replaces the contents by these bytes.
    pub(crate) fn fill(&mut self, bytes: &[u8]) {
        self.of_len(bytes.len()).copy_from_slice(bytes);
    }

    /// The bytes of the last requested length.
    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}
