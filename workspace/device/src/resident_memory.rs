//! The memory of this process, as the operating system counts it.

/// Resident memory of this process in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResidentMemory {
    /// Now.
    pub now: u64,
    /// The maximum so far.
    pub peak: u64,
}

impl ResidentMemory {
    /// Reads it from `/proc/self/status`; `None` where the system has no such file.
    pub fn read() -> Option<Self> {
        let status = std::fs::read_to_string("/proc/self/status").ok()?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            let kilobytes: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
            Some(kilobytes * 1024)
        };
        Some(ResidentMemory { now: field("VmRSS:")?, peak: field("VmHWM:")? })
    }
}
