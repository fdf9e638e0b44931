//! The memory of this process and of its machine, as the operating system counts it.

/// Resident memory of this process in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResidentMemory {
    /// Now.
    pub now: u64,
    /// The maximum so far.
    pub peak: u64,
}

impl ResidentMemory {
    /// Reads the resident memory from `/proc/self/status`; `None` if the system has no such file.
    pub fn read() -> Option<Self> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        Some(ResidentMemory { now: bytes(&status, "VmRSS:")?, peak: bytes(&status, "VmHWM:")? })
    }
}

/// Returns the available memory of this machine in bytes; `None` if the system does not report it.
pub fn available_memory() -> Option<u64> {
    bytes(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// Returns the bytes of a line `NAME: N kB`.
fn bytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_and_others_are_none() {
        let text = "MemTotal:  100 kB\nMemAvailable:   24 kB\nOdd: 3 MB\n";
        assert_eq!(bytes(text, "MemAvailable:"), Some(24 * 1024));
        assert_eq!((bytes(text, "Odd:"), bytes(text, "VmRSS:")), (None, None));
        let most = format!("VmRSS: {} kB", u64::MAX);
        assert_eq!(bytes(&most, "VmRSS:"), None);
    }
}
