//! A byte buffer aligned for every element type, reused from call to call.

#[derive(Default)]
pub(crate) struct Scratch {
    words: Vec<u64>,
    len: usize,
}

impl Scratch {
    /// Returns `len` bytes with undefined contents.
    pub(crate) fn of_len(&mut self, len: usize) -> &mut [u8] {
        let words = len.div_ceil(size_of::<u64>());
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        self.len = len;
        &mut bytemuck::cast_slice_mut(&mut self.words)[..len]
    }

    pub(crate) fn fill(&mut self, bytes: &[u8]) {
        self.of_len(bytes.len()).copy_from_slice(bytes);
    }

    #[cfg(any(feature = "mpi", test))]
    fn capacity(&self) -> usize {
        self.words.len() * size_of::<u64>()
    }

    /// Returns the bytes of the last requested length.
    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

/// Removes from `free` the smallest buffer that fits `len` bytes, or creates a buffer.
#[cfg(any(feature = "mpi", test))]
pub(crate) fn take(free: &mut Vec<Scratch>, len: usize) -> Scratch {
    let fitting = free.iter().enumerate().filter(|(_, scratch)| scratch.capacity() >= len);
    let smallest = fitting.min_by_key(|(_, scratch)| scratch.capacity()).map(|(at, _)| at);
    smallest.map_or_else(Scratch::default, |at| free.swap_remove(at))
}

/// Adds free buffers until `count` of them fit `len` bytes.
#[cfg(any(feature = "mpi", test))]
pub(crate) fn reserve(free: &mut Vec<Scratch>, count: usize, len: usize) {
    let num_fitting = free.iter().filter(|scratch| scratch.capacity() >= len).count();
    free.extend((num_fitting..count).map(|_| {
        let mut scratch = Scratch::default();
        scratch.of_len(len);
        scratch
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_buffers_count_once_and_are_kept_for_messages_that_need_them() {
        let mut free = Vec::new();
        reserve(&mut free, 3, 100);
        reserve(&mut free, 2, 80);
        reserve(&mut free, 1, 8);
        assert_eq!(free.len(), 3);
        reserve(&mut free, 1, 200);
        // A longer message uses the longest buffer. A short message does not use it up.
        assert_eq!(take(&mut free, 105).capacity(), 200);
        assert_eq!(take(&mut free, 100).capacity(), 104);
        assert_eq!(take(&mut free, 105).capacity(), 0);
        assert_eq!(free.len(), 2);
    }
}
