//! Writes a model directory in Hugging Face layout.
//!
//! The tensors are streamed: the caller provides each tensor's bytes in pieces, which are hashed while
//! they are written. All files are synced. The directory is created next to its destination under a
//! name that starts with `.tmp-`, so that a directory with the final name is always complete. On an
//! error, all written files are removed.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use blake3::{Hash, Hasher};
use moh_files::{PendingDirectory, write_synced};
use moh_kernels::DType;
use moh_model::initial::initialize;
use moh_model::tensors::tensor_shapes;
use serde_json::{Map, Value, json};

use crate::config_file::{CONFIG_FILE, ConfigFile};
use crate::destination::{check_destination, shard_name};
use crate::model_card::CARD_FILE;
use crate::weight_files::{INDEX_FILE, WEIGHTS_FILE, WeightFiles, safetensors_header};
use crate::{Error, transformers_code};

/// The default maximum bytes of a shard in transformers: 5 GB.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// The file of a tokenizer.
pub const TOKENIZER_FILE: &str = "tokenizer.json";
/// Files of a tokenizer. Files that start with `chat_template` and files in [`TEMPLATES_FOLDER`] also belong to it.
pub const TOKENIZER_FILES: [&str; 7] = [
    TOKENIZER_FILE,
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
];
/// The folder of a tokenizer's named chat templates, `NAME.jinja`.
pub const TEMPLATES_FOLDER: &str = "additional_chat_templates";
/// Default settings for text generation.
pub const GENERATION_FILE: &str = "generation_config.json";

/// A tensor to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The tensor's name in the files.
    pub name: String,
    /// Dimensions, slowest first.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
}

impl TensorSpec {
    /// Returns the bytes of the tensor.
    pub fn num_bytes(&self) -> u64 {
        let elements: u64 = self.shape.iter().map(|&size| size as u64).product();
        elements * self.dtype.bytes() as u64
    }
}

/// The contents of a model directory.
#[derive(Debug, Clone)]
pub struct Contents<'a> {
    /// `config.json`.
    pub config: &'a Map<String, Value>,
    /// The tensors, in the order in which they fill the shards.
    pub tensors: &'a [TensorSpec],
    /// Maximum bytes of a shard. A larger tensor gets its own shard.
    pub max_shard_bytes: u64,
    /// Files that are copied unchanged. See [`companion_files`].
    pub companions: &'a [PathBuf],
    /// The text of `README.md`. See [`model_card`](crate::model_card).
    pub card: Option<&'a str>,
}

impl<'a> Contents<'a> {
    /// Returns the contents of a directory without other files.
    pub fn new(
        config: &'a Map<String, Value>,
        tensors: &'a [TensorSpec],
        max_shard_bytes: u64,
    ) -> Self {
        Contents { config, tensors, max_shard_bytes, companions: &[], card: None }
    }
}

/// Receives the next bytes of a tensor.
pub type Sink<'a, E> = dyn FnMut(&[u8]) -> Result<(), E> + 'a;
/// Produces a tensor: passes all of its little-endian bytes, in order, to the sink.
pub type Fill<'a, E> = dyn FnMut(&TensorSpec, &mut Sink<'_, E>) -> Result<(), E> + 'a;

/// The result of writing.
#[derive(Debug, Clone)]
pub struct Written {
    /// The hash of each tensor's bytes, in order.
    pub hashes: Vec<Hash>,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Number of weight files.
    pub shards: usize,
}

/// Returns the existing tokenizer files in `tokenizer` and generation settings in `dir`. Fails if a file is a broken
/// link.
pub fn companion_files(dir: &Path, tokenizer: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut files = Vec::new();
    let templates = tokenizer.join(TEMPLATES_FOLDER);
    for folder in [tokenizer, &templates].into_iter().filter(|folder| folder.is_dir()) {
        for entry in fs::read_dir(folder).map_err(Error::io(folder))? {
            let path = entry.map_err(Error::io(folder))?.path();
            if is_tokenizer_file(&companion_name(&path)) && moh_files::is_file(&path)? {
                files.push(path);
            }
        }
    }
    let generation = dir.join(GENERATION_FILE);
    if moh_files::is_file(&generation)? {
        files.push(generation);
    }
    files.sort();
    Ok(files)
}

/// Returns the name of a companion within a model directory. The name of a named chat template starts with its folder
/// and `/`.
pub fn companion_name(path: &Path) -> String {
    let name = |path: Option<&Path>| Some(path?.file_name()?.to_string_lossy().into_owned());
    let file = name(Some(path)).unwrap_or_default();
    match name(path.parent()) {
        Some(folder) if folder == TEMPLATES_FOLDER => format!("{folder}/{file}"),
        _ => file,
    }
}

/// Returns whether a file belongs to a tokenizer. `name` is the file's [`companion_name`].
pub fn is_tokenizer_file(name: &str) -> bool {
    match name.split_once('/') {
        None => TOKENIZER_FILES.contains(&name) || name.starts_with("chat_template"),
        Some((folder, name)) => {
            folder == TEMPLATES_FOLDER && name.ends_with(".jinja") && !name.contains(['/', '\\'])
        }
    }
}

/// A complete model directory under a temporary name. Dropping it removes the directory.
#[derive(Debug)]
pub struct PendingModel {
    pending: PendingDirectory,
    out: PathBuf,
    force: bool,
    /// The result of writing.
    pub written: Written,
}

impl PendingModel {
    /// Returns the directory, under its temporary name.
    pub fn path(&self) -> &Path {
        self.pending.path()
    }

    /// Renames the directory to its final name. With `force`, an existing model directory of that name is
    /// moved aside first, and removed after the renaming.
    ///
    /// # Errors
    /// Fails if the name is in use by now, or if a directory cannot be renamed. An existing directory is then
    /// unchanged.
    pub fn publish(self) -> Result<Written, Error> {
        let PendingModel { pending, out, force, written } = self;
        check_destination(&out, force)?;
        pending.replace().map_err(Error::io(&out))?;
        Ok(written)
    }
}

/// Writes a model directory to `out`. All of its files are synced on return.
///
/// # Errors
/// Fails if `out` exists and is not an empty directory, if writing fails, or if `fill` fails. With
/// `force`, a model directory at `out` is replaced after all other steps have succeeded
/// ([`check_destination`]). On an error, written files are removed and `out` is unchanged.
pub fn write_model<E: From<Error>>(
    out: &Path,
    force: bool,
    model: &Contents<'_>,
    fill: &mut Fill<'_, E>,
) -> Result<Written, E> {
    Ok(prepare_model(out, force, model, fill)?.publish()?)
}

/// Writes a model directory as [`write_model`] does, except the last step, which is [`PendingModel::publish`].
/// Removes the files that killed processes left of the same `out`.
pub fn prepare_model<E: From<Error>>(
    out: &Path,
    force: bool,
    model: &Contents<'_>,
    fill: &mut Fill<'_, E>,
) -> Result<PendingModel, E> {
    // Replaces a link's target, not the link.
    let out = &fs::canonicalize(out).unwrap_or_else(|_| out.to_path_buf());
    if out.file_name().is_none() {
        return Err(Error::file(out, "is not a name for a directory").into());
    }
    let parent = moh_files::parent(out);
    PendingDirectory::recover(out).map_err(Error::io(parent))?;
    check_destination(out, force)?;
    fs::create_dir_all(parent).map_err(Error::io(parent))?;
    let pending = PendingDirectory::create(out).map_err(Error::io(parent))?;
    let written = write_tensors(pending.path(), model, fill)?;
    write_description(pending.path(), model)?;
    Ok(PendingModel { pending, out: out.clone(), force, written })
}

/// Writes all files of a model directory except weights into `dir`: `config.json`, the code of a
/// Mixture-of-Head model, the card, and copies of the companions.
fn write_description(dir: &Path, model: &Contents<'_>) -> Result<(), Error> {
    let put = |path: &Path, bytes: &[u8]| write_synced(path, bytes).map_err(Error::io(path));
    let mut config = serde_json::to_string_pretty(model.config).map_err(|error| {
        Error::file(&dir.join(CONFIG_FILE), format!("not representable: {error}"))
    })?;
    config.push('\n');
    put(&dir.join(CONFIG_FILE), config.as_bytes())?;
    let model_type = model.config.get("model_type").and_then(Value::as_str).unwrap_or_default();
    for (name, text) in transformers_code::files(model_type) {
        put(&dir.join(name), text.as_bytes())?;
    }
    if let Some(card) = model.card {
        put(&dir.join(CARD_FILE), card.as_bytes())?;
    }
    for source in model.companions {
        let path = dir.join(companion_name(source));
        moh_files::create_parents(&path).map_err(Error::io(&path))?;
        put(&path, &fs::read(source).map_err(Error::io(source))?)?;
    }
    Ok(())
}

/// Distributes tensors over shards as transformers does: in order, with a new shard if the next
/// tensor does not fit.
fn plan_shards(tensors: &[TensorSpec], max_bytes: u64) -> Vec<Vec<usize>> {
    let mut shards = vec![Vec::new()];
    let mut size = 0u64;
    for (index, tensor) in tensors.iter().enumerate() {
        let bytes = tensor.num_bytes();
        if size > 0 && size.saturating_add(bytes) > max_bytes {
            shards.push(Vec::new());
            size = 0;
        }
        size += bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push(index);
        }
    }
    // With the widest elements first in a file, every tensor is aligned to its element.
    for shard in &mut shards {
        shard.sort_by_key(|&index| std::cmp::Reverse(tensors[index].dtype.bytes()));
    }
    shards
}

fn write_tensors<E: From<Error>>(
    dir: &Path,
    model: &Contents<'_>,
    fill: &mut Fill<'_, E>,
) -> Result<Written, E> {
    let shards = plan_shards(model.tensors, model.max_shard_bytes);
    let bytes = model.tensors.iter().map(TensorSpec::num_bytes).sum();
    let mut hashes = vec![None; model.tensors.len()];
    let mut weight_map = Map::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = match shards.len() {
            1 => WEIGHTS_FILE.to_string(),
            count => shard_name(number + 1, count),
        };
        let path = dir.join(&name);
        let tensors: Vec<&TensorSpec> = shard.iter().map(|&index| &model.tensors[index]).collect();
        for tensor in &tensors {
            weight_map.insert(tensor.name.clone(), json!(name));
        }
        let mut file = File::create_new(&path).map_err(Error::io(&path))?;
        let found = write_shard(&mut file, &path, &tensors, fill)?;
        file.sync_all().map_err(Error::io(&path))?;
        shard.iter().zip(found).for_each(|(&index, hash)| hashes[index] = Some(hash));
    }
    if shards.len() > 1 {
        let index = json!({"metadata": {"total_size": bytes}, "weight_map": weight_map});
        let path = dir.join(INDEX_FILE);
        write_synced(&path, format!("{index:#}\n").as_bytes()).map_err(Error::io(&path))?;
    }
    open_as_reader(dir, model.tensors)?;
    Ok(Written { hashes: hashes.into_iter().flatten().collect(), bytes, shards: shards.len() })
}

/// Writes a safetensors file. Returns the hash of each tensor.
fn write_shard<E: From<Error>>(
    file: &mut impl Write,
    path: &Path,
    tensors: &[&TensorSpec],
    fill: &mut Fill<'_, E>,
) -> Result<Vec<Hash>, E> {
    let infos = tensors.iter().map(|it| (it.name.clone(), it.dtype, it.shape.clone()));
    let header = safetensors_header(Some("pt"), infos).map_err(Error::io(path))?;
    file.write_all(&header).map_err(Error::io(path))?;
    let mut hashes = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let mut remaining = tensor.num_bytes();
        let mut hasher = Hasher::new();
        fill(tensor, &mut |bytes| {
            remaining = remaining.checked_sub(bytes.len() as u64).ok_or_else(|| {
                Error::file(path, format!("{} was given too many bytes", tensor.name))
            })?;
            let written = rayon::in_place_scope(|scope| {
                scope.spawn(|_| {
                    hasher.update_rayon(bytes);
                });
                file.write_all(bytes)
            });
            Ok(written.map_err(Error::io(path))?)
        })?;
        if remaining > 0 {
            let reason = format!("{} was given {remaining} bytes too few", tensor.name);
            return Err(Error::file(path, reason).into());
        }
        hashes.push(hasher.finalize());
    }
    Ok(hashes)
}

/// Opens the files as a reader does, and checks every tensor.
fn open_as_reader(dir: &Path, tensors: &[TensorSpec]) -> Result<(), Error> {
    let files = WeightFiles::open(dir)?;
    for tensor in tensors {
        let found = files.get(&tensor.name)?;
        if (found.dtype, found.shape) != (tensor.dtype, &tensor.shape[..]) {
            let reason = format!("{} reads back with another type or shape", tensor.name);
            return Err(Error::file(files.file_of(&tensor.name), reason));
        }
    }
    Ok(())
}

/// Bytes of the pieces of a tensor: large enough for two threads to share, and small compared with the
/// memory of a conversion.
pub const PIECE_BYTES: usize = 8 << 20;

/// Writes a random model with this configuration to `out`, with the initial weights of training from scratch. See
/// [`write_model`].
pub fn write_random_model(
    out: &Path,
    file: &ConfigFile,
    dtype: DType,
    max_shard_bytes: u64,
    seed: u64,
) -> Result<Written, Error> {
    let fields = file.to_json(&file.config, Some(dtype));
    let tensors: Vec<TensorSpec> = tensor_shapes(&file.config)
        .into_iter()
        .map(|(name, shape)| TensorSpec { name, shape, dtype })
        .collect();
    let model = Contents::new(&fields, &tensors, max_shard_bytes);
    let deviation = file.config.initializer_range;
    write_model(out, false, &model, &mut |spec, sink| {
        let mut values = vec![0f32; spec.shape.iter().product()];
        initialize(seed, deviation, &spec.name, &spec.shape, &mut values);
        let mut bytes = vec![0; values.len() * dtype.bytes()];
        dtype.write(&values, &mut bytes);
        sink(&bytes)
    })
}

#[cfg(test)]
mod tests;
