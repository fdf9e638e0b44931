//! Which of a plan's algorithms is the fastest on this GPU.

use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use cudarc::driver::result::event;
use cudarc::driver::sys::{CUevent, CUevent_flags, CUstream};

use super::plan::Plan;
use super::{Gemm, Library};

/// Products of an algorithm that are timed together, after one that is not.
const TIMED: usize = 3;
/// What a product is multiplied by while algorithms are timed, where it is added to its own output: of
/// the product that follows, too little to count, while 0 would let the library leave it out.
const NOTHING: f32 = 1e-30;

/// Two events on a stream.
struct Stopwatch {
    stream: CUstream,
    start: CUevent,
    end: CUevent,
}

impl Stopwatch {
    /// None where the driver has no events left.
    fn new(stream: CUstream) -> Option<Self> {
        let event = || event::create(CUevent_flags::CU_EVENT_DEFAULT).ok();
        let start = event()?;
        let Some(end) = event() else {
            destroy(start);
            return None;
        };
        Some(Stopwatch { stream, start, end })
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
        destroy(self.start);
        destroy(self.end);
    }
}

/// Gives back an event that is not used any more.
fn destroy(event: CUevent) {
    // SAFETY: `Stopwatch::new` made the event. Nobody is there to hear of a failure.
    #[allow(unsafe_code)]
    let _ = unsafe { event::destroy(event) };
}

impl Plan {
    /// Times every algorithm on the operands of `gemm`. Its output is overwritten, or where the product
    /// is added to it changes by next to nothing. Algorithms that fail are not chosen.
    pub(super) fn put_first_the_fastest(
        &mut self,
        library: &Library,
        gemm: &Gemm,
        stream: CUstream,
    ) {
        let Some(stopwatch) = Stopwatch::new(stream) else { return };
        let in_place = gemm.addend == Some(gemm.out.address);
        let scale = if in_place { NOTHING } else { 1.0 };
        let time = |algorithm: &cublasLtMatmulAlgo_t| {
            let run = || library.multiply(self, algorithm, gemm, scale, stream).ok();
            run()?;
            stopwatch.time(|| (0..TIMED).try_for_each(|_| run()))
        };
        let times: Vec<f32> =
            self.algorithms.iter().map(|found| time(found).unwrap_or(f32::INFINITY)).collect();
        let fastest = (0..times.len()).min_by(|&a, &b| times[a].total_cmp(&times[b]));
        self.algorithms.swap(0, fastest.unwrap_or(0));
    }
}
