//! Which of a plan's algorithms is the fastest on this GPU.

use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use cudarc::driver::result::event;
use cudarc::driver::sys::{CUevent, CUevent_flags, CUstream};

use super::plan::Plan;
use super::{Gemm, Library};

/// Products of an algorithm that are timed together, after one that is not.
const TIMED: usize = 3;
/// What a product is multiplied by while algorithms are timed, where it is added to its own output:
/// too little to change it, while 0 would let the library leave the product out.
const NOTHING: f32 = 1e-30;

/// Two events on a stream.
pub(super) struct Stopwatch {
    stream: CUstream,
    start: CUevent,
    end: CUevent,
}

impl Stopwatch {
    /// None where the driver has no events left.
    pub(super) fn new(stream: CUstream) -> Option<Self> {
        let event = || event::create(CUevent_flags::CU_EVENT_DEFAULT).ok();
        Some(Stopwatch { stream, start: event()?, end: event()? })
    }

    /// Milliseconds of what `work` starts on the stream; none where it fails.
    fn time(&self, work: impl FnOnce() -> Option<()>) -> Option<f32> {
        // SAFETY: the events and the stream are whole.
        #[allow(unsafe_code)]
        unsafe {
            event::record(self.start, self.stream).ok()?;
            work()?;
            event::record(self.end, self.stream).ok()?;
            event::synchronize(self.end).ok()?;
            event::elapsed(self.start, self.end).ok()
        }
    }
}

impl Drop for Stopwatch {
    fn drop(&mut self) {
        for event in [self.start, self.end] {
            // SAFETY: the event is whole and not used any more. Nobody is there to hear of a failure.
            #[allow(unsafe_code)]
            let _ = unsafe { event::destroy(event) };
        }
    }
}

impl Plan {
    /// Times every algorithm on the operands of `gemm`, whose output is written but, where it is added
    /// to, not changed. Algorithms that fail are not chosen.
    pub(super) fn put_first_the_fastest(
        &mut self,
        library: &Library,
        gemm: &Gemm,
        stopwatch: &Stopwatch,
    ) {
        let in_place = gemm.addend == Some(gemm.out.address);
        let scale = if in_place { NOTHING } else { 1.0 };
        let time = |algorithm: &cublasLtMatmulAlgo_t| {
            let run = || library.multiply(self, algorithm, gemm, scale, stopwatch.stream).ok();
            run()?;
            stopwatch.time(|| (0..TIMED).try_for_each(|_| run()))
        };
        let times: Vec<f32> =
            self.algorithms.iter().map(|found| time(found).unwrap_or(f32::INFINITY)).collect();
        let fastest = (0..times.len()).min_by(|&a, &b| times[a].total_cmp(&times[b]));
        self.algorithms.swap(0, fastest.unwrap_or(0));
    }
}
