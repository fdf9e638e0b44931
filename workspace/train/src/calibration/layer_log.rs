//! The layers that a calibration has found, in a file. An interrupted calibration continues after them, with the same
//! bits.
//!
//! The file starts with 8 bytes that name its kind. A record for each layer follows, in order. It has the length of the
//! JSON of a [`Header`], the JSON, the values that the header counts in f32, and BLAKE3 of these. A record that is
//! incomplete, as a kill leaves it, or of another identity ends the file: it and later records are written anew.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use moh_calibrate::{FoundLayer, LayerCalibration, RouterFit};
use moh_checkpoint::run_log::CalibratedLayer;
use moh_files::PendingFile;
use moh_kernels::DType;
use moh_kernels::router::SharedHeads;
use moh_model::tensors::{OUTPUT_PROJECTION, ROUTER, layer_and_name};
use serde::{Deserialize, Serialize};

use super::record::calibrated_layer;
use crate::Result;

const MAGIC: &[u8; 8] = b"MOHCALIB";
const MAX_HEADER_BYTES: u64 = 1 << 20;
/// The most elements of a matrix: a projection of 2^16 rows and columns.
const MAX_ELEMENTS: usize = 1 << 32;

#[derive(Debug, Serialize, Deserialize)]
struct Header {
    /// A hash of the measured model, the options and the tokens.
    identity: String,
    layer: CalibratedLayer,
    /// Elements of the output projection and of the router's matrix; 0 without them.
    projection: usize,
    router: usize,
}

/// The file of a calibration, locked while it is open for writing.
#[derive(Debug)]
pub struct LayerLog {
    path: PathBuf,
    identity: String,
    /// `None` while the file does not exist.
    file: Option<File>,
    /// The header of each layer, and the byte at which its values start.
    layers: Vec<(Header, u64)>,
    end: u64,
}

impl LayerLog {
    /// Opens the file `path`, which may be missing, for the calibration with this identity.
    ///
    /// # Errors
    /// Fails if the file is of another kind, is locked by another process, or cannot be read.
    pub fn open(path: &Path, identity: String) -> Result<Self> {
        let log = LayerLog::new(path, identity);
        match log.path.exists() {
            true => {
                let file = log.create()?;
                log.with_records_of(file)
            }
            false => Ok(log),
        }
    }

    /// Reads the file `path` of the calibration with this identity, without locking it.
    ///
    /// # Errors
    /// Fails if the file is missing or of another kind.
    pub fn read(path: &Path, identity: String) -> Result<Self> {
        let file = File::open(path).map_err(moh_files::io(path))?;
        LayerLog::new(path, identity).with_records_of(file)
    }

    fn new(path: &Path, identity: String) -> Self {
        let (path, layers) = (path.to_owned(), Vec::new());
        LayerLog { path, identity, file: None, layers, end: MAGIC.len() as u64 }
    }

    /// Returns the log with the complete records of its file.
    fn with_records_of(mut self, file: File) -> Result<Self> {
        let log = &mut self;
        let mut file = BufReader::new(file);
        let mut magic = [0; 8];
        if file.read_exact(&mut magic).is_err() || magic != *MAGIC {
            let reason = "is not a file of a calibration's layers: move it, or write elsewhere";
            return Err(moh_files::unusable(&log.path, reason.to_owned()).into());
        }
        while let Some((header, bytes)) = read_record(&mut file, &log.identity) {
            let values = (header.projection + header.router) * DType::F32.bytes();
            log.layers.push((header, log.end + bytes - (values + blake3::OUT_LEN) as u64));
            log.end += bytes;
        }
        log.file = Some(file.into_inner());
        Ok(self)
    }

    /// Returns the number of stored layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Returns whether no layer is stored.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a layer, or `None` if it is not stored.
    pub fn layer(&self, number: usize) -> Result<Option<FoundLayer>> {
        let Some((Header { layer, .. }, _)) = self.layers.get(number) else { return Ok(None) };
        let (projection, rows) = (self.projection(number)?, self.router(number)?);
        let shared = SharedHeads::from_heads(layer.shared_heads.iter().copied());
        let explained = layer.router_explained.unwrap_or(f64::NAN);
        Ok(Some(FoundLayer {
            calibration: LayerCalibration {
                shared: shared?,
                top_k: layer.routed_top_k,
                error_before: layer.error_before,
                error: layer.error,
                ridge: layer.ridge,
                router: rows.map(|rows| RouterFit { rows, explained }),
            },
            projection,
        }))
    }

    /// Returns the output projection of a layer, or `None` if it is not stored or was not refitted.
    pub fn projection(&self, number: usize) -> Result<Option<Vec<f32>>> {
        let Some((header, start)) = self.layers.get(number) else { return Ok(None) };
        self.values(*start, header.projection)
    }

    /// Returns the matrix of a layer's router, or `None` if the layer is not stored or has no such matrix.
    fn router(&self, number: usize) -> Result<Option<Vec<f32>>> {
        let Some((header, start)) = self.layers.get(number) else { return Ok(None) };
        let projection = (header.projection * DType::F32.bytes()) as u64;
        self.values(start + projection, header.router)
    }

    /// Returns the tensor of this name with `elements` elements: a refitted output projection, or the matrix of a
    /// router. The matrix is zeros in a layer without routed heads. Returns `None` for other tensors.
    pub(super) fn matrix(&self, tensor: &str, elements: usize) -> Result<Option<Vec<f32>>> {
        let Some((number, name)) = layer_and_name(tensor) else { return Ok(None) };
        let values = match name {
            OUTPUT_PROJECTION => self.projection(number)?,
            ROUTER if number < self.len() => {
                Some(self.router(number)?.unwrap_or_else(|| vec![0.0; elements]))
            }
            _ => None,
        };
        if values.as_ref().is_some_and(|values| values.len() != elements) {
            let reason = format!(
                "{tensor} is of another model: remove the file, and the run measures again"
            );
            return Err(moh_files::unusable(&self.path, reason).into());
        }
        Ok(values)
    }

    /// Returns `elements` values from byte `start` on, or `None` if `elements` is 0 or nothing is stored.
    fn values(&self, start: u64, elements: usize) -> Result<Option<Vec<f32>>> {
        let Some(file) = self.file.as_ref().filter(|_| elements > 0) else { return Ok(None) };
        let mut bytes = vec![0; elements * DType::F32.bytes()];
        file.read_exact_at(&mut bytes, start).map_err(moh_files::io(&self.path))?;
        let mut values = vec![0f32; elements];
        DType::F32.read(&bytes, &mut values);
        Ok(Some(values))
    }

    /// Stores the next layer.
    pub fn keep(&mut self, found: &FoundLayer) -> Result<()> {
        let empty = Vec::new();
        let projection = found.projection.as_ref().unwrap_or(&empty);
        let router = found.calibration.router.as_ref().map_or(&empty, |fit| &fit.rows);
        let header = Header {
            identity: self.identity.clone(),
            layer: calibrated_layer(&found.calibration),
            projection: projection.len(),
            router: router.len(),
        };
        let json =
            serde_json::to_vec(&header).map_err(|error| moh_files::io(&self.path)(error.into()))?;
        let mut record = (json.len() as u64).to_le_bytes().to_vec();
        record.extend(json);
        let start = self.end + record.len() as u64;
        for values in [projection, router] {
            let first = record.len();
            record.resize(first + size_of_val(&values[..]), 0);
            DType::F32.write(values, &mut record[first..]);
        }
        record.extend(blake3::hash(&record).as_bytes());
        let mut file = match self.file.take() {
            Some(file) => file,
            None => self.create()?,
        };
        let mut write = || {
            file.set_len(self.end)?;
            file.seek(SeekFrom::Start(self.end))?;
            file.write_all(&record)?;
            file.sync_data()
        };
        write().map_err(moh_files::io(&self.path))?;
        self.file = Some(file);
        self.layers.push((header, start));
        self.end += record.len() as u64;
        Ok(())
    }

    /// Opens and locks the file; creates it if it is missing.
    fn create(&self) -> Result<File> {
        let open = || {
            if !self.path.exists() {
                moh_files::create_parents(&self.path)?;
                // Published complete, so that a kill does not leave a file of another kind.
                let mut file = PendingFile::create(&self.path)?;
                file.write_all(MAGIC)?;
                file.publish()?;
            }
            OpenOptions::new().read(true).write(true).open(&self.path)
        };
        let file = open().map_err(moh_files::io(&self.path))?;
        // A child process that is being started shares each open file, and its lock, for a moment.
        let mut tries = 0..100;
        while file.try_lock().is_err() {
            if tries.next().is_none() {
                let reason = "another calibration writes it: wait for its end, or write elsewhere";
                return Err(moh_files::unusable(&self.path, reason.to_owned()).into());
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Ok(file)
    }

    /// Removes the file, once its layers are stored elsewhere.
    pub fn remove(&self) -> Result<()> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(moh_files::io(&self.path)(error).into())
            }
            _ => Ok(()),
        }
    }
}

/// Reads a record. Returns its header and its length in bytes, or `None` if it is incomplete or of another identity.
fn read_record(file: &mut impl Read, identity: &str) -> Option<(Header, u64)> {
    let mut hasher = blake3::Hasher::new();
    let mut part = |len: u64| {
        let mut bytes = Vec::new();
        file.by_ref().take(len).read_to_end(&mut bytes).ok()?;
        (bytes.len() as u64 == len).then_some(bytes)
    };
    let len = part(8)?;
    let json_len = u64::from_le_bytes(len[..].try_into().ok()?);
    if json_len > MAX_HEADER_BYTES {
        return None;
    }
    let json = part(json_len)?;
    let header: Header = serde_json::from_slice(&json).ok()?;
    if header.identity != identity || header.projection.max(header.router) > MAX_ELEMENTS {
        return None;
    }
    let values = part(((header.projection + header.router) * DType::F32.bytes()) as u64)?;
    for bytes in [&len, &json, &values] {
        hasher.update(bytes);
    }
    let hash = part(blake3::OUT_LEN as u64)?;
    let is_whole = hash == hasher.finalize().as_bytes();
    is_whole.then_some((header, (8 + json.len() + values.len() + hash.len()) as u64))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn found(number: usize) -> FoundLayer {
        let heads = [number, number + 1];
        FoundLayer {
            calibration: LayerCalibration {
                shared: SharedHeads::from_heads(heads).unwrap(),
                top_k: 1,
                error_before: 0.5,
                error: Some(0.25),
                ridge: Some(0.1),
                router: (number == 1).then(|| RouterFit { rows: vec![0.5; 3], explained: 0.75 }),
            },
            projection: Some(vec![number as f32; 6]),
        }
    }

    fn log(path: &Path, identity: &str) -> LayerLog {
        LayerLog::open(path, identity.to_owned()).unwrap()
    }

    #[test]
    fn layers_are_read_again_up_to_one_that_is_not_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layers");
        let mut written = log(&path, "a");
        assert!(written.is_empty() && !path.exists());
        let mut ends = vec![MAGIC.len()];
        for number in 0..3 {
            written.keep(&found(number)).unwrap();
            ends.push(fs::read(&path).unwrap().len());
        }
        drop(written);
        let whole = fs::read(&path).unwrap();
        for cut in MAGIC.len()..=whole.len() {
            fs::write(&path, &whole[..cut]).unwrap();
            let mut read = log(&path, "a");
            let expected = ends.iter().filter(|&&end| end <= cut).count() - 1;
            assert_eq!(read.len(), expected, "{cut}");
            for number in 0..expected {
                assert_eq!(read.layer(number).unwrap(), Some(found(number)));
                assert_eq!(read.projection(number).unwrap(), found(number).projection);
            }
            assert_eq!(read.layer(expected).unwrap(), None);
            if expected == 2 {
                read.keep(&found(2)).unwrap();
                assert_eq!(fs::read(&path).unwrap(), whole);
            }
        }
        // A hash covers each byte.
        for at in MAGIC.len()..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            fs::write(&path, damaged).unwrap();
            let layer = ends.iter().filter(|&&end| end <= at).count() - 1;
            assert_eq!(log(&path, "a").len(), layer, "{at}");
        }
        fs::write(&path, &whole).unwrap();
        assert!(log(&path, "b").is_empty());
        log(&path, "b").remove().unwrap();
        assert!(!path.exists());
        log(&path, "b").remove().unwrap();
    }

    #[test]
    fn other_files_and_those_of_others_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layers");
        let refused = || LayerLog::open(&path, String::new()).unwrap_err().to_string();
        for text in ["", "MOH", "something else"] {
            fs::write(&path, text).unwrap();
            assert!(refused().contains("is not a file of a calibration's layers"), "{text}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        fs::remove_file(&path).unwrap();
        let mut held = log(&path, "");
        held.keep(&found(0)).unwrap();
        assert!(refused().contains("another calibration writes it"));
    }
}
