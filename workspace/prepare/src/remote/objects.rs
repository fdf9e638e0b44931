//! Objects of S3, Google Cloud Storage and Azure Blob Storage as inputs: `s3://BUCKET/GLOB`, `gs://BUCKET/GLOB`,
//! `az://CONTAINER/GLOB`. Access is what the environment says, in the variables of crate object_store (`AWS_*`,
//! `GOOGLE_*`, `AZURE_*`). An object is told from its other versions by the tag that its store gives it.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path as Location;
use object_store::{
    Error as StoreError, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt,
};
use tokio::runtime::{Builder, Runtime};

use super::layout::is_data_file;
use super::pattern;
use super::{RemoteFile, some_of};
use crate::{Error, Result};

/// Time after which a download that waits for its store notices that it is to stop.
const WAIT: Duration = Duration::from_millis(50);
/// Attempts to read on where a connection was lost, beside those of the library, without a byte in between.
const MAX_TRIES: usize = 3;

/// The stores, with the buckets that were asked for.
#[derive(Default)]
pub(super) struct Objects {
    buckets: Vec<Arc<Bucket>>,
}

/// A bucket or a container.
struct Bucket {
    /// `s3://BUCKET`.
    address: String,
    store: Box<dyn ObjectStore>,
    runtime: Runtime,
}

/// An object of a bucket.
struct Object {
    bucket: Arc<Bucket>,
    meta: ObjectMeta,
    name: PathBuf,
    version: String,
}

impl Objects {
    /// See [`super::Stores::expand`].
    pub(super) fn expand(&mut self, scheme: &str, name: &str) -> Result<Vec<Arc<dyn RemoteFile>>> {
        let start = scheme.len() + "://".len();
        let end = name[start..].find('/').map_or(name.len(), |end| start + end);
        let (address, path) = name.split_at(end);
        let bucket = self.open(scheme, address)?;
        let files = bucket.files(path, Path::new(name))?;
        let object = |meta: ObjectMeta| {
            let name = PathBuf::from(format!("{address}/{}", meta.location));
            let version = meta.version.as_ref().or(meta.e_tag.as_ref()).cloned();
            // Where a store names neither, the time of the last change stands for them.
            let version = version.unwrap_or_else(|| meta.last_modified.to_rfc3339());
            Arc::new(Object { bucket: Arc::clone(&bucket), meta, name, version })
                as Arc<dyn RemoteFile>
        };
        Ok(files.into_iter().map(object).collect())
    }

    fn open(&mut self, scheme: &str, address: &str) -> Result<Arc<Bucket>> {
        if let Some(bucket) = self.buckets.iter().find(|bucket| bucket.address == address) {
            return Ok(Arc::clone(bucket));
        }
        // Another part of the program may have chosen the same one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let store: object_store::Result<Box<dyn ObjectStore>> = match scheme {
            "s3" => {
                let store = AmazonS3Builder::from_env().with_url(address).build();
                store.map(|store| Box::new(store) as Box<dyn ObjectStore>)
            }
            "gs" => {
                let store = GoogleCloudStorageBuilder::from_env().with_url(address).build();
                store.map(|store| Box::new(store) as Box<dyn ObjectStore>)
            }
            _ => {
                let store = MicrosoftAzureBuilder::from_env().with_url(address).build();
                store.map(|store| Box::new(store) as Box<dyn ObjectStore>)
            }
        };
        let store = store.map_err(|error| explain(Path::new(address), error))?;
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(moh_files::io(Path::new(address)))?;
        let bucket = Arc::new(Bucket { address: address.to_owned(), store, runtime });
        self.buckets.push(Arc::clone(&bucket));
        Ok(bucket)
    }
}

impl Bucket {
    /// The objects that a path stands for, sorted by name; `name` is the address as a user gave it.
    fn files(&self, path: &str, name: &Path) -> Result<Vec<ObjectMeta>> {
        let path = pattern::Path::new(path);
        let location = |path: &str| {
            Location::parse(path)
                .map_err(|error| Error::input(name, format!("is no address: {error}")))
        };
        let failed = |error| explain(name, error);
        if !path.has_wildcards() && !path.as_str().is_empty() {
            match self.runtime.block_on(self.store.head(&location(path.as_str())?)) {
                Ok(meta) => return Ok(vec![meta]),
                Err(StoreError::NotFound { .. }) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        let (folder, is_deep) = match path.has_wildcards() {
            true => (path.folder(), path.is_deep()),
            false => (path.as_str(), true),
        };
        let listed = self.list(&location(folder)?, is_deep).map_err(failed)?;
        let mut files: Vec<_> = match path.has_wildcards() {
            // An object of that name wins over the pattern.
            true if listed.iter().any(|meta| meta.location.as_ref() == path.as_str()) => {
                let is_it = |meta: &&ObjectMeta| meta.location.as_ref() == path.as_str();
                listed.iter().filter(is_it).cloned().collect()
            }
            true => {
                let matches = path.matcher().map_err(|reason| Error::input(name, reason))?;
                listed.iter().filter(|meta| matches(meta.location.as_ref())).cloned().collect()
            }
            false => {
                let is_data = |meta: &&ObjectMeta| is_data_file(meta.location.as_ref());
                listed.iter().filter(is_data).cloned().collect()
            }
        };
        if files.is_empty() {
            let folder = if folder.is_empty() { "the bucket" } else { folder };
            let there = match listed.is_empty() {
                true => format!("{folder} has no objects: check the name"),
                false => {
                    let names = some_of(listed.iter().map(|meta| meta.location.as_ref()));
                    format!("{folder} has {names}")
                }
            };
            let what = match path.has_wildcards() {
                true => "the pattern matches no object",
                false => "there is no such object, nor data below that name",
            };
            return Err(Error::input(name, format!("{what}: {there}")));
        }
        files.sort_by(|one, other| one.location.cmp(&other.location));
        Ok(files)
    }

    /// The objects in a folder, and with `is_deep` in those below.
    fn list(&self, folder: &Location, is_deep: bool) -> object_store::Result<Vec<ObjectMeta>> {
        self.runtime.block_on(async {
            if !is_deep {
                return Ok(self.store.list_with_delimiter(Some(folder)).await?.objects);
            }
            let mut stream = self.store.list(Some(folder));
            let mut found = Vec::new();
            while let Some(meta) = stream.next().await {
                found.push(meta?);
            }
            Ok(found)
        })
    }
}

impl Object {
    /// Appends to `out`, which has `have` bytes of the object, what follows them, and returns the size of the object.
    /// Of one that has not the listed size nothing is read.
    async fn read(
        &self,
        out: &mut File,
        have: &mut u64,
        stop: &AtomicBool,
        report: &mut dyn FnMut(u64),
    ) -> Result<u64> {
        let options = GetOptions {
            if_match: self.meta.e_tag.clone(),
            range: (*have > 0).then_some(GetRange::Offset(*have)),
            ..GetOptions::default()
        };
        let asked = self.bucket.store.get_opts(&self.meta.location, options);
        let answer = until(stop, asked).await?.map_err(|error| explain(&self.name, error))?;
        let size = answer.meta.size;
        if size != self.meta.size {
            return Ok(size);
        }
        let mut stream = answer.into_stream();
        while let Some(bytes) = until(stop, stream.next()).await? {
            let bytes = bytes.map_err(|error| explain(&self.name, error))?;
            if let Err(error) = out.write_all(&bytes) {
                // The next call would take a part of them for all.
                let _ = out.set_len(*have);
                return Err(Error::Download {
                    path: self.name.clone(),
                    reason: format!(
                        "cannot be written ({error}): free space, then give the same command again"
                    ),
                });
            }
            *have += bytes.len() as u64;
            report(*have);
        }
        Ok(size)
    }
}

impl RemoteFile for Object {
    fn name(&self) -> &Path {
        &self.name
    }

    fn bytes(&self) -> u64 {
        self.meta.size
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn fetch(
        &self,
        place: &Path,
        stop: &AtomicBool,
        report: &mut dyn FnMut(u64),
    ) -> Result<PathBuf> {
        let size = self.meta.size;
        if fs::metadata(place).is_ok_and(|found| found.len() == size) {
            report(size);
            return Ok(place.to_path_buf());
        }
        moh_files::create_parents(place).map_err(moh_files::io(place))?;
        let incomplete = place.with_added_extension("incomplete");
        let failed = moh_files::io(&incomplete);
        let mut out =
            File::options().create(true).append(true).open(&incomplete).map_err(&failed)?;
        let mut have = out.metadata().map_err(&failed)?.len();
        if have > size {
            out.set_len(0).map_err(&failed)?;
            have = 0;
        }
        report(have);
        let mut tries = 0;
        while have < size {
            let before = have;
            let read = self.read(&mut out, &mut have, stop, report);
            let done = self.bucket.runtime.block_on(read);
            tries = if have > before { 0 } else { tries + 1 };
            match done {
                Err(error @ Error::Download { .. }) if tries == MAX_TRIES => return Err(error),
                Ok(found) if found != size => {
                    have = found;
                    break;
                }
                Ok(_) if tries == MAX_TRIES => break,
                Ok(_) | Err(Error::Download { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        if have != size {
            let reason = format!("has {have} bytes instead of {size}: give the same command again");
            // Nothing of it can be continued.
            let _ = fs::remove_file(&incomplete);
            return Err(Error::Download { path: self.name.clone(), reason });
        }
        out.sync_all().map_err(&failed)?;
        fs::rename(&incomplete, place).map_err(&failed)?;
        Ok(place.to_path_buf())
    }
}

/// What `future` gives.
///
/// # Errors
/// Fails with [`Error::Interrupted`] when `stop` is set before.
async fn until<T>(stop: &AtomicBool, future: impl Future<Output = T>) -> Result<T> {
    let mut future = std::pin::pin!(future);
    loop {
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        if let Ok(done) = tokio::time::timeout(WAIT, &mut future).await {
            return Ok(done);
        }
    }
}

/// One sentence: what the store says, and what to do.
fn explain(name: &Path, error: StoreError) -> Error {
    let variables = match name.to_str().and_then(|name| name.split_once("://")) {
        Some(("s3", _)) => "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION",
        Some(("gs", _)) => "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS",
        _ => "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    };
    // Further lines are the body of an answer.
    let text = error.to_string();
    let text = text.lines().next().unwrap_or_default();
    // A listing that is refused has no variant of its own.
    let has_status = |status: &str| text.contains(&format!("status code: {status}"));
    let reason = match &error {
        StoreError::Precondition { .. } => {
            "has changed since it was listed: give the same command again".to_owned()
        }
        StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. } => {
            format!("access is denied: set {variables}")
        }
        _ if has_status("401") || has_status("403") => {
            format!("access is denied: set {variables}")
        }
        StoreError::NotFound { .. } => {
            "is not there: check the name of the bucket and of the object".to_owned()
        }
        _ if has_status("404") => "there is no such bucket: check its name".to_owned(),
        _ => format!("{text}: check {variables}, the network, and give the same command again"),
    };
    Error::Download { path: name.to_path_buf(), reason }
}
