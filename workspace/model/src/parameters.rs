//! Flat buffers on a device: a model's weights, or its gradients, remainders or moments.
//!
//! Data ranks shard the optimiser's state (ZeRO-1): each rank has its local [`Shard`] of every flat buffer. A buffer is
//! taken out while a collective uses it, and put back afterwards.

use std::ops::Range;

use moh_comm::Group;
use moh_kernels::{Accumulation, AnyBuffer, AnyView, AnyViewMut, ElementType, Memory};

use crate::slice::SliceRun;
use crate::{Error, ModelLayout, Result, Segment};

/// Maximum elements that are converted at a time: a tensor of gigabytes has no second copy on the host.
const UPLOAD: usize = 1 << 20;

/// One of the equal shards of every flat buffer.
///
/// ```
/// use moh_model::parameters::Shard;
///
/// // The second of four data ranks updates the second quarter of a buffer.
/// assert_eq!(Shard { rank: 1, size: 4 }.range(1024), 256..512);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// The shard's index.
    pub rank: usize,
    /// The number of shards.
    pub size: usize,
}

impl Shard {
    /// A single shard: the whole buffer.
    pub const WHOLE: Shard = Shard { rank: 0, size: 1 };

    /// Returns the shard of this rank of `group`.
    pub fn from_group(group: &Group) -> Self {
        Shard { rank: group.rank(), size: group.size() }
    }

    /// Returns the shard's range in a buffer of `len` elements, a multiple of the number of shards.
    pub fn range(&self, len: usize) -> Range<usize> {
        let part = len / self.size;
        self.rank * part..(self.rank + 1) * part
    }
}

/// The location of a layer's parameters: a range of one flat buffer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Hash)]
pub struct ParameterRange {
    /// The index of the buffer.
    pub buffer: usize,
    /// The elements in the buffer.
    pub range: Range<usize>,
}

impl ParameterRange {
    /// Returns the range that joins adjacent ranges, given in order.
    pub fn joined(parts: impl IntoIterator<Item = Self>) -> Self {
        let join = |a: Self, b: Self| ParameterRange { range: a.range.start..b.range.end, ..a };
        parts.into_iter().reduce(join).unwrap_or_default()
    }
}

/// Returns the intersection of two ranges.
pub fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

fn taken(flat: usize) -> ! {
    panic!("buffer {flat} is used while a collective has it")
}

/// One device buffer for each [`crate::layout::FlatLayout`] of a model, or a shard of each buffer. Methods panic for a
/// buffer that is taken out for a collective.
pub struct FlatBuffers<B: Memory> {
    /// `None` while a buffer is taken out.
    buffers: Vec<Option<AnyBuffer<B>>>,
    /// Buffers that the next gradient overwrites ([`FlatBuffers::mark_stale`]).
    stale: Vec<bool>,
    /// Ranges without gradients, by buffer ([`FlatBuffers::freeze`]).
    frozen: Vec<Vec<Range<usize>>>,
    shard: Shard,
}

/// A callback that receives all buffers and the index of one buffer.
pub type OnBuffer<'a, B> = &'a mut dyn FnMut(&mut FlatBuffers<B>, usize) -> Result<()>;

impl<B: Memory> FlatBuffers<B> {
    /// Allocates whole buffers of zeros.
    pub fn zeros(backend: &B, element: ElementType, layout: &ModelLayout) -> Result<Self> {
        Self::zeros_of(backend, element, layout, Shard::WHOLE)
    }

    /// Allocates a shard of zeros of each buffer.
    pub fn zeros_of(
        backend: &B,
        element: ElementType,
        layout: &ModelLayout,
        shard: Shard,
    ) -> Result<Self> {
        Self::allocated(layout, shard, |len| Ok(AnyBuffer::zeros(backend, element, len)?))
    }

    /// Allocates a shard of the remainders of bf16 weights, all zero.
    pub fn remainders(backend: &B, layout: &ModelLayout, shard: Shard) -> Result<Self> {
        Self::allocated(layout, shard, |len| Ok(AnyBuffer::I16(backend.allocate(len)?)))
    }

    fn allocated(
        layout: &ModelLayout,
        shard: Shard,
        allocate: impl Fn(usize) -> Result<AnyBuffer<B>>,
    ) -> Result<Self> {
        let buffers = (layout.flats.iter())
            .map(|flat| allocate(shard.range(flat.len).len()).map(Some))
            .collect::<Result<Vec<_>>>()?;
        let (stale, frozen) = (vec![false; buffers.len()], vec![Vec::new(); buffers.len()]);
        Ok(FlatBuffers { buffers, stale, frozen, shard })
    }

    /// Returns a range of one buffer, within the local shard.
    pub fn view(&self, flat: usize, range: Range<usize>) -> AnyView<'_, B> {
        let start = self.local_range(flat).start;
        self.flat(flat).view(range.start - start..range.end - start)
    }

    /// Returns a mutable range of one buffer, within the local shard.
    pub fn view_mut(&mut self, flat: usize, range: Range<usize>) -> AnyViewMut<'_, B> {
        let start = self.local_range(flat).start;
        self.flat_mut(flat).view_mut(range.start - start..range.end - start)
    }

    /// Returns the parameters of a layer.
    pub fn get(&self, parameters: &ParameterRange) -> AnyView<'_, B> {
        self.view(parameters.buffer, parameters.range.clone())
    }

    /// Returns the mutable parameters of a layer.
    pub fn get_mut(&mut self, parameters: &ParameterRange) -> AnyViewMut<'_, B> {
        self.view_mut(parameters.buffer, parameters.range.clone())
    }

    /// Freezes tensors: a backward pass does not compute the gradients of their matrices. The elements of frozen gradients
    /// are undefined.
    pub fn freeze(&mut self, layout: &ModelLayout, is_frozen: impl Fn(&Segment) -> bool) {
        let runs = layout.flats.iter().map(|flat| flat.runs(&is_frozen).into_iter());
        self.frozen = runs
            .map(|runs| runs.filter(|(_, is_frozen)| *is_frozen).map(|(range, _)| range).collect())
            .collect();
    }

    /// Returns whether a range has gradients: at least one of its tensors is not frozen.
    pub fn has_gradients(&self, flat: usize, range: &Range<usize>) -> bool {
        let covers = |frozen: &Range<usize>| frozen.start <= range.start && range.end <= frozen.end;
        !self.frozen[flat].iter().any(covers)
    }

    /// Returns the mutable gradients of a layer; `None` for a frozen layer.
    pub fn gradients_mut(&mut self, parameters: &ParameterRange) -> Option<AnyViewMut<'_, B>> {
        self.has_gradients(parameters.buffer, &parameters.range).then(|| self.get_mut(parameters))
    }

    /// Returns the range of a flat buffer that the local shard covers.
    pub fn local_range(&self, flat: usize) -> Range<usize> {
        self.shard.range(self.flat(flat).len() * self.shard.size)
    }

    /// Returns one buffer, or its local shard.
    pub fn flat(&self, flat: usize) -> &AnyBuffer<B> {
        self.buffers[flat].as_ref().unwrap_or_else(|| taken(flat))
    }

    /// Returns one mutable buffer, or its local shard.
    pub fn flat_mut(&mut self, flat: usize) -> &mut AnyBuffer<B> {
        self.buffers[flat].as_mut().unwrap_or_else(|| taken(flat))
    }

    /// Takes a buffer out, for a collective.
    pub fn take(&mut self, flat: usize) -> AnyBuffer<B> {
        self.buffers[flat].take().unwrap_or_else(|| taken(flat))
    }

    /// Puts back a buffer that was taken out.
    pub fn put(&mut self, flat: usize, buffer: AnyBuffer<B>) {
        self.buffers[flat] = Some(buffer);
    }

    /// Fills the elements of `shard` of every tensor, within the local shard. `source` writes a range of the elements
    /// of a tensor's local slice. Each value is rounded to the type of the buffer; buffers of remainders get the part that
    /// rounding to bf16 removes.
    pub fn fill_shard<E: From<Error>>(
        &mut self,
        backend: &B,
        layout: &ModelLayout,
        shard: Shard,
        mut source: impl FnMut((usize, &Segment), Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut values = Vec::new();
        for (flat, segment) in layout.segments() {
            let part = overlap(&segment.range, &shard.range(layout.flats[flat].len));
            if part.is_empty() {
                continue;
            }
            values.clear();
            values.resize(part.len(), 0f32);
            let start = segment.range.start;
            let local = part.start - start..part.end - start;
            source((flat, segment), local, &mut values)?;
            for (index, values) in values.chunks(UPLOAD).enumerate() {
                let start = part.start + index * UPLOAD;
                let place = self.view_mut(flat, start..start + values.len());
                place.fill_from_f32(backend, values).map_err(Error::from)?;
            }
        }
        Ok(())
    }

    /// Sets all elements to zero.
    pub fn zero(&mut self, backend: &B) -> Result<()> {
        (0..self.buffers.len())
            .try_for_each(|flat| Ok(self.flat_mut(flat).whole_mut().zero(backend)?))
    }

    /// Marks all buffers as stale at the start of a step: the next gradient overwrites them, which saves a pass over
    /// memory to zero them. Until [`Self::mark_written`] only a backward pass may use them. Padding does not change.
    pub fn mark_stale(&mut self) {
        self.stale.fill(true);
    }

    /// Returns how the next gradient changes a buffer: it overwrites the elements, or is added to them.
    pub fn accumulation(&self, flat: usize) -> Accumulation {
        if self.stale[flat] { Accumulation::Overwrite } else { Accumulation::Add }
    }

    /// Marks a buffer as written: its elements are not stale.
    pub fn mark_written(&mut self, flat: usize) {
        self.stale[flat] = false;
    }

    /// Zeroes a stale buffer and marks it as written, before gradients of only some of its tensors are added.
    pub fn clear(&mut self, backend: &B, flat: usize) -> Result<()> {
        if self.stale[flat] {
            self.flat_mut(flat).whole_mut().zero(backend)?;
            self.mark_written(flat);
        }
        Ok(())
    }

    /// Zeroes a range of a stale buffer, for operators that can only accumulate.
    pub fn clear_stale(&mut self, backend: &B, parameters: &ParameterRange) -> Result<()> {
        match self.accumulation(parameters.buffer) {
            Accumulation::Overwrite => Ok(self.get_mut(parameters).zero(backend)?),
            Accumulation::Add => Ok(()),
        }
    }

    /// Fills the local slice of every tensor with values of `source`, rounded to its type. `source` writes the values of
    /// the whole tensor; it is not called for tensors without a local slice.
    pub fn fill<E: From<Error>>(
        &mut self,
        backend: &B,
        layout: &ModelLayout,
        mut source: impl FnMut(&Segment, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut whole = Vec::new();
        let fill = |(_, segment): (usize, &Segment), part: Range<usize>, values: &mut [f32]| {
            if values.len() == segment.whole_len() {
                return source(segment, values);
            }
            whole.clear();
            whole.resize(segment.whole_len(), 0f32);
            source(segment, &mut whole)?;
            let start = part.start;
            for SliceRun { local, whole: at, len } in segment.slice.runs(part) {
                values[local - start..][..len].copy_from_slice(&whole[at..at + len]);
            }
            Ok(())
        };
        self.fill_shard(backend, layout, self.shard, fill)
    }

    /// Copies the local slice of a tensor to the host as f32.
    pub fn read(&self, backend: &B, flat: usize, segment: &Segment) -> Result<Vec<f32>> {
        self.read_range(backend, flat, segment.range.clone())
    }

    /// Copies a range of a buffer, within the local shard, to the host as f32.
    pub fn read_range(&self, backend: &B, flat: usize, range: Range<usize>) -> Result<Vec<f32>> {
        Ok(self.view(flat, range).to_f32(backend)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_a_buffer_without_overlap() {
        let ranges: Vec<_> = (0..3).map(|rank| Shard { rank, size: 3 }.range(12)).collect();
        assert_eq!(ranges, [0..4, 4..8, 8..12]);
        assert_eq!(Shard::WHOLE.range(7), 0..7);
    }

    #[test]
    fn ranges_that_do_not_meet_share_nothing() {
        assert_eq!(overlap(&(2..9), &(5..20)), 5..9);
        assert!(overlap(&(2..5), &(5..9)).is_empty());
        assert!(overlap(&(7..9), &(1..3)).is_empty());
    }
}
