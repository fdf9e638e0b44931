//! A copy of a rank's state in the host's memory, from which a checkpoint is written during training.
//!
//! The copy has the device's element types. The writer converts them to the types of the files. The
//! buffers are allocated once, and a plan includes their size ([`staging_bytes`]).

use std::ops::Range;

use moh_kernels::{AnyBuffer, Backend, Cpu, ElementType, Memory as _};
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

/// Returns the bytes of the host's memory that a rank's [`Snapshot`] and its writer need.
pub fn staging_bytes(
    layout: &ModelLayout,
    shard: Shard,
    weights: ElementType,
    moments: ElementType,
) -> u64 {
    let remainder = if weights == ElementType::BF16 { size_of::<i16>() } else { 0 };
    let element = weights.bytes() + remainder + 2 * moments.bytes();
    let elements = ShardTensors::new(layout, shard).len as u64;
    let joined = if remainder > 0 { super::CHUNK_BYTES as u64 } else { 0 };
    elements.saturating_mul(element as u64).saturating_add(joined)
}

/// A rank's weights and moments in the host's memory.
pub struct Snapshot {
    pub(super) shard: ShardTensors,
    pub(super) weights: AnyBuffer<Cpu>,
    pub(super) remainder: Option<AnyBuffer<Cpu>>,
    pub(super) first_moment: AnyBuffer<Cpu>,
    pub(super) second_moment: AnyBuffer<Cpu>,
}

impl Snapshot {
    /// Allocates the buffers for `shard` of the tensors in `layout`. Writes to them once, so that the first
    /// copy does not wait for the system to map memory.
    pub fn new(
        layout: &ModelLayout,
        shard: Shard,
        weights: ElementType,
        moments: ElementType,
    ) -> Result<Self> {
        let shard = ShardTensors::new(layout, shard);
        let zeros = |element| touched(AnyBuffer::zeros(&Cpu, element, shard.len)?);
        let remainder = || touched(AnyBuffer::I16(Cpu.allocate(shard.len)?));
        Ok(Snapshot {
            weights: zeros(weights)?,
            remainder: (weights == ElementType::BF16).then(remainder).transpose()?,
            first_moment: zeros(moments)?,
            second_moment: zeros(moments)?,
            shard,
        })
    }

    /// Copies the state from the device, on the CPU with all threads. The weights must be complete. `model` and
    /// `optimizer` must have the layout and shard for which the buffers were allocated.
    pub fn copy<B: Backend>(
        &mut self,
        model: &Model<B>,
        optimizer: &OptimizerState<B>,
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

/// Writes zeros to every page of a buffer in the host's memory.
fn touched(mut buffer: AnyBuffer<Cpu>) -> Result<AnyBuffer<Cpu>> {
    buffer.whole_mut().zero(&Cpu)?;
    Ok(buffer)
}

fn copy_runs<B: Backend>(
    backend: &B,
    runs: &[Run],
    from: &FlatBuffers<B>,
    to: &mut AnyBuffer<Cpu>,
) -> Result<()> {
    for Run { flat, range, host } in runs {
        let to = to.view_mut(*host..host + range.len());
        from.view(*flat, range.clone()).download(backend, to)?;
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
        use ElementType::{BF16, F32};
        for shard in [Shard::WHOLE, Shard { rank: 0, size: 3 }] {
            for [weights, moments] in [[F32, F32], [BF16, F32], [BF16, BF16]] {
                let layout = layout(shard.size);
                let snapshot = Snapshot::new(&layout, shard, weights, moments).unwrap();
                let bytes = |buffer: &AnyBuffer<Cpu>| buffer.len() * buffer.dtype().bytes();
                let joined = (snapshot.remainder.as_ref())
                    .map_or(0, |left| bytes(left) + crate::CHUNK_BYTES);
                let moment_bytes = bytes(&snapshot.first_moment) + bytes(&snapshot.second_moment);
                let held = bytes(&snapshot.weights) + moment_bytes + joined;
                assert!(held > 0);
                assert_eq!(held as u64, staging_bytes(&layout, shard, weights, moments));
            }
        }
    }
}
