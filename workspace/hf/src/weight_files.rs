//! The weights of a model directory: `model.safetensors`, or shards with an index.
//!
//! Files are mapped, not read: a tensor is a slice of the mapping, whatever the model's size. The
//! headers are validated when the directory is opened (crate `safetensors` checks that the tensors
//! cover a file exactly), so later accesses cannot be out of bounds.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use memmap2::Mmap;
use moh_kernels::DType;
use moh_model::ModelConfig;
use moh_model::tensors::{EMBEDDING, OUTPUT_HEAD, tensor_shapes};
use safetensors::SafeTensors;
use safetensors::tensor::{Metadata, SafeTensorError, TensorInfo};
use serde_json::Value;

use crate::Error;
use crate::other_formats::{self, ADAPTER_FILE};

/// Name of a single weight file.
pub const WEIGHTS_FILE: &str = "model.safetensors";
/// Name of the index of sharded weights.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Maximum bytes of an index.
const MAX_INDEX_BYTES: u64 = 256 << 20;
/// Bytes of a block of [`WeightFiles::sample`].
const BLOCK_BYTES: usize = 4096;
/// Number of blocks of a tensor. Smaller tensors are hashed as a whole.
const BLOCKS: usize = 4;
/// Suffix of the names of buffers in old checkpoints that no model reads.
const IGNORED_SUFFIX: &str = ".rotary_emb.inv_freq";

/// Alignment of a safetensors header's length.
const HEADER_ALIGNMENT: usize = 8;

/// Returns the element type of a tensor in a safetensors header.
pub fn header_type(dtype: DType) -> safetensors::Dtype {
    match dtype {
        DType::F32 => safetensors::Dtype::F32,
        DType::F16 => safetensors::Dtype::F16,
        DType::BF16 => safetensors::Dtype::BF16,
        DType::F64 => safetensors::Dtype::F64,
        DType::U32 => safetensors::Dtype::U32,
        DType::I16 => safetensors::Dtype::I16,
        DType::U8 => safetensors::Dtype::U8,
    }
}

/// Returns the start of a safetensors file with these tensors in this order: the length of its header, and the
/// header. Its metadata contains `format`, such as "pt".
pub fn safetensors_header(
    format: Option<&str>,
    tensors: impl Iterator<Item = (String, DType, Vec<usize>)>,
) -> io::Result<Vec<u8>> {
    let mut end = 0usize;
    let info = |(name, dtype, shape): (String, DType, Vec<usize>)| {
        let start = end;
        let bytes = shape.iter().try_fold(dtype.bytes(), |bytes, &n| bytes.checked_mul(n));
        let too_large = || io::Error::other(format!("{name}: too large for this machine"));
        end = bytes.and_then(|bytes| end.checked_add(bytes)).ok_or_else(too_large)?;
        let dtype = header_type(dtype);
        Ok((name, TensorInfo { dtype, shape, data_offsets: (start, end) }))
    };
    let infos = tensors.map(info).collect::<io::Result<_>>()?;
    let format = format.map(|format| HashMap::from([("format".to_owned(), format.to_owned())]));
    let metadata = Metadata::new(format, infos).map_err(io::Error::other)?;
    let mut text = serde_json::to_vec(&metadata)?;
    text.resize(text.len().next_multiple_of(HEADER_ALIGNMENT), b' ');
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}

/// Returns the element type of weights, or `None` if it is not supported.
fn weight_type(dtype: safetensors::Dtype) -> Option<DType> {
    [DType::F32, DType::F16, DType::BF16].into_iter().find(|&ours| header_type(ours) == dtype)
}

/// A tensor in its file.
#[derive(Debug, Clone, Copy)]
pub struct TensorBytes<'a> {
    /// Element type.
    pub dtype: DType,
    /// Dimensions, slowest first.
    pub shape: &'a [usize],
    /// Little-endian elements. They may be unaligned.
    pub bytes: &'a [u8],
}

/// The weight files of a model directory, mapped.
#[derive(Debug)]
pub struct WeightFiles {
    shards: Vec<Shard>,
    /// In file order.
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
    /// The path in messages: the single file or the index.
    path: PathBuf,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Mmap,
}

#[derive(Debug)]
struct Tensor {
    name: String,
    shard: usize,
    dtype: safetensors::Dtype,
    shape: Vec<usize>,
    /// Byte range within the shard's file. It is in bounds by `SafeTensors::read_metadata`.
    range: Range<usize>,
}

fn refuse<T>(path: &Path, reason: impl Into<String>) -> Result<T, Error> {
    Err(Error::from(moh_files::unusable(path, reason.into())))
}

impl WeightFiles {
    /// Maps the weights in `dir`: `model.safetensors` if it exists, as transformers does, or else
    /// the shards of `model.safetensors.index.json`.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let single = dir.join(WEIGHTS_FILE);
        let index = dir.join(INDEX_FILE);
        let has_model = [&single, &index].iter().any(|file| file.exists());
        if has_model && dir.join(ADAPTER_FILE).exists() {
            let reason = format!(
                "has {ADAPTER_FILE} beside a model, so that transformers loads that adapter's base instead: remove the \
                 adapter, or merge it in PEFT by merge_and_unload()"
            );
            return refuse(dir, reason);
        }
        if moh_files::is_file(&single)? {
            let mut files = WeightFiles::empty(single.clone());
            files.add_shard(single, None, &mut Vec::new())?;
            return Ok(files);
        }
        if moh_files::is_file(&index)? {
            return Self::open_index(dir, index);
        }
        if !dir.is_dir() {
            return refuse(dir, "is not a directory");
        }
        let other = other_formats::of_directory(dir);
        refuse(dir, other.unwrap_or(format!("holds neither {WEIGHTS_FILE} nor {INDEX_FILE}")))
    }

    fn empty(path: PathBuf) -> Self {
        WeightFiles { shards: Vec::new(), tensors: Vec::new(), by_name: HashMap::new(), path }
    }

    fn open_index(dir: &Path, index: PathBuf) -> Result<Self, Error> {
        let weight_map = read_index(&index)?;
        let mut names: Vec<&String> = weight_map.values().collect();
        names.sort();
        names.dedup();
        let (mut files, mut copies) = (WeightFiles::empty(index.clone()), Vec::new());
        for name in names {
            let path = dir.join(name);
            if !moh_files::is_file(&path)? {
                return refuse(&index, format!("names the shard {name}, which is missing"));
            }
            files.add_shard(path, Some((name, &weight_map)), &mut copies)?;
        }
        files.check_copies(&copies)?;
        let mut missing: Vec<_> =
            weight_map.iter().filter(|(name, _)| !files.by_name.contains_key(*name)).collect();
        missing.sort();
        match missing.first() {
            Some((name, file)) => refuse(
                &index,
                format!("places {} in {file}, which does not hold it", name.escape_debug()),
            ),
            None => Ok(files),
        }
    }

    /// Maps a file and lists its tensors. If several shards have a tensor, all but one are added to `copies`.
    fn add_shard(
        &mut self,
        path: PathBuf,
        index: Option<(&String, &HashMap<String, String>)>,
        copies: &mut Vec<Tensor>,
    ) -> Result<(), Error> {
        let io = |source| Error::from(moh_files::io(&path)(source));
        let file = moh_files::open(&path).map_err(io)?;
        let map = map(&file).map_err(io)?;
        if map.starts_with(moh_files::GIT_LFS) {
            return refuse(&path, moh_files::IS_POINTER);
        }
        let (header, metadata) = match SafeTensors::read_metadata(&map) {
            Ok(read) => read,
            Err(error) => return refuse(&path, describe(&error, map.len())),
        };
        let start = header + size_of::<u64>();
        for name in metadata.offset_keys() {
            let Some(info) = metadata.info(&name) else {
                continue;
            };
            let elsewhere = index.is_some_and(|(file_name, weight_map)| {
                weight_map.get(&name).is_some_and(|file| file != file_name)
            });
            let (from, to) = info.data_offsets;
            let (dtype, shape) = (info.dtype, info.shape.clone());
            let (shard, range) = (self.shards.len(), start + from..start + to);
            let tensor = Tensor { name: name.clone(), shard, dtype, shape, range };
            if elsewhere || self.by_name.contains_key(&name) {
                copies.push(tensor);
                continue;
            }
            self.by_name.insert(name, self.tensors.len());
            self.tensors.push(tensor);
        }
        self.shards.push(Shard { path, map });
        Ok(())
    }

    /// Rejects a tensor that two shards have with different values: transformers uses the last file's values, whatever
    /// the index says.
    fn check_copies(&self, copies: &[Tensor]) -> Result<(), Error> {
        let bytes = |of: &Tensor| &self.shards[of.shard].map[of.range.clone()];
        for copy in copies {
            let Some(&index) = self.by_name.get(&copy.name) else { continue };
            let tensor = &self.tensors[index];
            if (tensor.dtype, &tensor.shape) != (copy.dtype, &copy.shape)
                || bytes(tensor) != bytes(copy)
            {
                let name = copy.name.escape_debug();
                let other = self.shards[tensor.shard].path.display();
                let reason = format!("{name} has other values than in {other}: remove one of them");
                return refuse(&self.shards[copy.shard].path, reason);
            }
        }
        Ok(())
    }

    /// Renames the output head to the embedding if the files have no embedding: a tied model has one matrix for both.
    pub(crate) fn embed_with_head(&mut self) {
        if self.by_name.contains_key(EMBEDDING) {
            return;
        }
        if let Some(index) = self.by_name.remove(OUTPUT_HEAD) {
            self.tensors[index].name = EMBEDDING.to_owned();
            self.by_name.insert(EMBEDDING.to_owned(), index);
        }
    }

    /// Returns the names of all tensors, in file order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| tensor.name.as_str())
    }

    /// Returns the tensor with this name, in its file's element type.
    pub fn get(&self, name: &str) -> Result<TensorBytes<'_>, Error> {
        let tensor = self.find(name)?;
        let shard = &self.shards[tensor.shard];
        let Some(dtype) = weight_type(tensor.dtype) else {
            let reason = format!(
                "{name} has type {}: expected F32, F16 or BF16: load the model in transformers with dtype=\"bfloat16\" and \
                 save it with save_pretrained(DIR)",
                tensor.dtype
            );
            return refuse(&shard.path, reason);
        };
        Ok(TensorBytes { dtype, shape: &tensor.shape, bytes: &shard.map[tensor.range.clone()] })
    }

    /// Returns a hash of the name, the type, the shape and evenly spaced blocks of each tensor. It distinguishes
    /// models, does not depend on the distribution over files, and needs few reads.
    pub fn sample(&self) -> blake3::Hash {
        let mut tensors: Vec<&Tensor> = self.tensors.iter().collect();
        tensors.sort_unstable_by_key(|tensor| &tensor.name);
        let mut hasher = blake3::Hasher::new();
        for Tensor { name, shard, dtype, shape, range } in tensors {
            hasher.update(format!("{name:?} {dtype:?} {shape:?}").as_bytes());
            for block in blocks(range.len()) {
                let block = range.start + block.start..range.start + block.end;
                hasher.update(&self.shards[*shard].map[block]);
            }
        }
        hasher.finalize()
    }

    fn find(&self, name: &str) -> Result<&Tensor, Error> {
        if let Some(&index) = self.by_name.get(name) {
            return Ok(&self.tensors[index]);
        }
        let other = self.names().find_map(other_formats::of_tensor);
        let missing = || match name {
            OUTPUT_HEAD => format!(
                "{name} is missing: set tie_word_embeddings to true in config.json if the embedding is the output head"
            ),
            _ => format!("{name} is missing"),
        };
        refuse(&self.path, other.unwrap_or_else(missing))
    }

    /// Returns the file of a tensor, for messages.
    pub fn file_of(&self, name: &str) -> &Path {
        match self.by_name.get(name) {
            Some(&index) => &self.shards[self.tensors[index].shard].path,
            None => &self.path,
        }
    }

    /// Checks that the files have exactly the tensors of `config`.
    ///
    /// Two exceptions are ignored: the output head of a tied model (Hugging Face omits it) and the
    /// `inv_freq` buffers of old checkpoints.
    ///
    /// # Errors
    /// Fails with the name of the first tensor that is missing, unexpected, or of a different shape or type.
    pub fn check(&self, config: &ModelConfig) -> Result<(), Error> {
        let expected = tensor_shapes(config);
        for (name, shape) in &expected {
            let tensor = self.find(name)?;
            if tensor.shape != *shape {
                let reason = format!(
                    "{name} has shape {:?}: the configuration says {shape:?}",
                    tensor.shape
                );
                return refuse(self.file_of(name), reason);
            }
            self.get(name)?;
        }
        let expected: HashMap<&str, &[usize]> =
            expected.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
        let is_known = |tensor: &&Tensor| {
            let name = tensor.name.as_str();
            expected.contains_key(name)
                || name.ends_with(IGNORED_SUFFIX)
                || (name == OUTPUT_HEAD && expected.get(EMBEDDING) == Some(&&tensor.shape[..]))
        };
        match self.tensors.iter().find(|tensor| !is_known(tensor)) {
            None => Ok(()),
            Some(Tensor { name, shape, .. }) => refuse(
                self.file_of(name),
                format!("unexpected tensor {} of shape {shape:?}", name.escape_debug()),
            ),
        }
    }

    /// Reads a tensor into `out` as f32.
    pub fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<(), Error> {
        let TensorBytes { dtype, shape, bytes } = self.get(name)?;
        let elements = bytes.len() / dtype.bytes();
        if elements != out.len() {
            let reason = format!("{name} has shape {shape:?}: expected {} elements", out.len());
            return refuse(self.file_of(name), reason);
        }
        if let Some(element) = dtype.first_not_finite(bytes) {
            return Err(self.not_finite(name, element));
        }
        dtype.read(bytes, out);
        Ok(())
    }

    /// Returns the error of a tensor with an infinite or NaN element.
    pub fn not_finite(&self, name: &str, element: usize) -> Error {
        let reason = format!("{name} has a value that is not finite, at element {element}");
        Error::file(self.file_of(name), reason)
    }

    /// Informs the system that a part of a tensor's bytes is not needed now, which keeps the
    /// resident memory of a large model small. The bytes remain readable.
    pub fn release(&self, name: &str, part: Range<usize>) {
        if let Some((map, range)) = self.part(name, part) {
            release(map, range);
        }
    }

    /// Requests that the system reads a part of a tensor's bytes soon, without waiting. A failure
    /// only costs time.
    pub fn prefetch(&self, name: &str, part: Range<usize>) {
        #[cfg(unix)]
        if let Some((map, range)) = self.part(name, part) {
            let _ = map.advise_range(memmap2::Advice::WillNeed, range.start, range.len());
        }
        #[cfg(not(unix))]
        let _ = (name, part);
    }

    /// Returns the range of a mapping with a part of a tensor, or `None` if the range is empty.
    fn part(&self, name: &str, part: Range<usize>) -> Option<(&Mmap, Range<usize>)> {
        let Tensor { shard, range, .. } = &self.tensors[*self.by_name.get(name)?];
        let start = range.start.saturating_add(part.start);
        let end = range.start.saturating_add(part.end).min(range.end);
        (start < end).then(|| (&self.shards[*shard].map, start..end))
    }
}

/// Returns the blocks of a tensor of `len` bytes, starting with its first bytes.
fn blocks(len: usize) -> impl Iterator<Item = Range<usize>> {
    let (count, bytes) = match len <= BLOCKS * BLOCK_BYTES {
        true => (1, len),
        false => (BLOCKS, BLOCK_BYTES),
    };
    let step = (len - bytes) / (BLOCKS - 1);
    (0..count).map(move |block| step * block..step * block + bytes)
}

#[allow(unsafe_code)]
fn map(file: &File) -> std::io::Result<Mmap> {
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("is not a regular file"));
    }
    // SAFETY: the mapping is private and read-only. It is sound while no other process shortens or
    // rewrites the file, which every program that maps weights asks of its user; this program
    // itself replaces files by renaming and never writes into one that it has mapped.
    unsafe { Mmap::map(file) }
}

#[cfg(unix)]
#[allow(unsafe_code)]
fn release(map: &Mmap, range: Range<usize>) {
    // SAFETY: the mapping is private, backed by a file and never written, so dropped pages are
    // read from the file again at the next access. Failure costs memory, nothing else.
    let _ = unsafe {
        map.unchecked_advise_range(
            memmap2::UncheckedAdvice::DontNeed,
            range.start,
            range.end - range.start,
        )
    };
}

#[cfg(not(unix))]
fn release(_: &Mmap, _: Range<usize>) {}

fn read_index(path: &Path) -> Result<HashMap<String, String>, Error> {
    let bytes = moh_files::read_bounded(path, MAX_INDEX_BYTES, "an index")?;
    let index: Value = match serde_json::from_slice(&bytes) {
        Ok(index) => index,
        Err(error) => return refuse(path, moh_files::json_fault(&error, &bytes)),
    };
    let Some(Value::Object(entries)) = index.get("weight_map") else {
        return refuse(path, "weight_map is missing or not an object");
    };
    let mut weight_map = HashMap::with_capacity(entries.len());
    for (name, file) in entries {
        let shown = name.escape_debug();
        let Some(file) = file.as_str() else {
            return refuse(path, format!("weight_map.{shown}: expected a file name"));
        };
        if !is_plain_name(file) {
            let file = file.escape_debug();
            let reason =
                format!("weight_map.{shown} = \"{file}\": must be a file of the directory");
            return refuse(path, reason);
        }
        weight_map.insert(name.clone(), file.to_string());
    }
    if weight_map.is_empty() {
        return refuse(path, "weight_map is empty");
    }
    Ok(weight_map)
}

/// Returns whether a name stays in its directory, on every system.
fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
        && !name.contains(['/', '\\', ':', '\0'])
}

fn describe(error: &SafeTensorError, length: usize) -> String {
    match error {
        SafeTensorError::HeaderTooSmall => {
            format!("is cut short: {length} bytes, less than the header's length field")
        }
        SafeTensorError::InvalidHeaderLength => {
            format!("is cut short or corrupt: the header ends beyond the file's {length} bytes")
        }
        SafeTensorError::HeaderTooLarge => "is corrupt: the header's length is absurd".to_string(),
        SafeTensorError::MetadataIncompleteBuffer => {
            format!("is cut short or corrupt: its tensors do not end at its {length} bytes")
        }
        other => format!("has a corrupt safetensors header: {other}"),
    }
}

#[cfg(test)]
mod tests;
