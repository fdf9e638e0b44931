//! Downloads ahead of use: while inputs are read, a thread fetches the next remote ones, in order. A few files wait
//! to be used at most, so that a dataset larger than the disk passes through it. What this program has downloaded
//! to its own directory is removed when it was used.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{RemoteFile, place};
use crate::names::Input;
use crate::reader::Identity;
use crate::{Error, Result};

/// Files that are here and not yet in use, the one that arrives among them.
const FILES_AHEAD: usize = 4;
/// How long the end waits for a download to notice it: one that waits for its server is left alone.
const STOP_WAIT: Duration = Duration::from_millis(500);

/// The inputs of a command, each with its path on this machine once it is there.
pub(crate) struct Downloads(Arc<Shared>);

struct Shared {
    inputs: Vec<Input>,
    /// Of this program's own downloads.
    directory: PathBuf,
    stop: AtomicBool,
    /// Bytes of remote files that are here.
    bytes: AtomicU64,
    /// Bytes of all remote files.
    total: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Files that were fetched and are not yet in use.
    fetched: BTreeMap<usize, Result<PathBuf>>,
    has_ended: bool,
}

impl Downloads {
    /// Begins to download the remote ones of `inputs` from number `first` on; `directory` is for those that no
    /// other program shares.
    pub(crate) fn start(inputs: Vec<Input>, first: usize, directory: PathBuf) -> Self {
        let remote = inputs.iter().skip(first).filter_map(Input::remote);
        let (count, total) = remote.fold((0, 0), |(n, sum), file| (n + 1, sum + file.bytes()));
        let shared = Arc::new(Shared {
            inputs,
            directory,
            stop: AtomicBool::new(false),
            bytes: AtomicU64::new(0),
            total,
            state: Mutex::new(State { fetched: BTreeMap::new(), has_ended: count == 0 }),
            changed: Condvar::new(),
        });
        if count > 0 {
            let shared = Arc::clone(&shared);
            // Not joined: the program may end while a server does not answer.
            std::thread::spawn(move || {
                let _end = End(&shared);
                shared.download(first);
            });
        }
        Self(shared)
    }

    /// The number of inputs.
    pub(crate) fn len(&self) -> usize {
        self.0.inputs.len()
    }

    /// The path of an input on this machine, when it is there. A remote input is asked for once, in order.
    ///
    /// # Errors
    /// Fails if it cannot be downloaded.
    pub(crate) fn path(&self, number: usize) -> Result<PathBuf> {
        loop {
            if let Some(path) = self.path_within(number, Duration::MAX)? {
                return Ok(path);
            }
        }
    }

    /// As [`Downloads::path`]; `None` if it is not there after `wait`, and is to be asked for again.
    ///
    /// # Errors
    /// As [`Downloads::path`].
    pub(crate) fn path_within(&self, number: usize, wait: Duration) -> Result<Option<PathBuf>> {
        if let Input::Local(path) = &self.0.inputs[number] {
            return Ok(Some(path.clone()));
        }
        let has_ended = |state: &State| state.has_ended || self.0.stop.load(Ordering::Relaxed);
        let is_awaited =
            |state: &mut State| !state.fetched.contains_key(&number) && !has_ended(state);
        let waited = self.0.changed.wait_timeout_while(self.0.lock(), wait, is_awaited);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match state.fetched.remove(&number) {
            Some(fetched) => {
                self.0.changed.notify_all();
                fetched.map(Some)
            }
            None if has_ended(&state) => Err(Error::Interrupted),
            None => Ok(None),
        }
    }

    /// What identifies the content of a remote input.
    pub(crate) fn identity(&self, number: usize) -> Option<Identity> {
        let file = self.0.inputs[number].remote()?;
        Some(Identity::of_version(file.bytes(), file.version()))
    }

    /// Removes an input that was used, if it is this program's own download.
    ///
    /// # Errors
    /// Fails if it cannot be removed.
    pub(crate) fn release(&self, number: usize) -> Result<()> {
        let Some(file) = self.0.inputs[number].remote() else { return Ok(()) };
        let place = place(&self.0.directory, file.as_ref());
        let directory = moh_files::parent(&place);
        Ok(moh_files::remove_directory(directory).map_err(moh_files::io(directory))?)
    }

    /// Bytes of remote files that are here, and of all that are needed.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.0.bytes.load(Ordering::Relaxed), self.0.total)
    }

    /// Ends the downloads; who waits for one gets an error.
    pub(crate) fn stop(&self) {
        let state = self.0.lock();
        self.0.stop.store(true, Ordering::Relaxed);
        self.0.changed.notify_all();
        // What comes of it does not matter: the thread writes nothing more.
        let _ = self.0.changed.wait_timeout_while(state, STOP_WAIT, |state| !state.has_ended);
    }
}

impl Drop for Downloads {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn download(&self, first: usize) {
        let mut before = 0;
        for (number, input) in self.inputs.iter().enumerate().skip(first) {
            let Some(file) = input.remote() else { continue };
            let is_full = |state: &mut State| {
                state.fetched.len() >= FILES_AHEAD && !self.stop.load(Ordering::Relaxed)
            };
            drop(self.changed.wait_while(self.lock(), is_full));
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let fetched = self.fetch(file, before);
            before += file.bytes();
            let has_failed = fetched.is_err();
            self.lock().fetched.insert(number, fetched);
            self.changed.notify_all();
            if has_failed {
                return;
            }
        }
    }

    fn fetch(&self, file: &Arc<dyn RemoteFile>, before: u64) -> Result<PathBuf> {
        let place = place(&self.directory, file.as_ref());
        let mut report = |bytes| self.bytes.store(before + bytes, Ordering::Relaxed);
        file.fetch(&place, &self.stop, &mut report)
    }
}

/// Says that the thread has ended, however it does.
struct End<'a>(&'a Shared);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.lock().has_ended = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    /// A file whose content is its name.
    struct Named {
        name: PathBuf,
        fetched: Arc<Mutex<Vec<PathBuf>>>,
    }

    impl RemoteFile for Named {
        fn name(&self) -> &Path {
            &self.name
        }
        fn bytes(&self) -> u64 {
            10
        }
        fn version(&self) -> &str {
            "1"
        }
        fn fetch(
            &self,
            place: &Path,
            stop: &AtomicBool,
            report: &mut dyn FnMut(u64),
        ) -> Result<PathBuf> {
            self.fetched.lock().unwrap().push(self.name.clone());
            if self.name.ends_with("stalled") {
                while !stop.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                return Err(Error::Interrupted);
            }
            if self.name.ends_with("missing") {
                return Err(Error::input(&self.name, "is missing"));
            }
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(place, self.name.to_str().unwrap()).unwrap();
            report(10);
            Ok(place.to_path_buf())
        }
    }

    struct Test {
        dir: tempfile::TempDir,
        fetched: Arc<Mutex<Vec<PathBuf>>>,
    }

    impl Test {
        fn new() -> Self {
            Self { dir: tempfile::tempdir().unwrap(), fetched: Arc::default() }
        }

        fn start(&self, names: &[&str], first: usize) -> Downloads {
            let input = |name: &&str| match name.strip_prefix("s3://") {
                None => Input::Local(PathBuf::from(name)),
                Some(_) => {
                    let (name, fetched) = (PathBuf::from(name), Arc::clone(&self.fetched));
                    Input::Remote(Arc::new(Named { name, fetched }))
                }
            };
            let inputs = names.iter().map(input).collect();
            Downloads::start(inputs, first, self.dir.path().join("downloads"))
        }

        fn count(&self) -> usize {
            self.fetched.lock().unwrap().len()
        }

        /// Waits until so many files were asked for, and none after them.
        fn wait_for(&self, count: usize) {
            while self.count() < count {
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(30));
            assert_eq!(self.count(), count);
        }
    }

    #[test]
    fn a_few_files_are_fetched_ahead_and_removed_after_use() {
        let test = Test::new();
        let names: Vec<_> = (0..9).map(|n| format!("s3://b/{n}.txt")).collect();
        let mut names: Vec<_> = names.iter().map(String::as_str).collect();
        names.insert(1, "local.txt");
        let downloads = test.start(&names, 0);
        test.wait_for(FILES_AHEAD);
        let path = downloads.path(0).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "s3://b/0.txt");
        assert!(path.ends_with("0.txt"));
        test.wait_for(FILES_AHEAD + 1);
        assert_eq!(downloads.path(1).unwrap(), Path::new("local.txt"));
        downloads.release(0).unwrap();
        downloads.release(1).unwrap();
        assert!(!path.exists());
        test.wait_for(FILES_AHEAD + 1);
        for number in 2..10 {
            assert!(downloads.path(number).unwrap().exists());
        }
        assert_eq!(downloads.bytes(), (90, 90));
        drop(downloads);
        // What was used before is not fetched again.
        test.fetched.lock().unwrap().clear();
        let downloads = test.start(&names, 9);
        downloads.path(9).unwrap();
        assert_eq!((test.count(), downloads.bytes()), (1, (10, 10)));
    }

    #[test]
    fn a_failure_reaches_its_file_and_an_end_those_who_wait() {
        let test = Test::new();
        let downloads = test.start(&["s3://b/a", "s3://b/missing", "s3://b/c"], 0);
        downloads.path(0).unwrap();
        let error = downloads.path(1).unwrap_err().to_string();
        assert_eq!(error, "s3://b/missing: is missing");
        assert!(matches!(downloads.path(2), Err(Error::Interrupted)));
        let downloads = test.start(&["s3://b/stalled"], 0);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| downloads.path(0));
            assert!(downloads.path_within(0, Duration::from_millis(20)).unwrap().is_none());
            assert!(!waiting.is_finished());
            downloads.stop();
            assert!(matches!(waiting.join().unwrap(), Err(Error::Interrupted)));
        });
    }
}
