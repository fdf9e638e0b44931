//! `machine.json`: the hardware and the program of a run since its last start.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::Result;

const MAX_BYTES: u64 = 64 << 10;

/// The hardware and the program of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The version of the program.
    pub version: String,
    /// Operating system and architecture.
    pub system: String,
    /// The first rank's processor. Empty if it is not known.
    pub processor: String,
    /// Threads of an operator on the first rank's CPU.
    pub threads: usize,
    /// The first rank's device.
    pub device: String,
    /// The number of ranks.
    pub ranks: usize,
}

impl Machine {
    /// Describes this machine, with the name of its processor and of the device on which `ranks` ranks train.
    pub fn new(processor: &str, device: String, ranks: usize) -> Self {
        Machine {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            processor: processor.to_owned(),
            threads: rayon::current_num_threads(),
            device,
            ranks,
        }
    }

    /// Reads the file at `path`. Returns `None` if it is missing.
    pub fn read(path: &Path) -> Result<Option<Self>> {
        let kind = "the description of a machine";
        let bytes = moh_files::read_bounded_if_any(path, MAX_BYTES, kind)?;
        let Some(bytes) = bytes else { return Ok(None) };
        let machine = serde_json::from_slice(&bytes).map_err(|error| {
            let reason = format!(
                "is not a description of a machine: {error}: remove the file, which the run writes again when it \
                 resumes"
            );
            moh_files::unusable(path, reason)
        })?;
        Ok(Some(machine))
    }

    /// Replaces the whole file at `path`.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text =
            serde_json::to_vec_pretty(self).map_err(|error| moh_files::io(path)(error.into()))?;
        Ok(moh_files::write(path, &text).map_err(moh_files::io(path))?)
    }
}

#[cfg(test)]
mod tests {
    use moh_testkit::assert_refused;

    use super::*;

    #[test]
    fn a_machine_is_read_as_it_was_written() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("machine.json");
        assert_eq!(Machine::read(&path).unwrap(), None);
        let machine = Machine::new("AMD EPYC, Zen 4", "the CPU".to_owned(), 2);
        machine.write(&path).unwrap();
        assert_eq!(Machine::read(&path).unwrap(), Some(machine));
        let whole = std::fs::read(&path).unwrap();
        for hostile in
            [&whole[..whole.len() / 2], b"", b"[]", b"{\"threads\":-1}", &[b'['; 1 << 15]]
        {
            std::fs::write(&path, hostile).unwrap();
            assert_refused(Machine::read(&path), "machine.json: is not a description of a machine");
        }
        std::fs::write(&path, vec![b'['; 1 << 20]).unwrap();
        let error = Machine::read(&path).unwrap_err().to_string();
        assert!(error.ends_with("the description of a machine has at most 65536"), "{error}");
    }
}
