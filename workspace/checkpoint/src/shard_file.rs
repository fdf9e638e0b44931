//! A safetensors file of a rank's shards, written and hashed chunk by chunk from a [`Snapshot`].
//!
//! The bytes equal the output of crate `safetensors`: tensors of one type in the order of their names.

use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::path::Path;

use half::bf16;
use moh_hf::weight_files::safetensors_header;
use moh_kernels::adamw::remainder::join;
use moh_kernels::{AnyBuffer, Cpu, DType};
use moh_step::TensorKind;
use rayon::prelude::*;

use super::CHUNK_BYTES;
use super::snapshot::{ShardTensor, Snapshot};

/// Bytes below which one thread hashes faster than several.
const SHARED_BYTES: usize = 128 << 10;

// The snapshot's bytes are written as they are in memory.
const _: () = assert!(cfg!(target_endian = "little"), "safetensors files are little-endian");

/// The elements of one kind, as a file stores them.
enum Elements<'a> {
    /// Elements in their format in memory.
    Stored { bytes: &'a [u8], dtype: DType },
    /// f32 weights, joined from bf16 weights and remainders into `joined`, chunk by chunk.
    Split { weights: &'a [bf16], remainder: &'a [i16], joined: Vec<f32> },
}

impl<'a> Elements<'a> {
    fn new(snapshot: &'a Snapshot, kind: TensorKind) -> Self {
        let stored = |values: &'a AnyBuffer<Cpu>| Elements::Stored {
            bytes: values.whole().bytes(),
            dtype: values.dtype(),
        };
        match (kind, &snapshot.remainder) {
            (TensorKind::FirstMoment, _) => stored(&snapshot.first_moment),
            (TensorKind::SecondMoment, _) => stored(&snapshot.second_moment),
            (TensorKind::Weight, None) => stored(&snapshot.weights),
            // Weights have remainders only if they are bf16.
            (TensorKind::Weight, Some(remainder)) => Elements::Split {
                weights: snapshot.weights.whole().typed(),
                remainder: remainder.whole().typed(),
                joined: Vec::new(),
            },
        }
    }

    fn dtype(&self) -> DType {
        match self {
            Elements::Stored { dtype, .. } => *dtype,
            Elements::Split { .. } => DType::F32,
        }
    }

    /// Returns the file's bytes of a range of elements.
    fn bytes(&mut self, range: Range<usize>) -> &[u8] {
        match self {
            Elements::Stored { bytes, dtype } => {
                &bytes[range.start * dtype.bytes()..range.end * dtype.bytes()]
            }
            Elements::Split { weights, remainder, joined } => {
                let pairs = weights[range.clone()].par_iter().zip(&remainder[range]);
                pairs.map(|(&weight, &left)| join(weight, left)).collect_into_vec(joined);
                bytemuck::cast_slice(joined)
            }
        }
    }
}

/// A written file: the type of its elements and the hash of each tensor's bytes, in the order of the
/// snapshot's tensors.
pub(super) struct WrittenFile {
    pub dtype: DType,
    pub hashes: Vec<blake3::Hash>,
}

/// Writes and syncs the file at `path`, which must not exist, with the snapshot's tensors of one kind.
/// Conversion and hashing use the threads of rayon's current pool.
pub(super) fn write(path: &Path, snapshot: &Snapshot, kind: TensorKind) -> io::Result<WrittenFile> {
    let mut elements = Elements::new(snapshot, kind);
    let dtype = elements.dtype();
    let tensors = &snapshot.shard.tensors;
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by(|&a, &b| tensors[a].segment.name.cmp(&tensors[b].segment.name));
    let mut file = File::create_new(path)?;
    let of_file = |&index: &usize| {
        let tensor = &tensors[index];
        (tensor.segment.name.clone(), dtype, tensor.stored_shape())
    };
    file.write_all(&safetensors_header(None, order.iter().map(of_file))?)?;
    let mut hashes = vec![blake3::Hash::from_bytes([0; blake3::OUT_LEN]); tensors.len()];
    for index in order {
        let mut hasher = blake3::Hasher::new();
        for range in chunks(&tensors[index].host, CHUNK_BYTES / dtype.bytes().max(4)) {
            let bytes = elements.bytes(range);
            match bytes.len() < SHARED_BYTES {
                true => hasher.update(bytes),
                false => hasher.update_rayon(bytes),
            };
            file.write_all(bytes)?;
        }
        hashes[index] = hasher.finalize();
    }
    file.sync_all()?;
    Ok(WrittenFile { dtype, hashes })
}

/// Splits a range into consecutive ranges of at most `len` elements.
fn chunks(range: &Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = range.end;
    range.clone().step_by(len).map(move |start| start..(start + len).min(end))
}

impl ShardTensor {
    /// Returns the shape in a file: the slice's shape if the elements are the whole slice, and a list's shape
    /// otherwise.
    pub(super) fn stored_shape(&self) -> Vec<usize> {
        match self.range {
            [0, end] if end == self.segment.slice.len() => self.segment.slice.extents(),
            [from, to] => vec![to - from],
        }
    }
}

#[cfg(test)]
mod tests {
    use moh_hf::weight_files::header_type;
    use moh_kernels::ElementType;
    use moh_model::model_parallel::ModelPart;
    use moh_model::{ModelLayout, Shard};
    use safetensors::tensor::TensorView;

    use super::super::manifest::tensor_file;
    use super::*;
    use moh_testkit::tiny_model;

    /// Returns the layout of a model with an embedding larger than a chunk.
    fn layout(ranks: usize) -> ModelLayout {
        let config = tiny_model(1, 300_000, true);
        ModelLayout::of_part(&config, ranks, &ModelPart::whole(&config))
    }

    /// Returns the file that crate `safetensors` writes, from the snapshot's values as f32.
    fn expected(snapshot: &Snapshot, dtype: DType, values: &[f32]) -> (Vec<u8>, Vec<blake3::Hash>) {
        let mut bytes = vec![0; values.len() * dtype.bytes()];
        dtype.write(values, &mut bytes);
        let part = |tensor: &ShardTensor| {
            &bytes[tensor.host.start * dtype.bytes()..tensor.host.end * dtype.bytes()]
        };
        let tensors = &snapshot.shard.tensors;
        let views = tensors.iter().map(|tensor| {
            let view = TensorView::new(header_type(dtype), tensor.stored_shape(), part(tensor));
            (tensor.segment.name.clone(), view.unwrap())
        });
        let hashes = tensors.iter().map(|tensor| blake3::hash(part(tensor)));
        (safetensors::serialize(views, None).unwrap(), hashes.collect())
    }

    fn check(shard: Shard, [weights, moments]: [ElementType; 2]) {
        let dir = tempfile::tempdir().unwrap();
        let mut snapshot = Snapshot::new(&layout(shard.size), shard, weights, moments).unwrap();
        let count = snapshot.weights.len();
        let values = |first: usize| -> Vec<f32> {
            (first..first + count).map(|index| (index as f32).sin()).collect()
        };
        snapshot.weights.whole_mut().fill_from_f32(&Cpu, &values(0)).unwrap();
        if let Some(AnyBuffer::I16(left)) = &mut snapshot.remainder {
            left.iter_mut().enumerate().for_each(|(index, left)| *left = (index * 7919) as i16);
        }
        snapshot.second_moment.whole_mut().fill_from_f32(&Cpu, &values(1)).unwrap();
        let stored = snapshot.weights.whole().to_f32(&Cpu).unwrap();
        let weights = match &snapshot.remainder {
            Some(AnyBuffer::I16(left)) => {
                let rounded = stored.iter().map(|&weight| bf16::from_f32(weight));
                rounded.zip(left).map(|(weight, &left)| join(weight, left)).collect()
            }
            _ => stored,
        };
        let moment_type = moments.dtype();
        let moments = snapshot.second_moment.whole().to_f32(&Cpu).unwrap();
        for (kind, dtype, values) in [
            (TensorKind::Weight, DType::F32, weights),
            (TensorKind::SecondMoment, moment_type, moments),
        ] {
            let path = dir.path().join(tensor_file(kind, 0, 1));
            let written = write(&path, &snapshot, kind).unwrap();
            let (file, hashes) = expected(&snapshot, dtype, &values);
            assert!(std::fs::read(&path).unwrap() == file, "{kind:?}");
            assert_eq!((written.dtype, written.hashes), (dtype, hashes), "{kind:?}");
            // A file that exists is not overwritten.
            assert!(write(&path, &snapshot, kind).is_err());
        }
    }

    #[test]
    fn files_and_hashes_are_those_of_whole_tensors() {
        use ElementType::{BF16, F32};
        check(Shard::WHOLE, [F32, F32]);
        check(Shard::WHOLE, [BF16, F32]);
        check(Shard { rank: 1, size: 3 }, [BF16, BF16]);
    }
}
