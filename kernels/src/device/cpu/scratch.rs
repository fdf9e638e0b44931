//! Scratch memory of a thread. It grows to the size of the largest task, and later tasks reuse it:
//! operators allocate nothing in the steady state.

use std::cell::Cell;
use std::thread::LocalKey;

use super::huge_pages;

/// A cache line of elements, to which scratch is aligned.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

/// Elements of a cache line.
const LINE: usize = 16;

/// One kind of a thread's memory.
type Scratch = LocalKey<Cell<Vec<Line>>>;

thread_local! {
    static OWN: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    static SHARED: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// Runs `body` with slices of these lengths, each starting at a cache line. Their contents are
/// unspecified.
///
/// A nested call has memory of its own, which is freed after it.
pub(crate) fn with_scratch<const N: usize, R>(
    lengths: [usize; N],
    body: impl FnOnce([&mut [f32]; N]) -> R,
) -> R {
    with(&OWN, lengths, body)
}

/// Runs `body` like [`with_scratch`], with memory that the calling thread shares with its helpers in `body`. Each of
/// these threads, including the calling thread, also has its own [`with_scratch`].
pub(crate) fn with_shared_scratch<const N: usize, R>(
    lengths: [usize; N],
    body: impl FnOnce([&mut [f32]; N]) -> R,
) -> R {
    with(&SHARED, lengths, body)
}

fn with<const N: usize, R>(
    scratch: &'static Scratch,
    lengths: [usize; N],
    body: impl FnOnce([&mut [f32]; N]) -> R,
) -> R {
    let mut memory = scratch.take();
    grow(&mut memory, lines(&lengths));
    let mut rest: &mut [Line] = &mut memory;
    let slices = lengths.map(|len| {
        let (part, after) = std::mem::take(&mut rest).split_at_mut(len.div_ceil(LINE));
        rest = after;
        &mut elements(part)[..len]
    });
    let result = body(slices);
    scratch.set(memory);
    result
}

/// Returns the bytes that [`with_scratch`] needs for slices of these lengths.
pub(crate) fn bytes(lengths: &[usize]) -> usize {
    lines(lengths).saturating_mul(size_of::<Line>())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ScratchBytes {
    /// Bytes of [`with_scratch`].
    pub own: usize,
    /// Bytes of `with_shared_scratch`; used only on the thread that calls operators.
    pub shared: usize,
}

impl ScratchBytes {
    pub(crate) fn total(self) -> usize {
        self.own.saturating_add(self.shared)
    }

    /// Returns the maximum of each kind.
    pub(crate) fn max(self, other: ScratchBytes) -> Self {
        ScratchBytes { own: self.own.max(other.own), shared: self.shared.max(other.shared) }
    }
}

impl From<usize> for ScratchBytes {
    fn from(own: usize) -> Self {
        ScratchBytes { own, shared: 0 }
    }
}

/// Ensures that the calling thread has at least these bytes of scratch.
pub(crate) fn reserve(bytes: ScratchBytes) {
    for (scratch, bytes) in [(&OWN, bytes.own), (&SHARED, bytes.shared)] {
        let mut memory = scratch.take();
        grow(&mut memory, bytes.div_ceil(size_of::<Line>()));
        scratch.set(memory);
    }
}

/// Returns the bytes of the calling thread's scratch.
pub(crate) fn held() -> usize {
    let held = |scratch: &'static Scratch| {
        let memory = scratch.take();
        let bytes = memory.len() * size_of::<Line>();
        scratch.set(memory);
        bytes
    };
    held(&OWN) + held(&SHARED)
}

fn lines(lengths: &[usize]) -> usize {
    lengths.iter().map(|len| len.div_ceil(LINE)).sum()
}

fn grow(memory: &mut Vec<Line>, lines: usize) {
    if memory.len() < lines {
        // `resize` alone might allocate more than requested.
        memory.reserve_exact(lines - memory.len());
        huge_pages::request(memory.spare_capacity_mut());
        memory.resize(lines, Line([0.0; LINE]));
    }
}

fn elements(lines: &mut [Line]) -> &mut [f32] {
    // SAFETY: a line is LINE elements without padding (its size is its alignment), so the slice
    // covers the same bytes, and has the exclusive borrow of the lines.
    #[allow(unsafe_code)]
    unsafe {
        std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len() * LINE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_apart_and_aligned_within_a_call_and_in_one_inside_it() {
        with_scratch([3, 0, 17], |[a, b, c]| {
            assert_eq!((a.len(), b.len(), c.len()), (3, 0, 17));
            assert!(a.as_ptr().addr().is_multiple_of(64) && c.as_ptr().addr().is_multiple_of(64));
            a.fill(1.0);
            c.fill(2.0);
            with_scratch([40], |[inner]| inner.fill(3.0));
            assert!(a.iter().all(|&x| x == 1.0) && c.iter().all(|&x| x == 2.0));
        });
    }
}
