//! Flat buffers on a device: a model's weights, or its gradients, remainders or moments.
//!
//! Ranks that see different data share the optimiser's state (ZeRO-1): each holds one [`Shard`] of
//! every flat buffer. Gradients are reduced to it and weights gathered from it in place, buffer by
//! buffer, while other work goes on; a buffer is away until [`FlatBuffers::arrive`].

use std::ops::Range;

use half::bf16;
use moh_comm::{Group, Pending, Reduce};
use moh_kernels::{Accumulation, Backend, Element, Scalar, View, ViewMut};

use crate::Error;
use crate::layout::{ModelLayout, Segment};

/// One of the equal parts of every flat buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    /// Its number.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
}

impl Shard {
    /// All of it.
    pub const WHOLE: Shard = Shard { rank: 0, size: 1 };

    /// The part of this rank of `group`.
    pub fn of(group: &Group) -> Self {
        Shard { rank: group.rank(), size: group.size() }
    }

    /// Its numbers in a buffer of `len`, which is a multiple of the number of parts.
    pub fn range(&self, len: usize) -> Range<usize> {
        let part = len / self.size;
        self.rank * part..(self.rank + 1) * part
    }
}

/// The numbers that two ranges share.
pub fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// A buffer, or the exchange that has it.
enum Slot<B: Backend, S: Scalar> {
    Here(B::Buffer<S>),
    Away(Pending<B::Buffer<S>>),
    /// A rounded copy is exchanged, whose part of the shard then replaces the exact one.
    Rounded(B::Buffer<S>, Pending<B::Buffer<bf16>>, Shard),
    /// Between these, or lost to an exchange that failed.
    Lost,
}

/// Room for the rounded copy of each buffer.
struct Rounding<B: Backend> {
    backend: B,
    copies: Vec<Option<B::Buffer<bf16>>>,
}

/// One device buffer for each [`crate::layout::FlatLayout`] of a model, or a shard of each.
pub struct FlatBuffers<B: Backend, S: Scalar> {
    slots: Vec<Slot<B, S>>,
    /// Buffers whose numbers count for nothing ([`FlatBuffers::forget`]).
    forgotten: Vec<bool>,
    shard: Shard,
    rounding: Option<Rounding<B>>,
}

impl<B: Backend, S: Scalar> FlatBuffers<B, S> {
    /// Whole buffers of zeros.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn zeros(backend: &B, layout: &ModelLayout) -> Result<Self, Error> {
        Self::zeros_of(backend, layout, Shard::WHOLE)
    }

    /// A shard of each buffer, of zeros.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn zeros_of(backend: &B, layout: &ModelLayout, shard: Shard) -> Result<Self, Error> {
        let slots = (layout.flats.iter())
            .map(|flat| Ok(Slot::Here(backend.allocate(shard.range(flat.len).len())?)))
            .collect::<Result<Vec<_>, Error>>()?;
        Ok(FlatBuffers { forgotten: vec![false; slots.len()], slots, shard, rounding: None })
    }

    /// A part of one buffer, which the shard holds.
    pub fn view(&self, flat: usize, range: Range<usize>) -> View<'_, B, S> {
        let start = self.held(flat).start;
        B::view(self.flat(flat), range.start - start..range.end - start)
    }

    /// A part of one buffer, which the shard holds, for writing.
    pub fn view_mut(&mut self, flat: usize, range: Range<usize>) -> ViewMut<'_, B, S> {
        let start = self.held(flat).start;
        B::view_mut(self.flat_mut(flat), range.start - start..range.end - start)
    }

    /// The range of a flat buffer that is held here.
    pub fn held(&self, flat: usize) -> Range<usize> {
        self.shard.range(B::len(self.flat(flat)) * self.shard.size)
    }

    /// One buffer, or the shard of it.
    ///
    /// # Panics
    /// While the buffer is away.
    pub fn flat(&self, flat: usize) -> &B::Buffer<S> {
        match &self.slots[flat] {
            Slot::Here(buffer) => buffer,
            _ => panic!("buffer {flat} is used before it has arrived"),
        }
    }

    /// One buffer, or the shard of it, for writing.
    ///
    /// # Panics
    /// While the buffer is away.
    pub fn flat_mut(&mut self, flat: usize) -> &mut B::Buffer<S> {
        match &mut self.slots[flat] {
            Slot::Here(buffer) => buffer,
            _ => panic!("buffer {flat} is used before it has arrived"),
        }
    }

    /// As [`FlatBuffers::fill`], with what `number` makes of each value.
    ///
    /// # Errors
    /// What `source` refuses, or the device.
    pub fn fill_by<E: From<Error>>(
        &mut self,
        number: impl Fn(f32) -> S,
        backend: &B,
        layout: &ModelLayout,
        mut source: impl FnMut(&Segment, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (mut values, mut numbers) = (Vec::new(), Vec::new());
        for (flat, segment) in layout.segments() {
            let part = overlap(&segment.range, &self.held(flat));
            if part.is_empty() {
                continue;
            }
            values.clear();
            values.resize(segment.whole_len(), 0f32);
            source(segment, &mut values)?;
            let start = segment.range.start;
            numbers.clear();
            for run in segment.slice.runs(part.start - start..part.end - start) {
                let values = &values[run.whole..run.whole + run.len];
                numbers.extend(values.iter().map(|&value| number(value)));
            }
            backend.upload(&numbers, self.view_mut(flat, part)).map_err(Error::from)?;
        }
        Ok(())
    }

    /// Sets every number to zero.
    ///
    /// # Errors
    /// When the device fails.
    pub fn zero(&mut self, backend: &B) -> Result<(), Error> {
        for flat in 0..self.slots.len() {
            let buffer = self.flat_mut(flat);
            let len = B::len(buffer);
            backend.zero(B::view_mut(buffer, 0..len))?;
        }
        Ok(())
    }

    /// Makes the numbers of all buffers count as zeros, without a pass over memory: what would be
    /// added to them replaces them. Only a backward pass may use the buffers then, or
    /// [`Model::reduce_without_pass`](crate::Model::reduce_without_pass); padding stays as it is.
    pub fn forget(&mut self) {
        self.forgotten.fill(true);
    }

    /// What becomes of the numbers of a buffer where a gradient is written.
    pub(crate) fn accumulation(&self, flat: usize) -> Accumulation {
        if self.forgotten[flat] { Accumulation::Overwrite } else { Accumulation::Add }
    }

    /// Notes that every number of a buffer has been written.
    pub(crate) fn remember(&mut self, flat: usize) {
        self.forgotten[flat] = false;
    }

    /// Sets a part of a buffer to zero where its numbers are forgotten, for what can only add to
    /// it.
    pub(crate) fn clear_forgotten(
        &mut self,
        backend: &B,
        flat: usize,
        range: Range<usize>,
    ) -> Result<(), Error> {
        match self.accumulation(flat) {
            Accumulation::Overwrite => Ok(backend.zero(self.view_mut(flat, range))?),
            Accumulation::Add => Ok(()),
        }
    }
}

impl<B: Backend, T: Element> FlatBuffers<B, T> {
    /// Rounds to bf16 what is exchanged, which halves it where the numbers are f32.
    ///
    /// # Errors
    /// When the device has no room for the copies.
    pub fn exchange_rounded(&mut self, backend: B) -> Result<(), Error> {
        let copies = (0..self.slots.len())
            .map(|flat| Ok(Some(backend.allocate(B::len(self.flat(flat)))?)))
            .collect::<Result<_, Error>>()?;
        self.rounding = Some(Rounding { backend, copies });
        Ok(())
    }

    /// Starts to sum a whole buffer over the ranks of `group`, each of which gets its shard's sums.
    ///
    /// # Errors
    /// When another rank has failed.
    pub fn start_reduce_scatter(&mut self, flat: usize, group: &Group) -> Result<(), Error> {
        debug_assert!(!self.forgotten[flat], "buffer {flat} is summed before it is written");
        let buffer = match group.size() {
            1 => return Ok(()),
            _ => self.take(flat)?,
        };
        let copy = match &mut self.rounding {
            Some(Rounding { backend, copies }) => copies[flat].take().map(|copy| (backend, copy)),
            None => None,
        };
        self.slots[flat] = match copy {
            Some((backend, mut copy)) => {
                let whole = 0..B::len(&buffer);
                backend.convert(B::view(&buffer, whole.clone()), B::view_mut(&mut copy, whole))?;
                let pending = group.start_reduce_scatter::<B, bf16>(copy, Reduce::Sum)?;
                Slot::Rounded(buffer, pending, Shard::of(group))
            }
            None => Slot::Away(group.start_reduce_scatter::<B, T>(buffer, Reduce::Sum)?),
        };
        Ok(())
    }

    /// Starts to complete a whole buffer from the shards of all ranks of `group`.
    ///
    /// # Errors
    /// When another rank has failed.
    pub fn start_all_gather(&mut self, flat: usize, group: &Group) -> Result<(), Error> {
        if group.size() > 1 && B::len(self.flat(flat)) > 0 {
            let buffer = self.take(flat)?;
            self.slots[flat] = Slot::Away(group.start_all_gather::<B, T>(buffer)?);
        }
        Ok(())
    }

    /// The buffer itself, after it has arrived.
    fn take(&mut self, flat: usize) -> Result<B::Buffer<T>, Error> {
        self.arrive(flat)?;
        match std::mem::replace(&mut self.slots[flat], Slot::Lost) {
            Slot::Here(buffer) => Ok(buffer),
            _ => panic!("buffer {flat} was lost in an exchange that failed"),
        }
    }

    /// Waits for what was started with a buffer; on a GPU the device waits, not the caller.
    ///
    /// # Errors
    /// What made the exchange fail; the buffer is lost then.
    pub fn arrive(&mut self, flat: usize) -> Result<(), Error> {
        self.slots[flat] = match std::mem::replace(&mut self.slots[flat], Slot::Lost) {
            Slot::Away(pending) => Slot::Here(pending.wait()?),
            Slot::Rounded(mut exact, pending, shard) => {
                let copy = pending.wait()?;
                if let Some(Rounding { backend, copies }) = &mut self.rounding {
                    let part = shard.range(B::len(&exact));
                    let into = B::view_mut(&mut exact, part.clone());
                    backend.convert(B::view(&copy, part), into)?;
                    copies[flat] = Some(copy);
                }
                Slot::Here(exact)
            }
            here => here,
        };
        Ok(())
    }

    /// Waits for all buffers.
    ///
    /// # Errors
    /// As [`Self::arrive`].
    pub fn arrive_all(&mut self) -> Result<(), Error> {
        (0..self.slots.len()).try_for_each(|flat| self.arrive(flat))
    }

    /// Fills what is held of every tensor with what `source` writes for it, rounded to `T`. Tensors of
    /// which nothing is held are not asked for.
    ///
    /// # Errors
    /// What `source` refuses, or the device.
    pub fn fill<E: From<Error>>(
        &mut self,
        backend: &B,
        layout: &ModelLayout,
        source: impl FnMut(&Segment, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.fill_by(T::from_f32, backend, layout, source)
    }

    /// Copies what is held of a tensor to the host as f32.
    ///
    /// # Errors
    /// When the device fails.
    pub fn read(&self, backend: &B, flat: usize, segment: &Segment) -> Result<Vec<f32>, Error> {
        self.read_range(backend, flat, segment.range.clone())
    }

    /// Copies a part of a buffer, which the shard holds, to the host as f32.
    ///
    /// # Errors
    /// When the device fails.
    pub fn read_range(
        &self,
        backend: &B,
        flat: usize,
        range: Range<usize>,
    ) -> Result<Vec<f32>, Error> {
        let mut stored = vec![T::from_f32(0.0); range.len()];
        backend.download(self.view(flat, range), &mut stored)?;
        Ok(stored.iter().map(|value| value.to_f32()).collect())
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
