//! The epilogue of a product: adds an addend to the sums, rounds the sums and stores them.

use half::bf16;
use pulp::Simd;

use super::dot::widen;

/// The destination of a tile's sums, and their addend.
#[derive(Clone, Copy)]
pub(super) struct Output {
    pub(super) addend: Addend,
    pub(super) target: Target,
}

/// The addend of the sums: elements and the distance of their rows.
#[derive(Clone, Copy)]
pub(super) enum Addend {
    Nothing,
    F32(*const f32, usize),
    Bf16(*const bf16, usize),
}

/// The destination of the sums, and the distance of its rows.
#[derive(Clone, Copy)]
pub(super) enum Target {
    F32(*mut f32, usize),
    Bf16(*mut bf16, usize),
}

impl Output {
    /// Returns the epilogue of a tile that starts at this row and column.
    pub(super) fn at(self, row: usize, column: usize) -> Output {
        let at = |stride: usize| row * stride + column;
        let addend = match self.addend {
            Addend::Nothing => Addend::Nothing,
            Addend::F32(start, stride) => Addend::F32(start.wrapping_add(at(stride)), stride),
            Addend::Bf16(start, stride) => Addend::Bf16(start.wrapping_add(at(stride)), stride),
        };
        let target = match self.target {
            Target::F32(start, stride) => Target::F32(start.wrapping_add(at(stride)), stride),
            Target::Bf16(start, stride) => Target::Bf16(start.wrapping_add(at(stride)), stride),
        };
        Output { addend, target }
    }

    /// Stores a row of sums. The last vector may have fewer columns.
    ///
    /// # Safety
    /// The pointers are valid for the row and `columns` columns, and no other thread accesses the
    /// written elements.
    #[allow(unsafe_code)]
    #[inline(always)]
    pub(super) unsafe fn store_row<S: Simd, const V: usize>(
        &self,
        simd: S,
        sums: &[S::f32s; V],
        row: usize,
        columns: usize,
    ) {
        for (v, &sums) in sums.iter().enumerate() {
            let column = v * S::F32_LANES;
            let count = S::F32_LANES.min(columns - column);
            // SAFETY: these columns are among the caller's.
            unsafe {
                let addend = self.addend.load(simd, row, column, count);
                self.target.store(simd, row, column, count, simd.add_f32s(sums, addend));
            }
        }
    }
}

impl Addend {
    /// Returns a vector of `count` elements, followed by zeros.
    ///
    /// # Safety
    /// The elements, starting at this row and column, are valid.
    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn load<S: Simd>(self, simd: S, row: usize, column: usize, count: usize) -> S::f32s {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Addend::Nothing => simd.splat_f32s(0.0),
                Addend::F32(start, stride) => {
                    let start = start.add(row * stride + column);
                    if count == S::F32_LANES {
                        return start.cast::<S::f32s>().read_unaligned();
                    }
                    simd.partial_load_f32s(std::slice::from_raw_parts(start, count))
                }
                Addend::Bf16(start, stride) => {
                    let start = start.add(row * stride + column);
                    let mut vector = simd.splat_f32s(0.0);
                    let elements = std::slice::from_raw_parts(start, count);
                    let slots = bytemuck::cast_slice_mut(std::slice::from_mut(&mut vector));
                    widen(elements, slots);
                    vector
                }
            }
        }
    }
}

impl Target {
    /// Stores the first `count` elements of a vector.
    ///
    /// # Safety
    /// The elements, starting at this row and column, are valid, and nothing else accesses them.
    #[allow(unsafe_code)]
    #[inline(always)]
    unsafe fn store<S: Simd>(
        self,
        simd: S,
        row: usize,
        column: usize,
        count: usize,
        value: S::f32s,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Target::F32(start, stride) => {
                    let start = start.add(row * stride + column);
                    if count == S::F32_LANES {
                        return start.cast::<S::f32s>().write_unaligned(value);
                    }
                    let out = std::slice::from_raw_parts_mut(start, count);
                    simd.partial_store_f32s(out, value);
                }
                Target::Bf16(start, stride) => {
                    let start = start.add(row * stride + column);
                    let out = std::slice::from_raw_parts_mut(start, count);
                    let values: &[f32] = bytemuck::cast_slice(std::slice::from_ref(&value));
                    for (slot, &value) in out.iter_mut().zip(values) {
                        *slot = bf16::from_f32(value);
                    }
                }
            }
        }
    }
}
