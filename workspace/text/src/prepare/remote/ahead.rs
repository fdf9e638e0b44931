//! Downloads ahead of use. While an input is read, a thread downloads only the next remote input, so that a dataset
//! larger than the disk can be read. Files that this program has downloaded to its own directory are removed after use.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::RemoteFile;
use crate::prepare::names::Input;
use crate::prepare::reader::Identity;
use crate::prepare::{Error, Result};

/// Interval at which a wait for a file checks whether to stop.
const WAIT: Duration = Duration::from_millis(50);
/// Maximum wait at the end for a download to stop. A download that waits for the hub is abandoned.
const STOP_WAIT: Duration = Duration::from_millis(500);

/// The inputs of a command, each with its path on this machine once it is downloaded.
pub(crate) struct Downloads {
    shared: Arc<Shared>,
    /// Receives remote files in order; `None` after the end.
    fetched: Mutex<Option<Receiver<Result<PathBuf>>>>,
    /// Not joined: the program may end while the hub does not answer.
    thread: JoinHandle<()>,
    total: u64,
}

struct Shared {
    inputs: Vec<Input>,
    /// Directory of this program's own downloads.
    directory: PathBuf,
    stop: AtomicBool,
    bytes: AtomicU64,
}

impl Downloads {
    /// Starts to download the remote inputs from number `first` on. Files that do not stay in the hub's cache go to
    /// `directory`.
    pub(crate) fn start(inputs: Vec<Input>, first: usize, directory: PathBuf) -> Self {
        let total =
            inputs.iter().skip(first).filter_map(Input::remote).map(RemoteFile::bytes).sum();
        let (stop, bytes) = (AtomicBool::new(false), AtomicU64::new(0));
        let shared = Arc::new(Shared { inputs, directory, stop, bytes });
        // Without room: the next download starts when this file is asked for.
        let (sender, receiver) = sync_channel(0);
        let thread = {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || shared.download(first, &sender))
        };
        Self { shared, fetched: Mutex::new(Some(receiver)), thread, total }
    }

    pub(crate) fn len(&self) -> usize {
        self.shared.inputs.len()
    }

    /// Returns the path of an input on this machine, and waits until it is downloaded. Remote inputs are asked for
    /// once, in order. Fails if the download fails, and with [`Error::Interrupted`] after the end.
    pub(crate) fn path(&self, number: usize) -> Result<PathBuf> {
        if let Input::Local(path) = &self.shared.inputs[number] {
            return Ok(path.clone());
        }
        while !self.shared.stop.load(Ordering::Relaxed) {
            let Some(fetched) = &*self.lock() else { break };
            match fetched.recv_timeout(WAIT) {
                Ok(fetched) => return fetched,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        Err(Error::Interrupted)
    }

    pub(crate) fn identity(&self, number: usize) -> Option<Identity> {
        let file = self.shared.inputs[number].remote()?;
        Some(Identity::of_version(file.bytes(), file.version()))
    }

    /// Removes a used input if it is this program's own download.
    pub(crate) fn release(&self, number: usize) -> Result<()> {
        let Some(file) = self.shared.inputs[number].remote() else { return Ok(()) };
        let place = self.shared.place(file);
        let directory = moh_files::parent(&place);
        Ok(moh_files::remove_directory(directory).map_err(moh_files::io(directory))?)
    }

    /// Returns the downloaded bytes of remote files, and the bytes of all that are needed.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.shared.bytes.load(Ordering::Relaxed), self.total)
    }

    /// Stops the downloads. A wait for a file gets an error.
    pub(crate) fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        // A thread with a file that nobody asks for also ends.
        drop(self.lock().take());
        let start = Instant::now();
        while !self.thread.is_finished() && start.elapsed() < STOP_WAIT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Receiver<Result<PathBuf>>>> {
        // Each change is one statement.
        self.fetched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Downloads {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    /// Downloads the remote inputs until a download fails, or nobody asks for the next input.
    fn download(&self, first: usize, fetched: &SyncSender<Result<PathBuf>>) {
        let mut before = 0;
        for file in self.inputs.iter().skip(first).filter_map(Input::remote) {
            let mut report = |bytes| self.bytes.store(before + bytes, Ordering::Relaxed);
            let path = file.fetch(&self.place(file), &self.stop, &mut report);
            before += file.bytes();
            let has_failed = path.is_err();
            if fetched.send(path).is_err() || has_failed {
                return;
            }
        }
    }

    /// Returns the path of a remote file in the directory of downloads. The folder is named by address and version, so
    /// that another version never resumes the download. The file's own name stays, because its ending may decide the
    /// format.
    fn place(&self, file: &RemoteFile) -> PathBuf {
        let mut hasher = blake3::Hasher::new();
        hasher.update(file.name().as_os_str().as_encoded_bytes());
        hasher.update(b"\0").update(file.version().as_bytes());
        let folder = hasher.finalize().to_hex();
        self.directory.join(&folder[..16]).join(file.name().file_name().unwrap_or_default())
    }
}
