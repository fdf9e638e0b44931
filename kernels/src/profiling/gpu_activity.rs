//! The work of this process's GPUs over time: every kernel, copy and fill with its start and end, recorded
//! by NVIDIA's CUPTI (the CUPTI library of the CUDA toolkit, or pip's `nvidia-cuda-cupti`).

#[cfg(feature = "cuda")]
mod recording;

#[cfg(feature = "cuda")]
pub use recording::Recording;

/// A kernel, copy or fill.
#[derive(Debug, Clone, PartialEq)]
pub struct Activity {
    /// The kernel's name, or the kind of the copy.
    pub name: String,
    /// The number of the activity's stream.
    pub stream: u32,
    /// Nanoseconds since a fixed time.
    pub start: u64,
    /// Nanoseconds since the same time as `start`.
    pub end: u64,
}

/// A recording of all GPU work of the process, which cannot start without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
pub enum Recording {}

#[cfg(not(feature = "cuda"))]
impl Recording {
    /// Returns an error.
    pub fn start() -> crate::Result<Self> {
        let reason = "this program was built without CUDA: build it with --features cuda";
        Err(crate::Error::device("CUPTI", "loading CUPTI", reason))
    }

    /// Returns an error: no recording exists.
    pub fn finish(self) -> crate::Result<Vec<Activity>> {
        match self {}
    }
}
