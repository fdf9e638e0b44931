//! A copy of a rank's state in the host's memory, from which a checkpoint is written during training.
//!
//! The copy has the device's element types. The writer converts them to the types of the files. The
//! buffers are allocated once, and a plan includes their size ([`staging_bytes`]).

use std::ops::Range;

use half::bf16;
use moh_kernels::{Backend, Cpu, Element, Memory, Scalar};
use moh_model::parameters::overlap;
use moh_model::{FlatBuffers, Model, ModelLayout, Segment, Shard};
use moh_step::OptimizerState;

use crate::Result;

/// A tensor's elements in a rank's shard.
#[derive(Debug, Clone)]
pub(super) struct ShardTensor {
    pub segment: Segment,
    /// Start and end of the elements within the local slice of the tensor, in row-major order.
    pub range: [usize; 2],
    /// The elements in the host's buffers.
    pub host: Range<usize>,
}

/// A range of a flat buffer that is copied at once.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    flat: usize,
    range: Range<usize>,
    /// The first element in the host's buffers.
    host: usize,
}

/// The shard of every tensor that a rank writes, in the order of the flat buffers.
#[derive(Debug, Clone)]
pub(super) struct ShardTensors {
    pub tensors: Vec<ShardTensor>,
    runs: Vec<Run>,
    /// Elements of all tensors.
    len: usize,
}

impl ShardTensors {
    /// Returns the tensors of `layout` in `shard`. If several ranks replicate a tensor, the rank where it
    /// counts writes it.
    pub(super) fn new(layout: &ModelLayout, shard: Shard) -> Self {
        let mut found = ShardTensors { tensors: Vec::new(), runs: Vec::new(), len: 0 };
        for (flat, segment) in layout.segments().filter(|(_, segment)| segment.counted) {
            let range = overlap(&segment.range, &shard.range(layout.flats[flat].len));
            if !range.is_empty() {
                found.push(flat, segment, range);
            }
        }
        found
    }

    fn push(&mut self, flat: usize, segment: &Segment, range: Range<usize>) {
        let (host, start) = (self.len, segment.range.start);
        self.len += range.len();
        self.tensors.push(ShardTensor {
            segment: segment.clone(),
            range: [range.start - start, range.end - start],
            host: host..self.len,
        });
        match self.runs.last_mut() {
            Some(run) if run.flat == flat && run.range.end == range.start => {
                run.range.end = range.end;
            }
            _ => self.runs.push(Run { flat, range, host }),
        }
    }
}

/// Returns the bytes of the host's memory that a rank's [`Snapshot`] and its writer need, with weights of type `T`
/// and moments of type `M`.
pub fn staging_bytes<T: Element, M: Element>(layout: &ModelLayout, shard: Shard) -> u64 {
    let remainder = if T::DTYPE == bf16::DTYPE { size_of::<i16>() } else { 0 };
    let element = size_of::<T>() + remainder + 2 * size_of::<M>();
    let elements = ShardTensors::new(layout, shard).len as u64;
    let joined = if remainder > 0 { super::CHUNK_BYTES as u64 } else { 0 };
    elements.saturating_mul(element as u64).saturating_add(joined)
}

/// A rank's weights and moments in the host's memory.
pub struct Snapshot<T: Element, M: Element> {
    pub(super) shard: ShardTensors,
    pub(super) weights: Vec<T>,
    pub(super) remainder: Option<Vec<i16>>,
    pub(super) first_moment: Vec<M>,
    pub(super) second_moment: Vec<M>,
}

impl<T: Element, M: Element> Snapshot<T, M> {
    /// Allocates the buffers for `shard` of the tensors in `layout`. Writes to them once, so that the first
    /// copy does not wait for the system to map memory.
    pub fn new(layout: &ModelLayout, shard: Shard) -> Result<Self> {
        let shard = ShardTensors::new(layout, shard);
        let len = shard.len;
        let has_remainder = T::DTYPE == bf16::DTYPE;
        Ok(Snapshot {
            weights: touched(len)?,
            remainder: has_remainder.then(|| touched(len)).transpose()?,
            first_moment: touched(len)?,
            second_moment: touched(len)?,
            shard,
        })
    }

    /// Copies the state from the device, on the CPU with all threads. The weights must be complete. `model` and
    /// `optimizer` must have the layout and shard for which the buffers were allocated.
    pub fn copy<B: Backend>(
        &mut self,
        model: &Model<B, T>,
        optimizer: &OptimizerState<B, M>,
    ) -> Result<()> {
        let Snapshot { shard, weights, remainder, first_moment, second_moment } = self;
        let (backend, runs) = (model.backend(), &shard.runs);
        copy_runs(backend, runs, model.weights(), weights)?;
        if let (Some(from), Some(to)) = (&optimizer.remainder, remainder) {
            copy_runs(backend, runs, from, to)?;
        }
        copy_runs(backend, runs, &optimizer.first_moment, first_moment)?;
        copy_runs(backend, runs, &optimizer.second_moment, second_moment)
    }
}

/// Returns zeros in the host's memory, with every page written.
fn touched<S: Scalar>(len: usize) -> Result<Vec<S>> {
    let mut buffer = Cpu.allocate(len)?;
    Cpu.zero(&mut buffer)?;
    Ok(buffer)
}

fn copy_runs<B: Backend, S: Scalar>(
    backend: &B,
    runs: &[Run],
    from: &FlatBuffers<B, S>,
    to: &mut [S],
) -> Result<()> {
    for Run { flat, range, host } in runs {
        let to = &mut to[*host..host + range.len()];
        backend.download(from.view(*flat, range.clone()), to)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use moh_model::ModelConfig;

    use super::*;
    use moh_testkit::tiny_model;

    fn config() -> ModelConfig {
        tiny_model(2, 21, false)
    }

    fn layout(ranks: usize) -> ModelLayout {
        let part = moh_model::model_parallel::ModelPart::whole(&config());
        ModelLayout::of_part(&config(), ranks, &part)
    }

    #[test]
    fn a_whole_buffer_is_copied_at_once() {
        let layout = layout(1);
        let shard = ShardTensors::new(&layout, Shard::WHOLE);
        assert_eq!(shard.runs.len(), layout.flats.len());
        assert_eq!(shard.len, layout.flats.iter().map(|flat| flat.used().len()).sum::<usize>());
    }

    #[test]
    fn shards_cover_every_element_once() {
        for size in [2, 3, 5] {
            let layout = layout(size);
            let mut lengths = std::collections::BTreeMap::new();
            for rank in 0..size {
                let shard = ShardTensors::new(&layout, Shard { rank, size });
                let mut end = 0;
                for ShardTensor { segment, range: [from, to], host } in shard.tensors {
                    assert_eq!((host.start, host.len()), (end, to - from));
                    end = host.end;
                    let covered = lengths.entry(segment.name).or_insert(0);
                    assert_eq!(*covered, from);
                    *covered = to;
                }
                assert_eq!(end, shard.len);
            }
            for (_, segment) in layout.segments() {
                assert_eq!(lengths[&segment.name], segment.range.len());
            }
        }
    }

    #[test]
    fn the_bytes_of_a_snapshot_are_those_of_its_buffers() {
        fn bytes<T: Element, M: Element>(shard: Shard) -> (u64, u64) {
            let layout = layout(shard.size);
            let Snapshot { weights, remainder, first_moment, second_moment, .. } =
                Snapshot::<T, M>::new(&layout, shard).unwrap();
            let moments = size_of_val(&first_moment[..]) + size_of_val(&second_moment[..]);
            let joined =
                remainder.as_deref().map_or(0, |left| size_of_val(left) + crate::CHUNK_BYTES);
            let held = size_of_val(&weights[..]) + moments + joined;
            (held as u64, staging_bytes::<T, M>(&layout, shard))
        }
        for shard in [Shard::WHOLE, Shard { rank: 0, size: 3 }] {
            for (held, planned) in
                [bytes::<f32, f32>(shard), bytes::<bf16, f32>(shard), bytes::<bf16, bf16>(shard)]
            {
                assert!(held > 0);
                assert_eq!(held, planned);
            }
        }
    }
}
