//! The cores and caches of this machine, as Linux lists them in `/sys/devices/system/cpu`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Maximum bytes of a value: a list of all processors of a large machine is shorter.
const MAX_BYTES: u64 = 1 << 16;

/// Cores and caches; a system that does not list them, or not in this way, has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Topology {
    /// Cores, each with one or several hardware threads.
    pub cores: Option<usize>,
    /// Bytes of all caches of the last level together.
    pub last_level_cache: Option<u64>,
}

/// A cache: its level, and the processors that share it.
type Cache = (u8, String);

impl Topology {
    /// Reads the machine's.
    pub fn read() -> Self {
        Self::under(Path::new("/sys/devices/system/cpu"))
    }

    fn under(root: &Path) -> Self {
        let mut cores = BTreeSet::new();
        let mut caches: BTreeMap<Cache, u64> = BTreeMap::new();
        for processor in numbered(root, "cpu") {
            cores.extend(value(&processor.join("topology/thread_siblings_list")));
            let directories = numbered(&processor.join("cache"), "index");
            caches.extend(directories.iter().filter_map(|directory| cache(directory)));
        }
        let last = caches.keys().map(|(level, _)| *level).max();
        let sizes = caches.iter().filter(|((level, _), _)| Some(*level) == last);
        Topology {
            cores: (!cores.is_empty()).then_some(cores.len()),
            last_level_cache: last
                .map(|_| sizes.fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes))),
        }
    }
}

/// The directories of a name and a number within another.
fn numbered(directory: &Path, name: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    entries
        .filter(|entry| {
            entry
                .file_name()
                .to_str()
                .and_then(|found| found.strip_prefix(name))
                .is_some_and(is_number)
        })
        .map(|entry| entry.path())
        .collect()
}

/// The data cache of a directory, and its bytes.
fn cache(directory: &Path) -> Option<(Cache, u64)> {
    if value(&directory.join("type"))? == "Instruction" {
        return None;
    }
    let level = value(&directory.join("level"))?.parse().ok()?;
    let shared = value(&directory.join("shared_cpu_list"))?;
    let kibibytes: u64 = value(&directory.join("size"))?.strip_suffix('K')?.parse().ok()?;
    Some(((level, shared), kibibytes.checked_mul(1024)?))
}

/// The text of a file without the spaces around it, if it has any and is no longer than a value can be.
fn value(path: &Path) -> Option<String> {
    let mut text = String::new();
    File::open(path).ok()?.take(MAX_BYTES + 1).read_to_string(&mut text).ok()?;
    let value = text.trim();
    (!value.is_empty() && text.len() as u64 <= MAX_BYTES).then(|| value.to_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // A test fails by panicking.
mod tests {
    use super::*;

    /// Writes a file and the directories above it.
    fn write(root: &Path, path: &str, content: impl AsRef<[u8]>) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    /// A processor with first-level caches of its own, and a last-level cache.
    fn processor(root: &Path, number: usize, siblings: &str, sharers: &str, size: &str) {
        let path = |rest: &str| format!("cpu{number}/{rest}");
        write(root, &path("topology/thread_siblings_list"), siblings);
        for (index, level, kind, size, sharers) in [
            (0, "1", "Data", "32K", siblings),
            (1, "1", "Instruction", "32K", siblings),
            (2, "3", "Unified", size, sharers),
        ] {
            write(root, &path(&format!("cache/index{index}/level")), level);
            write(root, &path(&format!("cache/index{index}/type")), kind);
            write(root, &path(&format!("cache/index{index}/size")), size);
            write(root, &path(&format!("cache/index{index}/shared_cpu_list")), sharers);
        }
    }

    #[test]
    fn threads_of_a_core_and_sharers_of_a_cache_count_once() {
        let root = tempfile::tempdir().unwrap();
        for (number, siblings, sharers) in [
            (0, "0,3\n", "0-1,3\n"),
            (1, "1\n", "0-1,3\n"),
            (2, "2\n", "2\n"),
            (3, "0,3\n", "0-1,3\n"),
        ] {
            processor(root.path(), number, siblings, sharers, "32768K\n");
        }
        // Neighbours of the processors.
        write(root.path(), "cpufreq/cache/index0/level", "9");
        write(root.path(), "online", "0-3\n");
        let expected = Topology { cores: Some(3), last_level_cache: Some(64 << 20) };
        assert_eq!(Topology::under(root.path()), expected);
    }

    #[test]
    fn what_is_missing_or_makes_no_sense_does_not_count() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(Topology::under(root.path()), Topology::default());
        assert_eq!(Topology::under(&root.path().join("nowhere")), Topology::default());
        let long = "0,".repeat(MAX_BYTES as usize);
        for (number, siblings, size) in [
            (0, "", ""),
            (1, " \n", "K"),
            (2, long.as_str(), "-1K"),
            (3, "", "18446744073709551615K"),
            (4, "", "99999999999999999999999K"),
            (5, "", "32"),
            (6, "", long.as_str()),
        ] {
            processor(root.path(), number, siblings, &number.to_string(), size);
        }
        write(root.path(), "cpu7/topology/thread_siblings_list", [0xff, 0xfe]);
        write(root.path(), "cpu8/cache/index0/level", "300");
        write(root.path(), "cpu9/topology", "a file where a directory is expected");
        assert_eq!(Topology::under(root.path()), Topology::default());
        // Two sizes whose sum is too large.
        for number in [10, 11] {
            let size = format!("{}K", u64::MAX / 1024);
            processor(root.path(), number, "10", &number.to_string(), &size);
        }
        let found = Topology::under(root.path());
        assert_eq!(found, Topology { cores: Some(1), last_level_cache: Some(u64::MAX) });
    }
}
