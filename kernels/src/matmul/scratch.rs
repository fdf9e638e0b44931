//! Memory of a thread that products pack and convert into: it grows to the largest need and stays,
//! so that a training step allocates nothing.

use std::cell::Cell;
use std::thread::LocalKey;

use bytemuck::{Pod, Zeroable};

/// A cache line, the alignment of scratch memory.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line([u8; 64]);

/// One of a thread's scratch buffers.
pub(super) type Scratch = LocalKey<Cell<Vec<Line>>>;

thread_local! {
    /// Packed, converted or transposed parts of the left matrix.
    pub(super) static LEFT: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    /// Packed or converted parts of the right matrix.
    pub(super) static RIGHT: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
    /// Sums in f32 that are not complete.
    pub(super) static PARTIAL: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// Runs `body` on `len` numbers of the thread's buffer, whatever they hold.
pub(super) fn with<T: Pod, R>(
    scratch: &'static Scratch,
    len: usize,
    body: impl FnOnce(&mut [T]) -> R,
) -> R {
    // Taken out while it is used: should `body` come here again, it would find an empty one.
    let mut lines = scratch.take();
    let needed = (len * size_of::<T>()).div_ceil(size_of::<Line>());
    if lines.len() < needed {
        lines.resize(needed, Line::zeroed());
    }
    let result = body(&mut bytemuck::cast_slice_mut(&mut lines)[..len]);
    scratch.set(lines);
    result
}
